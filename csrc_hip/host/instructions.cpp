// What a wave's instructions compute, for all of its lanes at once.
#include <cstring>

#include <dg_hip/convert.h>

namespace dg_hip::host {

namespace {

template <class T>
T& of(void* lane) {
    return *static_cast<T*>(lane);
}

struct Table {
    f32 values[256];
    Table() {
        for (int i = 0; i < 256; ++i)
            values[i] = from_fp8(static_cast<u8>(i));
    }
};

// P and Q^T as float32, k outside: then the innermost loop runs along q and is made of vectors.
template <int kSteps>
void multiply(void* const* lanes, const f32 (&p)[kMmaM][kSteps], const f32 (&q)[kSteps][kMmaN]) {
    f32 sum[kMmaM][kMmaN];
    for (int lane = 0; lane < kWave; ++lane)
        for (int slot = 0; slot < 4; ++slot) {
            const Coord at = result(kResultMap, lane, slot);
            sum[at.row][at.col] = of<Multiply>(lanes[lane]).acc[slot];
        }
    for (int k = 0; k < kSteps; ++k)
        for (int row = 0; row < kMmaM; ++row)
            for (int col = 0; col < kMmaN; ++col)
                sum[row][col] += p[row][k] * q[k][col];
    for (int lane = 0; lane < kWave; ++lane)
        for (int slot = 0; slot < 4; ++slot) {
            const Coord at = result(kResultMap, lane, slot);
            of<Multiply>(lanes[lane]).acc[slot] = sum[at.row][at.col];
        }
}

}  // namespace

void nothing(void* const*) {}

void shuffle_all(void* const* lanes) {
    for (int lane = 0; lane < kWave; ++lane) {
        Shuffle& own = of<Shuffle>(lanes[lane]);
        own.result = of<Shuffle>(lanes[own.from]).value;
    }
}

void ballot_all(void* const* lanes) {
    u64 flags = 0;
    for (int lane = 0; lane < kWave; ++lane)
        flags |= static_cast<u64>(of<Ballot>(lanes[lane]).flag) << lane;
    for (int lane = 0; lane < kWave; ++lane)
        of<Ballot>(lanes[lane]).result = flags;
}

void multiply_fp8_all(void* const* lanes) {
    static const Table table;
    f32 p[kMmaM][kMmaK], q[kMmaK][kMmaN];
    for (int lane = 0; lane < kWave; ++lane) {
        const Multiply& own = of<Multiply>(lanes[lane]);
        const int row = operand_row(lane), k = operand_k(lane);
        for (int i = 0; i < kMmaLaneBytes; ++i) {
            p[row][k + i] = table.values[own.p >> 8 * i & 255];
            q[k + i][row] = table.values[own.q >> 8 * i & 255];
        }
    }
    multiply(lanes, p, q);
}

void multiply_bf16_all(void* const* lanes) {
    f32 p[kMmaM][kMmaK / 2], q[kMmaK / 2][kMmaN];
    for (int lane = 0; lane < kWave; ++lane) {
        const Multiply& own = of<Multiply>(lanes[lane]);
        const int row = operand_row(lane), k = operand_k(lane) / 2;
        for (int i = 0; i < kMmaLaneBytes / 2; ++i) {
            p[row][k + i] = from_bf16(static_cast<u16>(own.p >> 16 * i));
            q[k + i][row] = from_bf16(static_cast<u16>(own.q >> 16 * i));
        }
    }
    multiply(lanes, p, q);
}

// To nearest even, saturating; a NaN stays one.
u32 fp8_bits(f32 x) {
    const u32 word = bits<u32>(x), sign = word >> 24 & 0x80;
    const u32 magnitude = word & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return sign | 0x7f;
    const f32 size = bits<f32>(magnitude);
    if (size >= 448)
        return sign | 0x7e;
    if (size < 0x1p-6f) {  // subnormal: adding this number leaves the multiples of 2^-9, rounded
        const f32 moved = size + 0x1p14f;
        return sign | (bits<u32>(moved) - bits<u32>(0x1p14f));
    }
    const u32 rounded = magnitude + 0x7ffff + (magnitude >> 20 & 1);
    return sign | ((rounded >> 20) - (120u << 3));
}

}  // namespace dg_hip::host
