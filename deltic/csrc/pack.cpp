// Packing and quantising of matrices at load, a strip of 16 rows at a time; the layouts are in matrix.h. Nothing here is
// fused, so that all instruction sets give the same bytes.
#include "kernel.h"
#include "format.h"
#include "pool.h"

namespace {

constexpr int64_t MOST_GROUP = 128;  // of the formats in deltic/ops/matrix.py

void pack_bf16(const bf16* rows, int64_t n_rows, int64_t k, uint8_t* out) {
    memset(out, 0, k * STRIP * 2);
    for (int64_t j0 = 0; j0 < k / 2; j0 += 16)  // a kilobyte at a time
        for (int64_t lane = 0; lane < n_rows; lane++)
            for (int64_t j = j0; j < j0 + 16; j++) memcpy(out + j * 64 + lane * 4, rows + lane * k + 2 * j, 4);
}

// A group of one strip, one row a lane.
struct Group {
    float w[MOST_GROUP * STRIP];
    int64_t n_k;

    v16 at(int64_t i) const { return load(w + i * STRIP); }

    // round((w - least) / scale) in [0, top]; where the scale is 0, so is what is multiplied with it.
    v16 quantised(int64_t i, v16 least, v16 inverse, float top) const {
        const v16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
        v16 q = (at(i) - least) * inverse + magic - magic;
        return -vmax(splat(-top), -vmax(splat(0.0f), q));
    }
};

v16 inverse_of(v16 x) {
    return each_part([&](int i) { return select(x.part[i] == f32_part{}, f32_part{}, 1.0f / x.part[i]); });
}

void quantise_int8(const Group& group, uint8_t* out) {
    v16 most = {};
    for (int64_t i = 0; i < group.n_k; i++) most = vmax(most, vmax(group.at(i), -group.at(i)));
    v16 scale = most * splat(1.0f / 127.0f), inverse = inverse_of(scale);
    for (int64_t i = 0; i < group.n_k; i++) {
        float q[STRIP];
        store(q, group.quantised(i, scale * splat(-128.0f), inverse, 255.0f));
        for (int64_t lane = 0; lane < STRIP; lane++) out[i / 4 * 64 + lane * 4 + i % 4] = (uint8_t)q[lane];
    }
    store((float*)(out + group.n_k * STRIP), scale);
}

// Scale and least by trial: quantise with a step near (max - min) / 15, fit both to the result by least squares, keep the
// best of the trials (the method of llama.cpp's K-quants). `symmetric`: least is -8 scale, only the scale is fitted, and its
// sign is tried both ways, since -8 reaches further than 7.
void fit_int4(const Group& group, bool symmetric, v16& best_scale, v16& best_least) {
    v16 low = group.at(0), high = group.at(0), sum_x = {}, sum_xx = {};
    for (int64_t i = 0; i < group.n_k; i++) {
        v16 x = group.at(i);
        high = vmax(high, x);
        low = -vmax(-low, -x);
        sum_x = sum_x + x;
        sum_xx = x * x + sum_xx;
    }
    v16 most = vmax(high, -low), n = splat((float)group.n_k);
    v16 best_error = splat(INFINITY);
    best_scale = best_least = v16{};
    for (int trial = 0; trial < (symmetric ? 16 : 8); trial++) {
        const float divisor = 0.3f * (float)(trial % 8), sign = trial < 8 ? 1.0f : -1.0f;
        v16 step = symmetric ? most * splat(sign / (6.5f + divisor)) : (high - low) * splat(1.0f / (14.0f + divisor));
        v16 start = symmetric ? step * splat(-8.0f) : low, inverse = inverse_of(step);
        v16 sum_q = {}, sum_qq = {}, sum_qx = {};
        for (int64_t i = 0; i < group.n_k; i++) {
            v16 q = group.quantised(i, start, inverse, 15.0f), x = group.at(i);
            if (symmetric) q = q - splat(8.0f);
            sum_q = sum_q + q;
            sum_qq = q * q + sum_qq;
            sum_qx = q * x + sum_qx;
        }
        v16 scale, least;
        if (symmetric) {
            scale = sum_qx * inverse_of(sum_qq);
            least = v16{};
        } else {
            v16 spread = n * sum_qq - sum_q * sum_q;
            scale = (n * sum_qx - sum_q * sum_x) * inverse_of(spread);
            least = (sum_x - scale * sum_q) / n;
        }
        // |x - scale q - least|^2, expanded
        v16 error = sum_xx + scale * scale * sum_qq + n * least * least - splat(2.0f) * (scale * sum_qx + least * sum_x - scale * least * sum_q);
        if (symmetric) least = scale * splat(-8.0f);
        for (int i = 0; i < PARTS; i++) {
            i32_part better = error.part[i] < best_error.part[i];
            best_error.part[i] = select(better, error.part[i], best_error.part[i]);
            best_scale.part[i] = select(better, scale.part[i], best_scale.part[i]);
            best_least.part[i] = select(better, least.part[i], best_least.part[i]);
        }
    }
}

void quantise_int4(const Group& group, bool symmetric, uint8_t* out) {
    v16 scale, least;
    fit_int4(group, symmetric, scale, least);
    scale = round_bf16(scale);
    least = symmetric ? scale * splat(-8.0f) : round_bf16(least);
    v16 inverse = inverse_of(scale);
    memset(out, 0, group.n_k * STRIP / 2);
    for (int64_t i = 0; i < group.n_k; i++) {
        float q[STRIP];
        store(q, group.quantised(i, least, inverse, 15.0f));
        for (int64_t lane = 0; lane < STRIP; lane++) out[i / 8 * 64 + lane * 4 + i % 4] |= (uint8_t)q[lane] << (i % 8 / 4 * 4);
    }
    uint8_t* scales = out + group.n_k * STRIP / 2;
    for (int i = 0; i < PARTS; i++) {
        u32_part both = (u32_part)least.part[i] | (u32_part)scale.part[i] >> 16;
        memcpy(scales + i * LANES * 4, &both, sizeof both);
    }
}

}  // namespace

// Rows that are quantised already, put into strips. codes u8 [N, K]; scale, least and outer: what Quantised of
// deltic/ops/formats.py holds, a row after another, null where the format has none; w (packed: data, format, N, K, group)
KERNEL(deltic_pack_codes, const uint8_t* codes, const uint8_t* scale, const uint8_t* least, const uint8_t* outer, Matrix w) {
    constexpr int64_t SCALE[] = {0, 4, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1}, LEAST[] = {0, 0, 2, 0, 2, 1, 0, 1, 0, 1, 0, 0, 0};
    const Scales kind = w.scales();
    const int64_t n_scale = SCALE[(int64_t)kind], n_least = LEAST[(int64_t)kind], groups = w.n_groups();
    const int64_t n_outer = kind == Scales::K || kind == Scales::K_EIGHTH ? 2 : kind == Scales::K_LEAST ? 4 : 0;  // bytes of a block
    const int64_t at_scale = 16 * n_outer;
    const int64_t a_group = STRIP * (n_scale + n_least);
    parallel_for(w.n_strips(), [&](int64_t strip, int) {
        uint8_t* out = (uint8_t*)w.data + strip * w.strip_bytes();
        memset(out, 0, w.strip_bytes());
        const int64_t n_rows = w.n - strip * STRIP < STRIP ? w.n - strip * STRIP : STRIP;
        for (int64_t k0 = 0; k0 < w.k; k0 += w.block()) {
            const int64_t n_k = w.k - k0 < w.block() ? w.k - k0 : w.block();
            for (int64_t i = 0; i < n_k; i += UNIT) {
                uint32_t words[8][STRIP] = {};
                for (int64_t lane = 0; lane < n_rows; lane++)
                    for (int64_t j = 0; j < 8; j++) memcpy(&words[j][lane], codes + (strip * STRIP + lane) * w.k + k0 + i + 4 * j, 4);
                put_unit(w.codes(), words, out + i / UNIT * unit_bytes(w.codes()));
            }
            for (int64_t lane = 0; lane < n_rows; lane++) {
                const int64_t row = strip * STRIP + lane, g0 = row * groups + k0 / w.group;
                uint8_t* scales = out + w.code_bytes(n_k);
                for (int64_t part = 0; part * 2 < n_outer; part++)
                    memcpy(scales + part * 32 + lane * 2, outer + (row * ((w.k + BLOCK - 1) / BLOCK) + k0 / BLOCK) * n_outer + part * 2, 2);
                for (int64_t g = 0; g * w.group < n_k; g++) {
                    uint8_t* to = scales + at_scale + g * a_group;
                    // --quantize's pairs stand beside each other
                    const bool pairs = kind == Scales::BF16_LEAST;
                    memcpy(to + lane * (pairs ? 4 : n_scale), scale + (g0 + g) * n_scale, n_scale);
                    if (n_least) memcpy(pairs ? to + lane * 4 + 2 : to + STRIP * n_scale + lane * n_least, least + (g0 + g) * n_least, n_least);
                }
            }
            out += w.code_bytes(n_k) + w.scale_bytes(n_k);
        }
        for (int64_t lane = 0; lane < n_rows && w.tail_bytes(); lane++)
            for (int64_t part = 0; part < 2; part++) memcpy(out + part * 64 + lane * 4, outer + ((strip * STRIP + lane) * 2 + part) * 4, 4);
    });
}

// values bf16 [N, K], w (packed: data, format, N, K, group), symmetric (of int4)
KERNEL(deltic_pack, const bf16* values, Matrix w, bool symmetric) {
    parallel_for(w.n_strips(), [&](int64_t strip, int) {
        const bf16* rows = values + strip * STRIP * w.k;
        int64_t n_rows = w.n - strip * STRIP < STRIP ? w.n - strip * STRIP : STRIP;
        uint8_t* out = (uint8_t*)w.data + strip * w.strip_bytes();
        if (w.codes() == Codes::BF16) return pack_bf16(rows, n_rows, w.k, out);
        for (int64_t k0 = 0; k0 < w.k; k0 += w.group) {
            Group group;
            group.n_k = w.k - k0 < w.group ? w.k - k0 : w.group;
            for (int64_t lane = 0; lane < STRIP; lane++)
                for (int64_t i = 0; i < group.n_k; i++) group.w[i * STRIP + lane] = lane < n_rows ? widen(rows[lane * w.k + k0 + i]) : 0.0f;
            if (w.codes() == Codes::INT8) quantise_int8(group, out);
            else quantise_int4(group, symmetric, out);
            out += w.code_bytes(group.n_k) + w.scale_bytes(group.n_k);
        }
    });
}
