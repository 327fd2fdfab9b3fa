// Logits of the indexer, over contiguous keys and over a paged cache; and the work split of the paged ones.
#include <dg_hip/kernel.h>
#include <dg_hip/logits/split.h>
#include <dg_hip/logits/stream.h>

namespace dg_hip::logits {

// A group is what a block has of the rows of a request; the plain form is one request. Its keys are shared by `parts`
// blocks. Distances are in bytes; rows of q, keys and pages start at multiples of 16.
#define COMMON_FIELDS(X)            \
    X(ptr, q)                       \
    X(ptr, q_sf)                    \
    X(ptr, weights)                 \
    X(ptr, out)                     \
    X(i64, q_request)               \
    X(i64, q_row)                   \
    X(i64, q_head)                  \
    X(i64, sf_request)              \
    X(i64, sf_row)                  \
    X(i64, sf_head)                 \
    X(i64, weights_row)             \
    X(i64, weights_head)            \
    X(i64, out_row)                 \
    X(i64, rows) /* of a request */ \
    X(i64, columns)                 \
    X(i32, parts)                   \
    X(i32, head_bits)               \
    X(i32, weights_dtype)           \
    X(i32, out_dtype)               \
    X(i32, clean)

#define PLAIN_FIELDS(X) \
    COMMON_FIELDS(X)    \
    X(ptr, kv)          \
    X(ptr, kv_sf)       \
    X(ptr, start)       \
    X(ptr, end)         \
    X(i64, keys)        \
    X(i64, kv_key)      \
    X(i64, kv_sf_key)   \
    X(i64, start_row)   \
    X(i64, end_row)     \
    X(i32, compressed)

#define PAGED_FIELDS(X)                                         \
    COMMON_FIELDS(X)                                            \
    X(ptr, cache)                                               \
    X(ptr, table)                                               \
    X(ptr, lens)                                                \
    X(i64, pages)                                               \
    X(i64, page)                                                \
    X(i64, width) /* pages of a request, by the block table */  \
    X(i64, table_request)                                       \
    X(i64, table_page)                                          \
    X(i64, lens_request)                                        \
    X(i64, lens_row)                                            \
    X(i32, page_bits) /* binary logarithm of the keys a page */ \
    X(i32, lens_of_rows)

DG_ARGS(PlainArgs, PLAIN_FIELDS)
DG_ARGS(PagedArgs, PAGED_FIELDS)

// Which rows are this block's.
struct Share {
    i64 request, first;
    i32 part, count;

    template <class Args>
    DG_DEVICE explicit Share(const Args& args) {
        const u32 most_rows = kPairs >> args.head_bits, parts = static_cast<u32>(args.parts);
        const u32 groups = static_cast<u32>(ceil_div(args.rows, most_rows)), group = block() / parts;
        part = static_cast<i32>(block() % parts);
        request = group / groups, first = static_cast<i64>(group % groups) * most_rows;
        count = static_cast<i32>(least<i64>(most_rows, args.rows - first));
    }
};

template <class Args>
DG_DEVICE Rows rows_of(const Args& args, const Share& share) {
    const i64 row = share.request * args.rows + share.first;  // of weights and logits
    return {args.q + share.request * args.q_request + share.first * args.q_row,
            args.q_sf + share.request * args.sf_request + share.first * args.sf_row,
            args.weights + row * args.weights_row,
            args.out + row * args.out_row,
            args.q_row,
            args.q_head,
            args.sf_row,
            args.sf_head,
            args.weights_row,
            args.weights_head,
            args.out_row,
            args.columns,
            share.count,
            args.head_bits,
            args.weights_dtype,
            args.out_dtype,
            args.clean != 0};
}

// Where a key's bytes and its scale, of four bytes, lie.
struct PlainKeys {
    const u8 *kv, *kv_sf;
    i64 key_bytes, scale_bytes, count;

    DG_DEVICE const u8* at(i64 key) const { return kv + key * key_bytes; }
    DG_DEVICE const u8* scale_at(i64 key) const { return kv_sf + key * scale_bytes; }
};

// A page has the bytes of all its keys, then all their scales. A number that names no page is clipped.
struct PagedKeys {
    const u8 *cache, *table;
    i64 page, pages, table_page, count;
    i32 page_bits, key_bytes;

    DG_DEVICE const u8* page_of(i64 key) const {
        const i64 number = load<i32>(table + (key >> page_bits) * table_page);
        return cache + most<i64>(least(number, pages - 1), 0) * page;
    }
    DG_DEVICE i64 inside(i64 key) const { return key & ((1 << page_bits) - 1); }
    DG_DEVICE const u8* at(i64 key) const { return page_of(key) + inside(key) * key_bytes; }
    DG_DEVICE const u8* scale_at(i64 key) const {
        return page_of(key) + (static_cast<i64>(key_bytes) << page_bits) + inside(key) * 4;
    }
};

template <class F>
DG_DEVICE void plain(const PlainArgs& args, u8* lds) {
    const Share share(args);
    const PlainKeys keys{args.kv, args.kv_sf, args.kv_key, args.kv_sf_key, args.keys};
    const auto range = [&](i32 row) {
        const i64 start = load<i32>(args.start + (share.first + row) * args.start_row);
        const i64 end = load<i32>(args.end + (share.first + row) * args.end_row);
        return Range::clipped(start, end, args.compressed ? start : 0, args.keys, args.columns);
    };
    stream<F>(rows_of(args, share), keys, range, share.part, args.parts, lds);
}

template <class F>
DG_DEVICE void paged(const PagedArgs& args, u8* lds) {
    const Share share(args);
    const i64 count = args.pages > 0 ? args.width << args.page_bits : 0;
    const PagedKeys keys{args.cache,      args.table + share.request * args.table_request,
                         args.page,       args.pages,
                         args.table_page, count,
                         args.page_bits,  F::kBytes};
    const auto range = [&](i32 row) {
        const u8* const lens = args.lens + share.request * args.lens_request;
        const i64 number = share.first + row;
        // One length for all rows is the last one's; each row before it sees a key less.
        const i64 seen = args.lens_of_rows ? load<i32>(lens + number * args.lens_row)
                                           : load<i32>(lens) - (args.rows - 1 - number);
        return Range::clipped(0, seen, 0, count, args.columns);
    };
    stream<F>(rows_of(args, share), keys, range, share.part, args.parts, lds);
}

using Fp8D32 = Format<32, false>;
using Fp8D64 = Format<64, false>;
using Fp8D128 = Format<128, false>;
using Fp4D64 = Format<64, true>;
using Fp4D128 = Format<128, true>;

DG_KERNEL(mqa_logits_fp8_d32, PlainArgs, kThreads, sizeof(Local<Fp8D32>)) {
    plain<Fp8D32>(args, lds);
}
DG_KERNEL(mqa_logits_fp8_d64, PlainArgs, kThreads, sizeof(Local<Fp8D64>)) {
    plain<Fp8D64>(args, lds);
}
DG_KERNEL(mqa_logits_fp8_d128, PlainArgs, kThreads, sizeof(Local<Fp8D128>)) {
    plain<Fp8D128>(args, lds);
}
DG_KERNEL(mqa_logits_fp4_d64, PlainArgs, kThreads, sizeof(Local<Fp4D64>)) {
    plain<Fp4D64>(args, lds);
}
DG_KERNEL(mqa_logits_fp4_d128, PlainArgs, kThreads, sizeof(Local<Fp4D128>)) {
    plain<Fp4D128>(args, lds);
}
DG_KERNEL(paged_mqa_logits_fp8_d32, PagedArgs, kThreads, sizeof(Local<Fp8D32>)) {
    paged<Fp8D32>(args, lds);
}
DG_KERNEL(paged_mqa_logits_fp8_d64, PagedArgs, kThreads, sizeof(Local<Fp8D64>)) {
    paged<Fp8D64>(args, lds);
}
DG_KERNEL(paged_mqa_logits_fp8_d128, PagedArgs, kThreads, sizeof(Local<Fp8D128>)) {
    paged<Fp8D128>(args, lds);
}
DG_KERNEL(paged_mqa_logits_fp4_d64, PagedArgs, kThreads, sizeof(Local<Fp4D64>)) {
    paged<Fp4D64>(args, lds);
}
DG_KERNEL(paged_mqa_logits_fp4_d128, PagedArgs, kThreads, sizeof(Local<Fp4D128>)) {
    paged<Fp4D128>(args, lds);
}

#define METADATA_FIELDS(X) \
    X(ptr, lens)           \
    X(ptr, out)            \
    X(i64, batch)          \
    X(i64, next_n)         \
    X(i64, lens_request)   \
    X(i64, lens_row)       \
    X(i64, processors)

DG_ARGS(MetadataArgs, METADATA_FIELDS)

DG_KERNEL(paged_mqa_logits_metadata, MetadataArgs, kThreads, kThreads * 8) {
    const auto units = [&](i64 request) {
        i64 longest = 0;
        for (i64 row = 0; row < args.next_n; ++row)
            longest =
                most<i64>(longest, load<i32>(args.lens + request * args.lens_request + row * args.lens_row));
        return ceil_div(longest, kUnit);
    };
    const auto put = [&](i64 processor, i64 request, i64 unit) {
        store(args.out + processor * 8, static_cast<i32>(request));
        store(args.out + processor * 8 + 4, static_cast<i32>(unit));
    };
    split(args.batch, args.processors, units, put, reinterpret_cast<i64*>(lds));
}

}  // namespace dg_hip::logits
