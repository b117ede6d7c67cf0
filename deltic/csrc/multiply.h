// y = x W^T for strips [s0, s1) of a packed matrix: out(m) is where row m's output 0 goes; it is added to when `add`.
#pragma once
#include "amx.h"
#include "matrix.h"

template <class Out>
static inline void multiply(const Rows& x, int64_t n_rows, const Matrix& matrix, int64_t s0, int64_t s1, bool add, const Out& out) {
    switch (matrix.format) {
#if defined(__AMX_BF16__)
        case Format::BF16: return amx::multiply(x, n_rows, matrix, s0, s1, add, out);
#else
        case Format::BF16: return multiply_strips<Format::BF16>(x, n_rows, matrix, s0, s1, add, out);
#endif
        case Format::INT8: return multiply_strips<Format::INT8>(x, n_rows, matrix, s0, s1, add, out);
        case Format::INT4: return multiply_strips<Format::INT4>(x, n_rows, matrix, s0, s1, add, out);
    }
}
