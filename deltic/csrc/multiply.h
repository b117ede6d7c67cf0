// y = x W^T for strips [s0, s1) of a packed matrix and all n_rows rows of x: multiply.cpp chooses what is compiled for its format.
#pragma once
#include "matrix.h"

void multiply(const Rows& x, int64_t n_rows, const Matrix& matrix, int64_t s0, int64_t s1, const Out& out);
