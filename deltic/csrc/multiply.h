// y = x W^T for strips [s0, s1) of a packed matrix and all n_rows rows of x. Its inner loops, of matrix.h and amx.h, are half of the time
// of a compile, so two files share the formats out: linear.cpp has those of plain groups, multiply.cpp the others.
#pragma once
#include "amx.h"
#include "matrix.h"

void multiply(const Rows& x, int64_t n_rows, const Matrix& matrix, int64_t s0, int64_t s1, const Out& out);
void multiply_others(const Rows& x, int64_t n_rows, const Matrix& matrix, int64_t s0, int64_t s1, const Out& out);

// With a format T (Tiles of matrix.h): on the matrix unit where there is one and the rows stand, else by vectors.
template <class T>
static inline void multiply_with(const Rows& x, int64_t n_rows, const Matrix& w, int64_t s0, int64_t s1, const Out& out) {
#if defined(__AMX_BF16__)
    if constexpr (!T::HALF_UNITS)
        if (x.stand) return amx::multiply_groups<T::CODES, T::HAS_LEAST>(x, n_rows, w, s0, s1, out);
#endif
    multiply_strips<T>(x, n_rows, w, s0, s1, out);
}
