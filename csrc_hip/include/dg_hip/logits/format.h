// Rows of queries and keys as the logits' matrix instructions take them: FP8, or packed FP4 that becomes FP8.
//
// A wave holds 16 rows at a time, lane l a quarter of row l % 16 in loads of 16 bytes. Each instruction multiplies 32
// values of the rows. Which ones, and in which order, is the same for queries and keys, so that any order gives their
// product; in FP4 the 32 values of one instruction have one scale.
#pragma once

#include <dg_hip/convert.h>

namespace dg_hip::logits {

template <int kDim, bool kFp4_>
struct Format {
    static constexpr bool kFp4 = kFp4_;
    static constexpr int kSteps = kDim / kMmaK;            // instructions for a row; in FP4 also its scales
    static constexpr int kBytes = kFp4 ? kDim / 2 : kDim;  // of a row
    static constexpr int kWords = kBytes / 16;             // of 4 bytes that a lane loads of a row
    static constexpr int kPiece = least(kLaneBytes, kBytes / 4);
};

// What a lane loads of its row.
template <class F>
struct Words {
    u32 v[F::kWords];
};

// What it gives to each instruction.
template <class F>
struct Operand {
    u64 v[F::kSteps];
};

// Rows start at multiples of 16.
template <class F>
DG_DEVICE Words<F> load_words(const u8* row) {
    Words<F> words;
    constexpr int kPieceWords = F::kPiece / 4;
    const u8* const own = row + lane() / kTile * F::kPiece;
    for (int i = 0; i < F::kWords; i += kPieceWords) {
        const u8* const piece = own + i * 16;  // four lanes share four pieces
        if constexpr (F::kPiece == kLaneBytes) {
            const U32x4 four = load<U32x4>(piece);
            for (int word = 0; word < 4; ++word)
                words.v[i + word] = four.v[word];
        } else {
            const u64 two = load<u64>(piece);
            words.v[i] = static_cast<u32>(two), words.v[i + 1] = static_cast<u32>(two >> 32);
        }
    }
    return words;
}

template <class F>
DG_DEVICE Words<F> no_words() {
    Words<F> words;
    for (u32& word : words.v)
        word = 0;
    return words;
}

// Eight values; the even ones come first.
DG_DEVICE u64 unpack_fp4(u32 word) {
    return fp8_of_fp4(word & 0x0f0f0f0f) | static_cast<u64>(fp8_of_fp4(word >> 4 & 0x0f0f0f0f)) << 32;
}

DG_DEVICE void swap_where(bool flag, u32& a, u32& b) {
    const u32 x = flag ? b : a, y = flag ? a : b;
    a = x, b = y;
}

// A row's quarters as its instructions take them. All lanes of the wave take part.
template <class F>
DG_DEVICE Operand<F> operand(const Words<F>& words) {
    Operand<F> result;
    if constexpr (!F::kFp4) {
        for (int step = 0; step < F::kSteps; ++step)
            result.v[step] = words.v[2 * step] | static_cast<u64>(words.v[2 * step + 1]) << 32;
        return result;
    } else {
        // A word is a quarter of a scale's values. Each lane hands words of its own scale to the three others (or the
        // one) that have the row's other scales, so that all have a word of each.
        const u32 own = lane(), quarter = own / kTile;
        u32 word[F::kSteps];
        word[0] = words.v[0];
        if constexpr (F::kSteps == 4) {  // lane quarter `g` came with scale `g`: word[i] is of scale g ^ i
            for (u32 i = 1; i < 4; ++i)
                word[i] = shuffle(words.v[i], own ^ i * kTile);
            swap_where(quarter & 1, word[0], word[1]), swap_where(quarter & 1, word[2], word[3]);
            swap_where(quarter & 2, word[0], word[2]), swap_where(quarter & 2, word[1], word[3]);
        } else {  // two quarters came with the first scale, two with the second
            static_assert(F::kSteps == 2, "a lane of FP4 has 2 or 4 words");
            word[1] = shuffle(words.v[1], own ^ 2 * kTile);
            swap_where(quarter & 2, word[0], word[1]);
        }
        for (int step = 0; step < F::kSteps; ++step)
            result.v[step] = unpack_fp4(word[step]);
        return result;
    }
}

}  // namespace dg_hip::logits
