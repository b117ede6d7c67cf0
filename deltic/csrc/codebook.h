// Weights by a codebook: an index stands for 8 or 4 of them, which have signs of their own or, of IQ1, one offset.
//
// A unit (32 elements of K of 16 rows, as in format.h) is
//
//   index     the lower 8 bits of each index, 64 of them a vector: one vector of books of 8 weights, two of books of 4
//   high      of each vector, for each higher bit, 64 bits in the order of its bytes
//   signs     of each of the 8 words 64 bits: of the bytes [lane][4], 1 where a weight is negative; of IQ1 instead, of each of
//             the four indices of a lane, 16 bits: 1 where the offset is negative
//
// In a vector of a book of 8 the index of a lane's weights 8 g .. 8 g + 7 is byte 4 lane + g. Of a book of 4 the index of its weights
// 16 v + 4 e .. is in vector v, where two bytes beside it (the halves of a pair of entries) interleave into the words of two lanes.
#pragma once
#include "format.h"

// Entries of all books in the order of Codes: 8 levels of 2 bits, or 4 in the low bits of a nibble (deltic/ops/codebooks.bin).
constexpr uint16_t ENTRIES[] = {
#include "codebooks.inc"
};
constexpr int64_t first_entry(Codes codes) {
    int64_t first = 0;
    for (Codes c = Codes::IQ1; c < codes; c = (Codes)((int64_t)c + 1)) first += 1 << index_bits(c);
    return first;
}
static_assert(sizeof ENTRIES / 2 == first_entry(Codes::SIGN));

// Values that levels stand for: eighths of what is scaled; of IQ1 with an offset of 1.
template <Codes C>
constexpr int level(int i) {
    constexpr int small[] = {8, 25, 43, 0}, xxs[] = {8, 24, 40, 56, 72, 88, 104, 124}, s[] = {8, 24, 40, 56, 72, 88, 104, 120};
    return C == Codes::SIGN ? 1 : C == Codes::IQ1 ? 8 * (i - 1) + 1 : C == Codes::IQ3_XXS ? xxs[i] : C == Codes::IQ3_S ? s[i] : small[i];
}
constexpr int8_t TWO_OFFSETS = 2;

// Where the index of entry e of a lane stands in its vector.
template <Codes C>
constexpr int place(int lane, int e) {
    return book_width(C) == 8 ? lane * 4 + e : lane / 4 * 16 + e % 4 / 2 * 8 + lane % 4 * 2 + e % 2;
}

template <Codes C>
struct Unit {
    static constexpr int WIDTH = book_width(C), BITS = index_bits(C), HIGH = BITS > 8 ? BITS - 8 : 0, VECTORS = BITS ? 8 / WIDTH : 0;
    const uint8_t* at;

    const uint8_t* index(int v) const { return at + 64 * v; }
    uint64_t high(int v, int bit) const { return mask(at + 64 * VECTORS, v * HIGH + bit); }
    uint64_t sign(int word) const { return mask(at + (64 + 8 * HIGH) * VECTORS, word); }
    uint32_t offset(int g) const {
        uint16_t lanes;
        memcpy(&lanes, at + (64 + 8 * HIGH) * VECTORS + 2 * g, 2);
        return lanes;
    }
    static uint64_t mask(const uint8_t* masks, int i) {
        uint64_t m;
        memcpy(&m, masks + 8 * i, 8);
        return m;
    }
};

#if defined(__AVX512VBMI__)

// The lower or the upper byte of each entry of a book.
template <Codes C, int UPPER>
struct alignas(64) Plane {
    uint8_t bytes[1 << index_bits(C)]{};
    constexpr Plane() {
        for (int i = 0; i < 1 << index_bits(C); i++) bytes[i] = (uint8_t)(ENTRIES[first_entry(C) + i] >> 8 * UPPER);
    }
};

// Bytes of a table of 2^BITS, by an index whose bits from the ninth on are masks.
template <int BITS>
static inline __attribute__((always_inline)) __m512i look_up(const uint8_t* table, __m512i index, __mmask64 eighth, const __mmask64* high) {
    auto half = [&](const uint8_t* at) {
        return _mm512_permutex2var_epi8(_mm512_load_si512(at), index, _mm512_load_si512(at + 64));
    };
    if constexpr (BITS <= 8) return _mm512_mask_blend_epi8(eighth, half(table), half(table + 128));
    else {
        const __m512i lower = look_up<BITS - 1>(table, index, eighth, high);
        return _mm512_mask_blend_epi8(high[BITS - 9], lower, look_up<BITS - 1>(table + (1 << (BITS - 1)), index, eighth, high));
    }
}

// Makes a word's bytes: each the 8 bits from a position on in its 64; then what their lowest bits stand for.
template <Codes C>
struct alignas(64) Bytes {
    uint8_t position[4][64]{}, value[64]{};
    constexpr Bytes() {
        for (int word = 0; word < 4; word++)
            for (int i = 0; i < 64; i++)
                position[word][i] = (uint8_t)(book_width(C) == 8 ? i / 4 % 2 * 32 + word * 8 + i % 4 * 2 : i / 4 % 2 * 32 + word % 2 * 16 + i % 4 * 4);
        for (int i = 0; i < 64; i++) value[i] = (uint8_t)(128 + level<C>(book_width(C) == 8 ? i % 4 : i % 8));
    }
};

// The 8 words of a unit, as dot4 takes them.
template <Codes C>
static inline __attribute__((always_inline)) void unpack_unit(const uint8_t* at, w16 (&words)[8]) {
    constexpr int HIGH = Unit<C>::HIGH;
    static constexpr Bytes<C> bytes;
    const Unit<C> unit{at};
    const __m512i values = _mm512_load_si512(bytes.value);
    auto put = [&](int word, __m512i w) __attribute__((always_inline)) {
        if constexpr (C == Codes::IQ1) w = _mm512_mask_sub_epi32(w, (__mmask16)unit.offset(word / 2), w, _mm512_set1_epi8(TWO_OFFSETS));
        else w = _mm512_mask_sub_epi8(w, unit.sign(word), _mm512_setzero_si512(), w);
        words[word].part[0] = (u32_part)w;
    };
    auto spread = [&](int word, int position, __m512i from) __attribute__((always_inline)) {
        put(word, _mm512_permutexvar_epi8(_mm512_multishift_epi64_epi8(_mm512_load_si512(bytes.position[position]), from), values));
    };
    if constexpr (C == Codes::SIGN) {
#pragma GCC unroll 8
        for (int word = 0; word < 8; word++) put(word, values);
    } else {
#pragma GCC unroll 2
        for (int v = 0; v < Unit<C>::VECTORS; v++) {
            static constexpr Plane<C, 0> lower;
            static constexpr Plane<C, 1> upper;
            const __m512i index = _mm512_loadu_si512(unit.index(v));
            const __mmask64 eighth = _mm512_movepi8_mask(index);
            __mmask64 high[HIGH + 1];
            for (int i = 0; i < HIGH; i++) high[i] = unit.high(v, i);
            const __m512i low = look_up<Unit<C>::BITS>(lower.bytes, index, eighth, high), up = look_up<Unit<C>::BITS>(upper.bytes, index, eighth, high);
            if constexpr (Unit<C>::WIDTH == 8) {
#pragma GCC unroll 4
                for (int g = 0; g < 4; g++) spread(2 * g, g, low), spread(2 * g + 1, g, up);
            } else {
                const __m512i first = _mm512_unpacklo_epi8(low, up), second = _mm512_unpackhi_epi8(low, up);
                spread(4 * v, 0, first), spread(4 * v + 1, 1, first), spread(4 * v + 2, 0, second), spread(4 * v + 3, 1, second);
            }
        }
    }
}

#endif
