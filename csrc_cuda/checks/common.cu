// Prints a table of what the functions of dg/common return, one value a line, for tests/test_sources.py to
// compare with Python's own arithmetic.  g++ -x c++ evaluates them on the CPU, nvcc on the card.
#include <dg/common/fp4.cuh>
#include <dg/common/fp8.cuh>
#include <dg/common/math.cuh>
#include <dg/common/ue8m0.cuh>

#include <cstdio>
#include <vector>

namespace {

constexpr int kBytes = 256;      // every E4M3 byte
constexpr int kExponents = 255;  // every finite float32 exponent, with each mantissa of the next line
constexpr int kMantissas[] = {0, 1, 0x400000, 0x7fffff};
constexpr int kScales = kExponents * 4;
constexpr int kSizes = 65;  // cdiv and align of 0..64 by 1..16
constexpr int kDivisors = 16;
constexpr int kFours = 1 << 16;  // every four E2M1 codes
constexpr int kRows = kBytes + 2 * kScales + 2 * kSizes * kDivisors + kFours;

DG_HOST_DEVICE float scale_of(int index, int mantissa) {
    return __builtin_bit_cast(float, static_cast<dg::u32>(index / 4) << 23 | static_cast<dg::u32>(mantissa));
}

// Row `row` of the table.
DG_HOST_DEVICE dg::u32 evaluate(int row) {
    const int mantissas[] = {kMantissas[0], kMantissas[1], kMantissas[2], kMantissas[3]};
    if (row < kBytes)
        return __builtin_bit_cast(dg::u32, dg::e4m3::decode(static_cast<dg::u8>(row)));
    row -= kBytes;
    if (row < kScales) {
        const dg::u8 byte = dg::ue8m0::encode_ceil(scale_of(row, mantissas[row % 4]));
        const dg::u32 word = dg::ue8m0::pack(7, byte, 9, 11);
        return __builtin_bit_cast(dg::u32, dg::ue8m0::decode(dg::ue8m0::unpack(word, 1)));
    }
    row -= kScales;
    if (row < kScales)
        return dg::ue8m0::is_exact(scale_of(row, mantissas[row % 4]));
    row -= kScales;
    if (row >= 2 * kSizes * kDivisors)
        return dg::e2m1::to_e4m3(static_cast<dg::u32>(row - 2 * kSizes * kDivisors));
    const int size = row / 2 / kDivisors, divisor = row / 2 % kDivisors + 1;
    return static_cast<dg::u32>(row % 2 ? dg::align(size, divisor) : dg::cdiv(size, divisor));
}

#if defined(__CUDACC__)
__global__ void evaluate_all(dg::u32* out) {
    const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (row < kRows)
        out[row] = evaluate(row);
}

bool table(std::vector<dg::u32>& out) {
    dg::u32* device = nullptr;
    const size_t bytes = out.size() * sizeof(dg::u32);
    if (cudaMalloc(&device, bytes) != cudaSuccess)
        return false;
    evaluate_all<<<dg::cdiv(kRows, 128), 128>>>(device);
    return cudaMemcpy(out.data(), device, bytes, cudaMemcpyDeviceToHost) == cudaSuccess;
}
#else
bool table(std::vector<dg::u32>& out) {
    for (int row = 0; row < kRows; ++row)
        out[row] = evaluate(row);
    return true;
}
#endif

}  // namespace

int main() {
    std::vector<dg::u32> out(kRows);
    if (!table(out)) {
        std::fprintf(stderr, "the card did not run the table\n");
        return 1;
    }
    for (const dg::u32 value : out)
        std::printf("%u\n", value);
    return 0;
}
