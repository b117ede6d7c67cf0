// Units of indices and signs made into bytes, and rows put into units. The multiplication of several rows reads those bytes as INT8's: one
// function for all books, since what they are made of is read once for all rows.
#include "codebook.h"

namespace {

#if defined(__AVX512VBMI__)

template <Codes C>
void unpack(const uint8_t* units, int64_t n, uint8_t* to) {
    for (int64_t u = 0; u < n; u++) {
        w16 words[8];
        unpack_unit<C>(units + u * unit_bytes(C), words);
        memcpy(to + u * 512, words, 512);
    }
}

#else

// What a byte of an entry stands for: 4 weights, or 2.
template <Codes C>
struct Values {
    uint32_t of_byte[256]{};
    constexpr Values() {
        constexpr int bits = 16 / book_width(C), mask = bits == 2 ? 3 : 7;
        for (int byte = 0; byte < 256; byte++)
            for (int i = 0; i < 8 / bits; i++) of_byte[byte] |= (uint32_t)(128 + level<C>(byte >> bits * i & mask)) << 8 * i;
    }
};

// A part of the lanes of a word whose weights are negative where a bit is 1: 256 less each such byte, of 1 .. 255.
static inline u32_part negated(u32_part words, uint64_t signs, int part) {
    const uint32_t low = (uint32_t)signs, up = (uint32_t)(signs >> 32);
    u32_part halves, shift;
    for (int i = 0; i < LANES; i++) halves[i] = part * LANES + i < 8 ? low : up, shift[i] = (uint32_t)(part * LANES + i) % 8 * 4;
    const u32_part ones = (halves >> shift & 15u) * 0x00204081u & 0x01010101u;
    return (words ^ ones * 255u) + ones;
}

template <Codes C>
void unpack(const uint8_t* units, int64_t n, uint8_t* to) {
    constexpr int WIDTH = Unit<C>::WIDTH;
    static constexpr Values<C> values;
    for (int64_t u = 0; u < n; u++, units += unit_bytes(C), to += 512) {
        const Unit<C> unit{units};
        if constexpr (C == Codes::SIGN) memset(to, 129, 512);
        for (int e = 0; e < 4 * Unit<C>::VECTORS; e++)
            for (int lane = 0; lane < STRIP; lane++) {
                const int at = place<C>(lane, e);
                int64_t index = unit.index(e / 4)[at];
                for (int bit = 0; bit < Unit<C>::HIGH; bit++) index |= (int64_t)(unit.high(e / 4, bit) >> at & 1) << (8 + bit);
                const uint32_t entry = ENTRIES[first_entry(C) + index], low = values.of_byte[entry & 255], up = values.of_byte[entry >> 8];
                const uint32_t offset = C == Codes::IQ1 ? (unit.offset(e) >> lane & 1) * 0x01010101u * TWO_OFFSETS : 0;
                const uint32_t words[2] = {WIDTH == 8 ? low - offset : low | up << 16, up - offset};
                for (int i = 0; i < WIDTH / 4; i++) memcpy(to + (e * WIDTH / 4 + i) * 64 + lane * 4, &words[i], 4);
            }
        for (int i = 0; i < (C == Codes::IQ1 ? 0 : 8 * PARTS); i++) {
            u32_part words;
            memcpy(&words, to + i * LANES * 4, sizeof words);
            words = negated(words, unit.sign(i / PARTS), i % PARTS);
            memcpy(to + i * LANES * 4, &words, sizeof words);
        }
    }
}

#endif

template <Codes C>
void put(const uint32_t (&words)[8][STRIP], uint8_t* unit) {
    using U = Unit<C>;
    auto set = [](uint8_t* bits, int at) { bits[at / 8] |= (uint8_t)(1 << at % 8); };
    uint8_t *high = unit + 64 * U::VECTORS, *last = high + 8 * U::HIGH * U::VECTORS;
    memset(unit, 0, unit_bytes(C));
    for (int lane = 0; lane < STRIP; lane++)
        for (int e = 0; e < 32 / U::WIDTH; e++) {
            const uint32_t entry = words[e * U::WIDTH / 4][lane], index = entry & 0xffff, signs = entry >> 16;
            const int at = place<C>(lane, e);
            if (U::VECTORS) unit[e / 4 * 64 + at] = (uint8_t)index;
            for (int bit = 0; bit < U::HIGH; bit++)
                if (index >> (8 + bit) & 1) set(high + (e / 4 * U::HIGH + bit) * 8, at);
            if (C == Codes::IQ1 && index >> U::BITS & 1) set(last + 2 * e, lane);
            for (int i = 0; C != Codes::IQ1 && i < U::WIDTH; i++)
                if (signs >> i & 1) set(last + (e * U::WIDTH + i) / 4 * 8, lane * 4 + i % 4);
        }
}

template <class F>
static inline void with_book(Codes codes, const F& f) {
    switch (codes) {
        case Codes::IQ1: return f(std::integral_constant<Codes, Codes::IQ1>{});
        case Codes::IQ2_XXS: return f(std::integral_constant<Codes, Codes::IQ2_XXS>{});
        case Codes::IQ2_XS: return f(std::integral_constant<Codes, Codes::IQ2_XS>{});
        case Codes::IQ2_S: return f(std::integral_constant<Codes, Codes::IQ2_S>{});
        case Codes::IQ3_XXS: return f(std::integral_constant<Codes, Codes::IQ3_XXS>{});
        case Codes::IQ3_S: return f(std::integral_constant<Codes, Codes::IQ3_S>{});
        default: return f(std::integral_constant<Codes, Codes::SIGN>{});
    }
}

}  // namespace

void unpack_units(Codes codes, const uint8_t* units, int64_t n, uint8_t* to) {
    with_book(codes, [&](auto c) { unpack<c()>(units, n, to); });
}
void put_entries(Codes codes, const uint32_t (&words)[8][STRIP], uint8_t* unit) {
    with_book(codes, [&](auto c) { put<c()>(words, unit); });
}
