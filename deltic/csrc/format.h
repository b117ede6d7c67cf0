// Packed matrices: the layout of weights in any format of deltic/ops/formats.py, and what a stored weight stands for.
//
// W [N, K] is stored in strips of 16 rows, K running slowest: each 64-byte vector holds, for 16 outputs, the next elements of
// K that one dot-product instruction takes (2 of bfloat16, 4 of bytes). One output is one lane that walks K in order, so its
// bits do not depend on how many rows, strips or threads share the work, and memory is read as one long stream.
//
// A strip is a row of blocks: the codes of up to 256 elements of K (of one group, where the scales are float32 or --quantize's),
// then their scales. Codes stand in units of 32 elements, which are 8 words of 4 bytes a lane; word j holds elements 4 j .. 4 j + 3:
//
//   8 bits    8 vectors [16 lanes][4]; int8 + 128. Of e4m3, 16 bytes of four lanes hold their elements 0 and 1, then 2 and 3
//   4 bits    4 vectors: the low halves of the bytes are word 2 i, the high halves word 2 i + 1
//   2 bits    2 vectors: word 4 i + j in bits 2 j of the bytes
//   1 bit     1 vector: word j in bit j
//   6 = 4 + 2, 5 = 4 + 1, 3 = 2 + 1: the vectors of the low bits first
//   of codebooks (codebook.h) indices, their higher bits, and signs
//
// The layout is the same for all instruction sets.
#pragma once
#include "kernel.h"
#include "simd.h"

// BOOK: any codebook, of which the multiplication reads what codebook.cpp makes.
enum class Codes : int64_t { BF16, INT8, UINT4, UINT5, UINT6, UINT2, UINT3, IQ4, E2M1, E4M3, IQ1, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, SIGN, BOOK };
enum class Scales : int64_t { NONE, F32, BF16_LEAST, F16, F16_LEAST, F16_ZERO, BF16, BF16_ZERO, K, K_LEAST, E8M0, E4M3, K_EIGHTH };

constexpr int64_t STRIP = 16;       // rows of a strip: the lanes of a v16
constexpr int64_t BLOCK = 256;      // elements of K in a block of several groups
constexpr int64_t MOST_GROUPS = 16; // of a block
constexpr int64_t UNIT = 32;

constexpr bool is_book(Codes codes) { return codes >= Codes::IQ1; }
constexpr int index_bits(Codes codes) {
    constexpr int bits[] = {11, 8, 9, 10, 8, 9, 0};
    return bits[(int64_t)codes - (int64_t)Codes::IQ1];
}
// Bits above the lower 8 of what stands for an entry: its index, or of IQ1 a pair of factors (codebook.h).
constexpr int high_bits(Codes codes) {  // by branches four rows of Q4_K, which ask while they run, took a fifth longer
    constexpr int bits[] = {12, 8, 9, 11, 8, 9, 0};
    const int all = bits[(int64_t)codes - (int64_t)Codes::IQ1];
    return all > 8 ? all - 8 : 0;
}
constexpr int book_width(Codes codes) { return codes == Codes::IQ3_XXS || codes == Codes::IQ3_S ? 4 : 8; }
// Where element i of a unit stands in the words that are multiplied: of a book of 8 the levels j of two entries are one word.
constexpr bool is_by_levels(Codes codes) { return codes >= Codes::IQ1 && codes <= Codes::IQ2_S; }
constexpr int64_t position(Codes codes, int64_t i) { return is_by_levels(codes) ? i / 16 * 16 + i / 4 % 2 * 8 + i % 2 * 4 + i / 2 % 2 * 2 + i / 8 % 2 : i; }
// Of codebooks, of the bytes that are made of them.
constexpr int bits_of(Codes codes) {
    constexpr int bits[] = {16, 8, 4, 5, 6, 2, 3, 4, 4, 8};
    return is_book(codes) ? 8 : bits[(int64_t)codes];
}
constexpr int64_t unit_bytes(Codes codes) {
    if (!is_book(codes) || codes == Codes::BOOK) return 64 * bits_of(codes);
    return (index_bits(codes) ? 8 / book_width(codes) : 0) * (64 + 8 * high_bits(codes)) + (codes == Codes::IQ1 ? 8 : 64);
}
constexpr bool has_least(Scales s) {
    return s == Scales::BF16_LEAST || s == Scales::F16_LEAST || s == Scales::F16_ZERO || s == Scales::BF16_ZERO || s == Scales::K_LEAST;
}
// Floats are multiplied with rows of bfloat16, integers with rows rounded to int8.
constexpr bool is_float(Codes codes) { return codes == Codes::BF16 || codes == Codes::E4M3; }
// Value that a code of 0 stands for, negated.
constexpr int bias_of(Codes codes, bool least) {
    return codes == Codes::INT8 || is_book(codes) ? 128 : least || bits_of(codes) > 6 || codes == Codes::IQ4 || codes == Codes::E2M1 ? 0 : 1 << (bits_of(codes) - 1);
}

constexpr int8_t TABLES[2][16] = {
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
};

struct Matrix {
    const uint8_t* data;  // [n_strips, strip_bytes]
    int64_t format;       // four bits of Codes, four of Scales, the fifth of Codes
    int64_t n, k, group;  // group: elements of K that share a scale, the last group may be shorter

    Codes codes() const { return (Codes)(format % 16 + format / 256 * 16); }
    Scales scales() const { return (Scales)(format / 16 % 16); }
    int64_t n_strips() const { return (n + STRIP - 1) / STRIP; }
    int64_t n_groups() const { return (k + group - 1) / group; }
    int64_t block() const { return scales() == Scales::F32 || scales() == Scales::BF16_LEAST || group > BLOCK ? group : BLOCK; }
    int64_t code_bytes(int64_t n_k) const { return n_k / UNIT * unit_bytes(codes()); }
    int64_t scale_bytes(int64_t n_k) const {  // of a block of n_k elements
        constexpr int64_t a_group[] = {0, 64, 64, 32, 64, 48, 32, 48, 16, 32, 16, 16, 16}, a_block[] = {0, 0, 0, 0, 0, 0, 0, 0, 32, 64, 0, 0, 32};
        return (n_k + group - 1) / group * a_group[(int64_t)scales()] + a_block[(int64_t)scales()];
    }
    int64_t tail_bytes() const { return scales() == Scales::E4M3 ? 128 : 0; }  // of the whole strip: a multiplier and a divisor a row
    int64_t strip_bytes() const {
        if (scales() == Scales::NONE) return k * STRIP * 2;
        const int64_t whole = k / block(), rest = k % block();
        return code_bytes(k) + whole * scale_bytes(block()) + (rest ? scale_bytes(rest) : 0) + tail_bytes();
    }
    void read(Arguments& a) { a.read(data, format, n, k, group); }
    Matrix expert(int64_t e) const { return {data + e * n_strips() * strip_bytes(), format, n, k, group}; }
};

// 64 bytes of a strip: 16 lanes of 32 bits.
struct w16 {
    u32_part part[PARTS];
};
static inline w16 load_words(const uint8_t* p) {
    w16 w;  // a register at a time, as `load`
    for (int i = 0; i < PARTS; i++) memcpy(&w.part[i], p + i * sizeof w.part[i], sizeof w.part[i]);
    return w;
}

static inline v16 load_f16(const uint8_t* p) {
#if defined(__AVX512F__)
    __m256i h;
    memcpy(&h, p, sizeof h);
    return {{(f32_part)_mm512_cvtph_ps(h)}};
#else
    return each_part([&](int i) {
        u16_part h;
        memcpy(&h, p + i * sizeof h, sizeof h);
#if defined(__F16C__)
        return (f32_part)_mm256_cvtph_ps((__m128i)h);
#elif defined(__aarch64__)
        return (f32_part)vcvt_f32_f16((float16x4_t)h);
#else
        u32_part bits = __builtin_convertvector(h, u32_part);  // finite, as all that is loaded
        return (f32_part)((bits & 0x7fffu) << 13) * 0x1p112f * (f32_part)((bits & 0x8000u) << 16 | 0x3f800000u);
#endif
    });
#endif
}
template <class T>
static inline v16 load_bytes(const uint8_t* p) {  // of T: int8_t or uint8_t
    typedef T part __attribute__((vector_size(LANES)));
    return each_part([&](int i) {
        part bytes;
        memcpy(&bytes, p + i * LANES, LANES);
        return __builtin_convertvector(__builtin_convertvector(bytes, i32_part), f32_part);
    });
}
static inline v16 load_e4m3(const uint8_t* p) {
    return each_part([&](int i) {
        typedef uint8_t part __attribute__((vector_size(LANES)));
        part bytes;
        memcpy(&bytes, p + i * LANES, LANES);
        u32_part c = __builtin_convertvector(bytes, u32_part), none = (u32_part)((c & 0x78u) == 0u);  // no exponent: below 2^-6
        f32_part at = (f32_part)(((c & 0x7fu) << 20) + 0x3c000000u + (none & 0x00800000u));
        return (f32_part)((u32_part)(at - (f32_part)(none & 0x3c800000u)) | (c & 0x80u) << 24);
    });
}

static inline constexpr float e4m3(uint32_t code) {
    const bool none = (code & 0x78) == 0;
    const float size = std::bit_cast<float>(((code & 0x7f) << 20) + 0x3c000000 + (none ? 0x00800000 : 0)) - (none ? 0x1p-6f : 0.0f);
    return code & 0x80 ? -size : size;
}

// Makes two bfloat16 a word from the e4m3 codes in their low bytes: exact.
static inline u32_part widen_e4m3(u32_part codes) {
    typedef uint16_t halves __attribute__((vector_size(LANES * 4)));
    const halves c = (halves)codes, size = c << 4 & 0x07f0, sign = c << 8 & 0x8000, none = (halves)(size < 0x0080);
    // Below 2^-6, m * 2^-9: as if its exponent were one higher, less that one's 1, is no bfloat16 operation; a table of 8 is.
    const halves low = size >> 4, is4 = (halves)(low >= 4), is2 = (halves)(low >= 2), is1 = (halves)(low >= 1);
    const halves small = (is4 & (0x3c00 + (low - 4) * 0x20)) | (~is4 & is2 & (0x3b80 + (low - 2) * 0x40)) | (~is2 & is1 & 0x3b00);
    return (u32_part)((none & small) | (~none & (size + 0x3c00)) | sign);
}

// The words of elements 0 and 1, and of 2 and 3, of a vector of e4m3 codes.
static inline void load_e4m3_pairs(const uint8_t* p, w16& first, w16& second) {
    const w16 codes = load_words(p);
    for (int i = 0; i < PARTS; i++) {
#if defined(__AVX512VBMI__)
        // The upper and the lower byte of each of the 128 sizes, by a permutation.
        alignas(64) static constexpr auto table = [] {
            struct { uint8_t upper[128], lower[128]; } t{};
            for (int c = 0; c < 128; c++) {
                const uint32_t word = std::bit_cast<uint32_t>(e4m3((uint32_t)c)) >> 16;
                t.upper[c] = (uint8_t)(word >> 8), t.lower[c] = (uint8_t)word;
            }
            return t;
        }();
        const __m512i c = (__m512i)codes.part[i], sign = _mm512_set1_epi8((char)0x80);
        const __m512i upper = _mm512_permutex2var_epi8(_mm512_load_si512(table.upper), c, _mm512_load_si512(table.upper + 64));
        const __m512i lower = _mm512_permutex2var_epi8(_mm512_load_si512(table.lower), c, _mm512_load_si512(table.lower + 64));
        const __m512i signed_upper = _mm512_ternarylogic_epi64(upper, c, sign, 0xf8);  // upper | (c & sign)
        first.part[i] = (u32_part)_mm512_unpacklo_epi8(lower, signed_upper);
        second.part[i] = (u32_part)_mm512_unpackhi_epi8(lower, signed_upper);
#elif defined(__AVX512F__)
        const __m512i c = (__m512i)codes.part[i], zero = _mm512_setzero_si512();
        first.part[i] = widen_e4m3((u32_part)_mm512_unpacklo_epi8(c, zero));
        second.part[i] = widen_e4m3((u32_part)_mm512_unpackhi_epi8(c, zero));
#elif defined(__AVX2__)
        const __m256i c = (__m256i)codes.part[i], zero = _mm256_setzero_si256();
        first.part[i] = widen_e4m3((u32_part)_mm256_unpacklo_epi8(c, zero));
        second.part[i] = widen_e4m3((u32_part)_mm256_unpackhi_epi8(c, zero));
#else
        typedef uint8_t bytes __attribute__((vector_size(8)));
        typedef uint16_t u16x8 __attribute__((vector_size(16)));
        bytes half[2];
        memcpy(half, &codes.part[i], 16);
        first.part[i] = widen_e4m3((u32_part)__builtin_convertvector(half[0], u16x8));
        second.part[i] = widen_e4m3((u32_part)__builtin_convertvector(half[1], u16x8));
#endif
    }
}

// The scales of a block of K, K_EIGHTH, K_LEAST or F16.
template <Scales KIND>
struct BlockScales {
    const uint8_t* at;
    v16 outer, outer_least;

    explicit BlockScales(const uint8_t* at) : at(at), outer(load_f16(at)), outer_least(KIND == Scales::K_LEAST ? load_f16(at + 32) : v16{}) {
        if (KIND == Scales::K_EIGHTH) outer = outer * splat(0.125f);
    }
    v16 scale(int64_t g) const {
        if (KIND == Scales::F16) return load_f16(at + g * 32);
        return outer * (KIND == Scales::K_LEAST ? load_bytes<uint8_t>(at + 64 + g * 32) : load_bytes<int8_t>(at + 32 + g * 16));
    }
    v16 least(int64_t g) const { return -(outer_least * load_bytes<uint8_t>(at + 80 + g * 32)); }
};

// The scale of each group of a block and, where the format has one, its least value; strip_end: where the strip ends.
static __attribute__((noinline, unused)) void read_scales(Scales kind, const uint8_t* at, const uint8_t* strip_end, int64_t n_groups, v16* scale, v16* least) {
    switch (kind) {
        case Scales::NONE: return;
        case Scales::F32:
            for (int64_t g = 0; g < n_groups; g++) scale[g] = load((const float*)(at + g * 64));
            return;
        case Scales::BF16_LEAST:
            for (int64_t g = 0; g < n_groups; g++) {
                w16 both = load_words(at + g * 64);
                scale[g] = each_part([&](int i) { return (f32_part)(both.part[i] << 16); });
                least[g] = each_part([&](int i) { return (f32_part)(both.part[i] & 0xffff0000u); });
            }
            return;
        case Scales::F16:
            for (int64_t g = 0; g < n_groups; g++) scale[g] = load_f16(at + g * 32);
            return;
        case Scales::F16_LEAST:
            for (int64_t g = 0; g < n_groups; g++) scale[g] = load_f16(at + g * 64), least[g] = load_f16(at + g * 64 + 32);
            return;
        case Scales::BF16:
            for (int64_t g = 0; g < n_groups; g++) scale[g] = load_bf16((const bf16*)(at + g * 32));
            return;
        case Scales::F16_ZERO:
        case Scales::BF16_ZERO:
            for (int64_t g = 0; g < n_groups; g++) {
                scale[g] = kind == Scales::F16_ZERO ? load_f16(at + g * 48) : load_bf16((const bf16*)(at + g * 48));
                least[g] = -(scale[g] * load_bytes<int8_t>(at + g * 48 + 32));
            }
            return;
        case Scales::K: {
            const BlockScales<Scales::K> block(at);
            for (int64_t g = 0; g < n_groups; g++) scale[g] = block.scale(g);
            return;
        }
        case Scales::K_EIGHTH: {
            const BlockScales<Scales::K_EIGHTH> block(at);
            for (int64_t g = 0; g < n_groups; g++) scale[g] = block.scale(g);
            return;
        }
        case Scales::K_LEAST: {
            const BlockScales<Scales::K_LEAST> block(at);
            for (int64_t g = 0; g < n_groups; g++) scale[g] = block.scale(g), least[g] = block.least(g);
            return;
        }
        case Scales::E8M0:  // half of 2^(byte - 127)
            for (int64_t g = 0; g < n_groups; g++)
                scale[g] = each_part([&](int i) {
                    typedef uint8_t part __attribute__((vector_size(LANES)));
                    part bytes;
                    memcpy(&bytes, at + g * 16 + i * LANES, LANES);
                    u32_part e = __builtin_convertvector(bytes, u32_part), small = (u32_part)(e < 2u);
                    return (f32_part)((((u32_part{} + 0x00200000u) << (e & 1u)) & small) | ((e - 1u) << 23 & ~small));
                });
            return;
        case Scales::E4M3: {
            const v16 times = load((const float*)(strip_end - 128)), over = load((const float*)(strip_end - 64));
            for (int64_t g = 0; g < n_groups; g++) scale[g] = load_e4m3(at + g * 16) * times / over * splat(0.5f);
            return;
        }
    }
}

// Codebooks (codebook.h): makes of n units those of INT8, of 512 bytes; and puts 32 elements of 16 rows into a unit, as put_unit.
void unpack_units(Codes codes, const uint8_t* units, int64_t n, uint8_t* to);
void put_entries(Codes codes, const uint32_t (&words)[8][STRIP], uint8_t* unit);

// Finds element i of a unit, for one lane: its byte in each vector is lane * 4 + i % 4.
static inline int code_at(Codes codes, const uint8_t* unit, int64_t i, int64_t lane) {
    const int64_t word = i / 4, byte = lane * 4 + i % 4;
    auto four = [&] { return unit[word / 2 * 64 + byte] >> word % 2 * 4 & 15; };
    auto two = [&](const uint8_t* at) { return at[word / 4 * 64 + byte] >> word % 4 * 2 & 3; };
    auto one = [&](const uint8_t* at) { return at[byte] >> word & 1; };
    switch (codes) {
        case Codes::INT8: return unit[word * 64 + byte];
        case Codes::E4M3: return unit[word * 64 + lane / 4 * 16 + i % 4 / 2 * 8 + lane % 4 * 2 + i % 2];
        case Codes::UINT5: return four() | one(unit + 256) << 4;
        case Codes::UINT6: return four() | two(unit + 256) << 4;
        case Codes::UINT2: return two(unit);
        case Codes::UINT3: return two(unit) | one(unit + 128) << 2;
        default: return four();
    }
}
// A unit of the codes [word][lane], 4 a word.
static inline void put_unit(Codes codes, const uint32_t (&words)[8][STRIP], uint8_t* unit) {
    auto put = [&](int64_t vector, auto word) {
        uint32_t lanes[STRIP];
        for (int lane = 0; lane < STRIP; lane++) lanes[lane] = word(lane);
        memcpy(unit + vector * 64, lanes, 64);
    };
    auto four = [&] {
        for (int v = 0; v < 4; v++) put(v, [&](int lane) { return (words[2 * v][lane] & 0x0f0f0f0fu) | (words[2 * v + 1][lane] & 0x0f0f0f0fu) << 4; });
    };
    auto two = [&](int64_t at, int shift) {
        for (int v = 0; v < 2; v++)
            put(at + v, [&](int lane) {
                uint32_t all = 0;
                for (int j = 0; j < 4; j++) all |= (words[4 * v + j][lane] >> shift & 0x03030303u) << 2 * j;
                return all;
            });
    };
    auto one = [&](int64_t at, int shift) {
        put(at, [&](int lane) {
            uint32_t all = 0;
            for (int j = 0; j < 8; j++) all |= (words[j][lane] >> shift & 0x01010101u) << j;
            return all;
        });
    };
    switch (codes) {
        case Codes::INT8:
            for (int v = 0; v < 8; v++) put(v, [&](int lane) { return words[v][lane] ^ 0x80808080u; });
            return;
        case Codes::E4M3:
            for (int v = 0; v < 8; v++)
                put(v, [&](int i) {  // two lanes' elements 0 and 1, or 2 and 3
                    const int lane = i / 4 * 4 + i % 2 * 2, shift = i % 4 / 2 * 16;
                    return (words[v][lane] >> shift & 0xffffu) | words[v][lane + 1] >> shift << 16;
                });
            return;
        case Codes::UINT5: four(), one(4, 4); return;
        case Codes::UINT6: four(), two(4, 4); return;
        case Codes::UINT2: two(0, 0); return;
        case Codes::UINT3: two(0, 0), one(2, 2); return;
        default: return is_book(codes) ? put_entries(codes, words, unit) : four();
    }
}

// Writes the values that row n stands for.
static inline void unpack_row(const Matrix& w, int64_t n, float* out) {
    const uint8_t *at = w.data + n / STRIP * w.strip_bytes(), *end = at + w.strip_bytes();
    const int64_t lane = n % STRIP;
    const Codes codes = w.codes();
    if (codes == Codes::BF16) {
        for (int64_t i = 0; i < w.k; i++) {
            bf16 x;
            memcpy(&x, at + i / 2 * 64 + lane * 4 + i % 2 * 2, 2);
            out[i] = widen(x);
        }
        return;
    }
    const bool with_least = has_least(w.scales());
    const int bias = bias_of(codes, with_least);
    for (int64_t k0 = 0; k0 < w.k; k0 += w.block()) {
        const int64_t n_k = w.k - k0 < w.block() ? w.k - k0 : w.block();
        v16 scale[MOST_GROUPS], least[MOST_GROUPS] = {};
        read_scales(w.scales(), at + w.code_bytes(n_k), end, (n_k + w.group - 1) / w.group, scale, least);
        for (int64_t g = 0; g * w.group < n_k; g++) {
            float scales[STRIP], leasts[STRIP];
            store(scales, scale[g]);
            store(leasts, least[g]);
            const int64_t stop = (g + 1) * w.group < n_k ? (g + 1) * w.group : n_k;
            for (int64_t i = g * w.group; i < stop; i++) {
                const uint8_t* unit = at + i / UNIT * unit_bytes(codes);
                uint8_t made[512];
                if (is_book(codes) && (i % UNIT == 0 || i == g * w.group)) unpack_units(codes, unit, 1, made);
                const int code = is_book(codes) ? code_at(Codes::INT8, made, position(codes, i % UNIT), lane) : code_at(codes, unit, i % UNIT, lane);
                float value = (float)(code - bias);
                if (codes == Codes::IQ4 || codes == Codes::E2M1) value = (float)TABLES[codes == Codes::E2M1][code];
                if (codes == Codes::E4M3) value = e4m3((uint32_t)code);
                value = value * scales[lane];
                out[k0 + i] = with_least ? value + leasts[lane] : value;
            }
        }
        at += w.code_bytes(n_k) + w.scale_bytes(n_k);
    }
}
