// Units of indices and signs made into bytes, and rows put into units. The multiplication of several rows reads those bytes as INT8's: one
// function for all books, since what they are made of is read once for all rows.
#include "codebook.h"

namespace {

#if defined(__AVX512VBMI__)

template <Codes C>
void unpack(const uint8_t* units, int64_t n, uint8_t* to) {
    for (int64_t u = 0; u < n; u++) {
        w16 words[8];
        expand<C>(look<C>(units + u * unit_bytes(C)), words);
        memcpy(to + u * 512, words, 512);
    }
}

#else

// What a byte of an entry of a book of 4 stands for.
template <Codes C>
struct Values {
    uint16_t of_byte[256]{};
    constexpr Values() {
        for (int byte = 0; byte < 256; byte++)
            for (int i = 0; i < 2; i++) of_byte[byte] |= (uint16_t)((128 + level<C>(byte >> 4 * i & 7)) << 8 * i);
    }
};

template <Codes C>
void unpack(const uint8_t* units, int64_t n, uint8_t* to) {
    for (int64_t u = 0; u < n; u++, units += unit_bytes(C), to += 512) {
        const Unit<C> unit{units};
        auto entry = [&](int e, int lane) { return unit.entry(e / 4, place(lane, e)); };
        if constexpr (C == Codes::SIGN) memset(to, 129, 512);
        else if constexpr (Unit<C>::WIDTH == 4) {
            static constexpr Values<C> values;
            for (int e = 0; e < 8; e++)
                for (int lane = 0; lane < STRIP; lane++) {
                    const uint32_t levels = entry(e, lane), word = values.of_byte[levels & 255] | (uint32_t)values.of_byte[levels >> 8] << 16;
                    memcpy(to + e * 64 + lane * 4, &word, 4);
                }
        } else {
            for (int half = 0; half < 2; half++) {
                uint32_t levels[STRIP], offsets[STRIP];
                for (int lane = 0; lane < STRIP; lane++) {
                    const uint32_t first = entry(2 * half, lane), second = entry(2 * half + 1, lane);
                    levels[lane] = (first & 255) | (second & 255) << 8 | (first >> 8) << 16 | (second >> 8) << 24;
                    offsets[lane] = C != Codes::IQ1 ? 0 : (unit.offsets() >> place(lane, 2 * half) & 1) * 0x00010001u | (unit.offsets() >> place(lane, 2 * half + 1) & 1) * 0x01000100u;
                }
                for (int p = 0; p < PARTS; p++) {
                    u32_part all, less;
                    memcpy(&all, levels + p * LANES, sizeof all);
                    memcpy(&less, offsets + p * LANES, sizeof less);
                    for (int j = 0; j < 4; j++) {
                        const u32_part l = all >> (uint32_t)(2 * j) & 0x03030303u;
                        u32_part word;
                        if (C == Codes::IQ1) word = l * (uint32_t)(level<C>(1) - level<C>(0)) + 0x01010101u * (uint32_t)(128 + level<C>(0)) - less * (uint32_t)TWO_OFFSETS;
                        else word = l * 17u + (l >> 1 & 0x01010101u) + 0x01010101u * (uint32_t)(128 + level<C>(0));  // 8, 25, 43
                        memcpy(to + (half * 4 + j) * 64 + p * LANES * 4, &word, sizeof word);
                    }
                }
            }
        }
        for (int i = 0; i < (C == Codes::IQ1 ? 0 : 8 * PARTS); i++) {
            u32_part words, signs;
            memcpy(&words, to + i * LANES * 4, sizeof words);
            memcpy(&signs, unit.signs() + i % PARTS * LANES * 4, sizeof signs);
            const u32_part ones = signs >> (uint32_t)(i / PARTS) & 0x01010101u;
            words = (words ^ ones * 255u) + ones;  // 256 less each negative byte, of 1 .. 255
            memcpy(to + i * LANES * 4, &words, sizeof words);
        }
    }
}

#endif

// Of each index what stands for its entry among the products: 8 bits of an index in memory, and the higher ones.
template <Codes C>
struct Places {
    uint16_t of_index[1 << index_bits(C)]{};
    constexpr Places() {
        uint16_t of_entry[1 << 16]{};
        for (int64_t code = 0; code < 256 << high_bits(C); code++) of_entry[product(C, code)] = (uint16_t)code;
        for (int i = 0; i < 1 << index_bits(C); i++) of_index[i] = of_entry[halved(ENTRIES[first_entry(C) + i])];
    }
    constexpr bool has_all() const {
        for (int i = 0; i < 1 << index_bits(C); i++)
            if (product(C, of_index[i]) != halved(ENTRIES[first_entry(C) + i])) return false;
        return true;
    }
};
template <Codes C>
constexpr Places<C> PLACES;
static_assert(PLACES<Codes::IQ1>.has_all() && PLACES<Codes::IQ2_S>.has_all());

template <Codes C>
void put(const uint32_t (&words)[8][STRIP], uint8_t* unit) {
    using U = Unit<C>;
    auto set = [](uint8_t* bits, int64_t at) { bits[at / 8] |= (uint8_t)(1 << at % 8); };
    uint8_t *high = unit + 64 * U::VECTORS, *last = high + 8 * U::HIGH * U::VECTORS;
    memset(unit, 0, unit_bytes(C));
    for (int lane = 0; lane < STRIP; lane++)
        for (int e = 0; e < 32 / U::WIDTH; e++) {
            const uint32_t entry = words[e * U::WIDTH / 4][lane], index = entry & 0xffff, signs = entry >> 16;
            const int at = place(lane, e);
            uint32_t code = index;
            if constexpr (factor_bytes(C) != 0) code = PLACES<C>.of_index[index & ((1 << U::BITS) - 1)];
            if (U::VECTORS) unit[e / 4 * 64 + at] = (uint8_t)code;
            for (int bit = 0; bit < U::HIGH; bit++)
                if (code >> (8 + bit) & 1) set(high, factor_bytes(C) ? high_at(C, at) + bit : (e / 4 * U::HIGH + bit) * 64 + at);
            if (C == Codes::IQ1 && index >> U::BITS & 1) set(last, at);
            for (int i = 0; i < (C == Codes::IQ1 ? 0 : U::WIDTH); i++) {
                const int64_t to = position(C, e * U::WIDTH + i);
                last[lane * 4 + to % 4] |= (uint8_t)((signs >> i & 1) << to / 4);
            }
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
