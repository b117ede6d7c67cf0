// Weights by a codebook: an index stands for 8 or 4 of them, which have signs of their own or, of IQ1, one offset.
//
// A unit (32 elements of K of 16 rows, as in format.h) is
//
//   index     the lower 8 bits of each index, 64 of them a vector: one vector of books of 8 weights, two of books of 4
//   high      of each vector, for each higher bit, 64 bits in the order of its bytes; of products the higher bits of an index side by side
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
// IQ1 has 2,048 entries and IQ2_S 1,024, which would take 32 and 16 permutations of bytes. They are spread over 16 or 8 products, each of
// 16 first bytes and 16 second ones, which need not all make an entry: so instead of the index there are 4 or 3 bits of the product and 4
// each of the bytes. Two tables of 256 or 128 bytes say what they stand for. Of IQ1 the lower 8 bits are product and first byte, of IQ2_S
// the first byte, the product and the last bit of the second; of IQ1 the higher bits of the first 32 indices and of the last are halves of a
// byte.
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
// Behind the books stand two tables of so many bytes for the products of IQ1, and two for those of IQ2_S.
constexpr int factor_bytes(Codes codes) { return codes == Codes::IQ1 ? 256 : codes == Codes::IQ2_S ? 128 : 0; }
constexpr uint8_t factor(Codes codes, int second, int64_t i) {
    const int64_t at = (codes == Codes::IQ1 ? 0 : 2 * factor_bytes(Codes::IQ1)) + second * factor_bytes(codes) + i;
    return (uint8_t)(ENTRIES[first_entry(Codes::SIGN) + at / 2] >> at % 2 * 8);
}
// The entry, `halved`, that 8 bits of an index in memory and the higher ones above them stand for.
constexpr uint32_t product(Codes codes, int64_t code) {
    const int64_t first = code & (factor_bytes(codes) - 1), second = codes == Codes::IQ1 ? (code & 0xf0) | code >> 8 : (code >> 1 & 0x78) | code >> 8;
    return factor(codes, 0, first) | (uint32_t)factor(codes, 1, second) << 8;
}
template <Codes C>
constexpr auto PRODUCTS = [] {
    struct { uint16_t of[256 << high_bits(C)]; } t{};
    for (int64_t code = 0; code < 256 << high_bits(C); code++) t.of[code] = (uint16_t)product(C, code);
    return t;
}();
// Where the higher bits of index i begin among them, of products.
constexpr int high_at(Codes codes, int i) { return codes == Codes::IQ1 ? i % 32 * 8 + i / 32 * 4 : 3 * i; }
static_assert(sizeof ENTRIES / 2 == first_entry(Codes::SIGN) + factor_bytes(Codes::IQ1) + factor_bytes(Codes::IQ2_S));
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
        if constexpr (factor_bytes(C) != 0) {
            uint16_t bits;
            memcpy(&bits, high() + high_at(C, i) / 8, 2);
            return PRODUCTS<C>.of[index | (int64_t)(bits >> high_at(C, i) % 8 & ((1 << HIGH) - 1)) << 8];
        }
        for (int bit = 0; bit < HIGH; bit++) index |= (int64_t)(high(v, bit) >> i & 1) << (8 + bit);
        const uint32_t entry = ENTRIES[first_entry(C) + index];
        return WIDTH == 8 ? halved(entry) : entry;
    }
};

#if defined(__AVX512VBMI__)

// The first or the second byte of each entry of a book, or of products.
template <Codes C, int SECOND>
struct alignas(64) Plane {
    static constexpr int SIZE = factor_bytes(C) ? factor_bytes(C) : 1 << index_bits(C);
    uint8_t bytes[SIZE]{};
    constexpr Plane() {
        for (int i = 0; i < SIZE; i++) {
            const uint32_t entry = factor_bytes(C) ? 0 : ENTRIES[first_entry(C) + i];
            bytes[i] = factor_bytes(C) ? factor(C, SECOND, i) : (uint8_t)((book_width(C) == 8 ? halved(entry) : entry) >> 8 * SECOND);
        }
    }
};
// Of IQ2_S: where 3 bits of each index stand in the bytes that 8 indices have.
struct alignas(64) Threes {
    uint8_t byte[64]{}, bit[64]{};
    constexpr Threes() {
        for (int i = 0; i < 64; i++) byte[i] = (uint8_t)(i / 8 * 3 + i % 8 % 3), bit[i] = (uint8_t)(i % 8 * 3);
    }
};

// Bytes of a table of 2^BITS, by an index whose bits from the ninth on are masks.
template <int BITS>
static inline __attribute__((always_inline)) __m512i look_up(const uint8_t* table, __m512i index, __mmask64 eighth, const __mmask64* high) {
    auto half = [&](const uint8_t* at) {
        return _mm512_permutex2var_epi8(_mm512_load_si512(at), index, _mm512_load_si512(at + 64));
    };
    if constexpr (BITS <= 7) return half(table);
    else if constexpr (BITS == 8) return _mm512_mask_blend_epi8(eighth, half(table), half(table + 128));
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

// What stands for the indices of a unit: of a book of 8 the levels of two entries in 32 bits, of 4 those of one in 16.
template <Codes C>
struct Looked {
    static constexpr int HALVES = 2 * Unit<C>::VECTORS;
    __m512i halves[HALVES ? HALVES : 1], offsets[2], signs;
};

template <Codes C>
static inline __attribute__((always_inline)) Looked<C> look(const uint8_t* at) {
    const Unit<C> unit{at};
    Looked<C> to;
    if constexpr (C == Codes::IQ1) {  // 2 where the offset is positive
        const __m512i offset = _mm512_maskz_set1_epi8((__mmask64)~unit.offsets(), TWO_OFFSETS);
        to.offsets[0] = _mm512_unpacklo_epi16(offset, offset), to.offsets[1] = _mm512_unpackhi_epi16(offset, offset);
    } else to.signs = _mm512_loadu_si512(unit.signs());
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
        } else if constexpr (C == Codes::IQ2_S) {
            static constexpr Threes threes;
            const __m512i bytes = _mm512_permutexvar_epi8(_mm512_load_si512(threes.byte), _mm512_loadu_si512(unit.high()));
            const __m512i three = _mm512_multishift_epi64_epi8(_mm512_load_si512(threes.bit), bytes);
            const __m512i second = _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x07), three, _mm512_srli_epi16(index, 1), 0xca);  // mask ? three : index / 2
            low = look_up<7>(lower.bytes, index, 0, nullptr), up = look_up<7>(upper.bytes, second, 0, nullptr);
        } else {
            __mmask64 high[Unit<C>::HIGH + 1];
            for (int i = 0; i < Unit<C>::HIGH; i++) high[i] = unit.high(v, i);
            low = look_up<Unit<C>::BITS>(lower.bytes, index, eighth, high), up = look_up<Unit<C>::BITS>(upper.bytes, index, eighth, high);
        }
        constexpr bool BYTES = Unit<C>::WIDTH == 4;
        to.halves[2 * v] = BYTES ? _mm512_unpacklo_epi8(low, up) : _mm512_unpacklo_epi16(low, up);
        to.halves[2 * v + 1] = BYTES ? _mm512_unpackhi_epi8(low, up) : _mm512_unpackhi_epi16(low, up);
    }
    return to;
}

// The 8 words of a unit, as dot4 takes them. ONE: for one row, of IQ1 119 less (IQ1_EXCESS), of SIGN 2^word where a weight is negative.
template <Codes C, bool ONE = false>
static inline __attribute__((always_inline)) void expand(const Looked<C>& from, w16 (&words)[8]) {
    static constexpr Bytes<C> bytes;
    // of words 0 .. 2, 3 .. 5 and 6 .. 7, from bit 3 on
    const __m512i signs[] = {_mm512_slli_epi16(from.signs, 3), from.signs, _mm512_srli_epi16(from.signs, 3)};
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        __m512i w = _mm512_setzero_si512();
        if constexpr (C == Codes::SIGN && ONE) {
            words[i].part[0] = (u32_part)from.signs & 0x01010101u << (uint32_t)i;
        } else if constexpr (C == Codes::IQ1) {  // 8 times the level, and the offset
            const __m512i half = from.halves[i / 4];
            w = i % 4 < 2 ? _mm512_slli_epi16(half, 3 - i % 4 * 2) : _mm512_srli_epi16(half, i % 4 * 2 - 3);
            words[i].part[0] = (u32_part)_mm512_ternarylogic_epi32(_mm512_set1_epi8(0x18), w, from.offsets[i / 4], 0xea);  // mask & w | offset
            if constexpr (!ONE) words[i].part[0] += 0x01010101u * (128 - IQ1_EXCESS);
        } else {
            if constexpr (Unit<C>::VECTORS == 2) w = _mm512_multishift_epi64_epi8(_mm512_load_si512(bytes.position[i % 2]), from.halves[i / 2]);
            else if constexpr (Unit<C>::VECTORS) w = _mm512_srli_epi16(from.halves[i / 4], i % 4 * 2);
            w = _mm512_ternarylogic_epi32(_mm512_set1_epi8((char)(8 << i % 3)), signs[i / 3], w, 0xca);  // mask ? sign : w
            words[i].part[0] = (u32_part)_mm512_permutexvar_epi8(w, _mm512_load_si512(bytes.value[i % 3]));
        }
    }
}

#endif
