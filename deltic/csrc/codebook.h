// Weights by a codebook: an index stands for 8 or 4 of them, which have signs of their own or, of IQ1, one offset.
//
// A unit (32 elements of K of 16 rows, as in format.h) is
//
//   index     the lower 8 bits of each index, 64 of them a vector: one vector of books of 8 weights, two of books of 4
//   high      of each vector, for each higher bit, 64 bits in the order of its bytes
//   signs     a vector: of word j bit j of the bytes [lane][4], 1 where a weight is negative; of IQ1 instead 64 bits in the order of
//             the indices, 1 where the offset is negative
//
// In a vector two bytes beside each other are indices of one lane: of entries 0 and 1 in the first half of 16 bytes, of 2 and 3 in the
// second. So what they stand for interleaves into the words of four lanes.
//
// A book of 4 gives words of 4 weights one behind another. A book of 8 has two bits a level: of 16 weights, two entries, word j holds
// the levels j of both entries' two bytes (`position`, format.h), so it is all bytes shifted by 2 j. The rows x are packed in that order.
// The first byte of an entry has weights 0, 1, 4 and 5 (`halved`).
//
// IQ1 has 2,048 entries, which no permutation of bytes has room for. They are spread over 16 products, each of 16 first bytes and 16 second
// ones, which need not all make an entry: so instead of the index there are 4 bits of the product and 4 of the first byte, and in `high`
// 4 bits of the second one, of the first 32 indices and of the last in the halves of a byte. Two tables of 256 bytes say what they stand for.
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
// The bytes behind the books: of each product of IQ1's the first ones, then of each the second ones.
constexpr int FIRST_BYTES = 256;
constexpr uint8_t factor(int i) { return (uint8_t)(ENTRIES[first_entry(Codes::SIGN) + i / 2] >> i % 2 * 8); }
static_assert(sizeof ENTRIES / 2 == first_entry(Codes::SIGN) + FIRST_BYTES);
// Of a book of 8 weights 0, 1, 4 and 5 in the lower byte.
constexpr uint32_t halved(uint32_t entry) { return (entry & 0xf00fu) | (entry >> 4 & 0x00f0u) | (entry & 0x00f0u) << 4; }

// Values that levels stand for: eighths of what is scaled; of IQ1 with an offset of 1.
template <Codes C>
constexpr int level(int i) {
    constexpr int small[] = {8, 25, 43, 0}, xxs[] = {8, 24, 40, 56, 72, 88, 104, 124}, s[] = {8, 24, 40, 56, 72, 88, 104, 120};
    return C == Codes::SIGN ? 1 : C == Codes::IQ1 ? 8 * (i - 1) + 1 : C == Codes::IQ3_XXS ? xxs[i] : C == Codes::IQ3_S ? s[i] : small[i];
}
constexpr int8_t TWO_OFFSETS = 2;
// Of the bytes that one row of IQ1 is multiplied by; a value is at least 9 below them.
constexpr int IQ1_EXCESS = 9;

// Where the index of entry e of a lane stands in its vector.
constexpr int place(int lane, int e) { return lane / 4 * 16 + e % 4 / 2 * 8 + lane % 4 * 2 + e % 2; }

template <Codes C>
struct Unit {
    static constexpr int WIDTH = book_width(C), BITS = index_bits(C), HIGH = high_bits(C), VECTORS = BITS ? 8 / WIDTH : 0;
    const uint8_t* at;

    const uint8_t* index(int v) const { return at + 64 * v; }
    const uint8_t* high() const { return at + 64 * VECTORS; }
    const uint8_t* signs() const { return high() + 8 * HIGH * VECTORS; }
    uint64_t high(int v, int bit) const { return mask(high() + 8 * (v * HIGH + bit)); }
    uint64_t offsets() const { return mask(signs()); }
    static uint64_t mask(const uint8_t* at) {
        uint64_t m;
        memcpy(&m, at, 8);
        return m;
    }
    // The entry of byte i of a vector, of a book of 8 `halved`.
    uint32_t entry(int v, int i) const {
        int64_t index = this->index(v)[i];
        if constexpr (C == Codes::IQ1) {
            const int64_t second = index / 16 * 16 + (high()[i % 32] >> i / 32 * 4 & 15);
            return factor((int)index) | (uint32_t)factor((int)(FIRST_BYTES + second)) << 8;
        }
        for (int bit = 0; bit < HIGH; bit++) index |= (int64_t)(high(v, bit) >> i & 1) << (8 + bit);
        const uint32_t entry = ENTRIES[first_entry(C) + index];
        return WIDTH == 8 ? halved(entry) : entry;
    }
};

#if defined(__AVX512VBMI__)

// The first or the second byte of each entry of a book, or of IQ1's products.
template <Codes C, int SECOND>
struct alignas(64) Plane {
    static constexpr int SIZE = C == Codes::IQ1 ? FIRST_BYTES : 1 << index_bits(C);
    uint8_t bytes[SIZE]{};
    constexpr Plane() {
        for (int i = 0; i < SIZE; i++) {
            const uint32_t entry = C == Codes::IQ1 ? factor(i) | (uint32_t)factor(FIRST_BYTES + i) << 8 : ENTRIES[first_entry(C) + i];
            bytes[i] = (uint8_t)((C != Codes::IQ1 && book_width(C) == 8 ? halved(entry) : entry) >> 8 * SECOND);
        }
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

// Makes bytes of levels in the low bits of each byte: what they stand for, negated where bit 3, 4 or 5 is 1. A word's bytes of a book of 4
// are taken from a position on in its 64 bits.
template <Codes C>
struct alignas(64) Bytes {
    uint8_t position[2][64]{}, value[3][64]{};
    constexpr Bytes() {
        for (int i = 0; i < 64; i++) {
            const int value_of = level<C>(book_width(C) == 8 ? i % 4 : i % 8);
            for (int word = 0; word < 2; word++) position[word][i] = (uint8_t)(i / 4 % 2 * 32 + word * 16 + i % 4 * 4);
            for (int bit = 0; bit < 3; bit++) value[bit][i] = (uint8_t)(128 + (i >> (3 + bit) & 1 ? -value_of : value_of));
        }
    }
};

// The 8 words of a unit, as dot4 takes them. ONE: for one row, of IQ1 119 less (IQ1_EXCESS), of SIGN 2^word where a weight is negative.
template <Codes C, bool ONE = false>
static inline __attribute__((always_inline)) void unpack_unit(const uint8_t* at, w16 (&words)[8]) {
    static constexpr Bytes<C> bytes;
    const Unit<C> unit{at};
    __m512i signs[3];  // of words 0 .. 2, 3 .. 5 and 6 .. 7, from bit 3 on
    if constexpr (C != Codes::IQ1) {
        signs[1] = _mm512_loadu_si512(unit.signs());
        signs[0] = _mm512_slli_epi16(signs[1], 3), signs[2] = _mm512_srli_epi16(signs[1], 3);
    }
    auto put = [&](int word, __m512i w) __attribute__((always_inline)) {
        w = _mm512_ternarylogic_epi32(_mm512_set1_epi8((char)(8 << word % 3)), signs[word / 3], w, 0xca);  // mask ? sign : w
        words[word].part[0] = (u32_part)_mm512_permutexvar_epi8(w, _mm512_load_si512(bytes.value[word % 3]));
    };
    if constexpr (C == Codes::SIGN && ONE) {
        for (uint32_t word = 0; word < 8; word++) words[word].part[0] = (u32_part)signs[1] & 0x01010101u << word;
    } else if constexpr (C == Codes::SIGN) {
#pragma GCC unroll 8
        for (int word = 0; word < 8; word++) put(word, _mm512_setzero_si512());
    } else {
#pragma GCC unroll 2
        for (int v = 0; v < Unit<C>::VECTORS; v++) {
            static constexpr Plane<C, 0> lower;
            static constexpr Plane<C, 1> upper;
            const __m512i index = _mm512_loadu_si512(unit.index(v));
            const __mmask64 eighth = _mm512_movepi8_mask(index);
            __m512i low, up;
            if constexpr (C == Codes::IQ1) {
                const __m512i both = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)unit.high()));
                const __m512i four = _mm512_srlv_epi64(both, _mm512_set_epi64(4, 4, 4, 4, 0, 0, 0, 0));
                const __m512i second = _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x0f), four, index, 0xca);  // mask ? four : index
                low = look_up<8>(lower.bytes, index, eighth, nullptr), up = look_up<8>(upper.bytes, second, eighth, nullptr);
            } else {
                __mmask64 high[Unit<C>::HIGH + 1];
                for (int i = 0; i < Unit<C>::HIGH; i++) high[i] = unit.high(v, i);
                low = look_up<Unit<C>::BITS>(lower.bytes, index, eighth, high), up = look_up<Unit<C>::BITS>(upper.bytes, index, eighth, high);
            }
            if constexpr (Unit<C>::WIDTH == 4) {
                const __m512i halves[] = {_mm512_unpacklo_epi8(low, up), _mm512_unpackhi_epi8(low, up)};
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) put(4 * v + i, _mm512_multishift_epi64_epi8(_mm512_load_si512(bytes.position[i % 2]), halves[i / 2]));
            } else {
                const __m512i halves[] = {_mm512_unpacklo_epi16(low, up), _mm512_unpackhi_epi16(low, up)};
                if constexpr (C == Codes::IQ1) {  // 8 times the level, and 2 where the offset is positive
                    const __m512i offset = _mm512_maskz_set1_epi8((__mmask64)~unit.offsets(), TWO_OFFSETS);
                    const __m512i offsets[] = {_mm512_unpacklo_epi16(offset, offset), _mm512_unpackhi_epi16(offset, offset)};
#pragma GCC unroll 8
                    for (int i = 0; i < 8; i++) {
                        const __m512i from = halves[i / 4], w = i % 4 < 2 ? _mm512_slli_epi16(from, 3 - i % 4 * 2) : _mm512_srli_epi16(from, i % 4 * 2 - 3);
                        words[i].part[0] = (u32_part)_mm512_ternarylogic_epi32(_mm512_set1_epi8(0x18), w, offsets[i / 4], 0xea);  // mask & w | offset
                        if constexpr (!ONE) words[i].part[0] += 0x01010101u * (128 - IQ1_EXCESS);
                    }
                } else {
#pragma GCC unroll 8
                    for (int i = 0; i < 8; i++) put(i, _mm512_srli_epi16(halves[i / 4], i % 4 * 2));
                }
            }
        }
    }
}

#endif
