// Kernels and their arguments, declared once.
//
//   #define FIELDS(X) X(ptr, a) X(i64, rows) X(f32, clamp)
//   DG_ARGS(Args, FIELDS)
//   DG_KERNEL(name, Args, threads, lds_bytes) { .. args.rows .. lds .. }
//
// The text of the fields goes with the kernel, so a caller packs arguments by name and needs no second declaration:
// the host library has a list of its kernels, a code object a variable `<kernel>_about` for each, which is read from the
// file.
#pragma once

#include <dg_hip/arch.h>

#define DG_FIELD_MEMBER(type, name) type name;
#define DG_FIELD_TEXT(type, name) #type " " #name ";"
#define DG_ARGS(Args, FIELDS)                                    \
    struct Args {                                                \
        FIELDS(DG_FIELD_MEMBER)                                  \
        static constexpr char kFields[] = FIELDS(DG_FIELD_TEXT); \
    };

// Local memory of a block: what gfx938 and gfx950 both have for one workgroup.
namespace dg_hip {
constexpr int kMostLds = 65536;

template <unsigned kSize>
struct About {
    u32 threads, bytes, lds;
    char fields[kSize];
};

template <class Args>
constexpr About<sizeof(Args::kFields)> about(u32 threads, u32 lds) {
    About<sizeof(Args::kFields)> told{threads, sizeof(Args), lds, {}};
    for (unsigned i = 0; i < sizeof(Args::kFields); ++i)
        told.fields[i] = Args::kFields[i];
    return told;
}

}  // namespace dg_hip

#if defined(DG_HIP_HOST)
#define DG_KERNEL(name, Args, threads, lds_bytes)                                                 \
    static_assert(lds_bytes <= dg_hip::kMostLds && threads % dg_hip::kWave == 0);                 \
    static void name(const Args& args, dg_hip::u8* lds);                                          \
    static const dg_hip::host::Registration name##_registration(                                  \
        {#name, Args::kFields, threads, sizeof(Args), lds_bytes,                                  \
         [](const void* args, dg_hip::u8* lds) { name(*static_cast<const Args*>(args), lds); }}); \
    static void name([[maybe_unused]] const Args& args, [[maybe_unused]] dg_hip::u8* lds)
#else
#define DG_KERNEL(name, Args, threads, lds_bytes)                                 \
    static_assert(lds_bytes <= dg_hip::kMostLds && threads % dg_hip::kWave == 0); \
    extern "C" DG_TOLD dg_hip::About<sizeof(Args::kFields)> name##_about =        \
        dg_hip::about<Args>(threads, lds_bytes);                                  \
    DG_DEVICE void name##_body(const Args& args, dg_hip::u8* lds);                \
    extern "C" DG_GLOBAL(threads) void name(const Args args) {                    \
        DG_LDS(dg_hip::U32x4, lds, lds_bytes > 0 ? (lds_bytes + 15) / 16 : 1);    \
        name##_body(args, reinterpret_cast<dg_hip::u8*>(lds));                    \
    }                                                                             \
    DG_DEVICE void name##_body([[maybe_unused]] const Args& args, [[maybe_unused]] dg_hip::u8* lds)
#endif
