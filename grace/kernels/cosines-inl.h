// Cosine transforms of chunks, as in grace/compressors/demo.py.
//
// A transform of an even size h has two parts. The sums of elements i and h - 1 - i are transformed with size h / 2,
// which gives the even coefficients. The differences of these elements are multiplied by a symmetric matrix, which
// gives the odd coefficients. Halving ends at an odd size, whose transform is one matrix product. Faster algorithms
// divide by small cosines and need code for each size; this algorithm does neither. Transforms run along the columns of
// a matrix. To transform rows, the matrix is first transposed in the cache.
#pragma once

#include <cstdint>
#include <cstring>

#include "common-inl.h"
#include "floats-inl.h"
#include "kernels.h"
#include "vectors-inl.h"

namespace {

using grace::Cosines;
using grace::Terms;
using grace::Tile;

#if defined(GRACE_AVX512)
constexpr int64_t WIDE = 4, SHARED = 4;  // adjacent vectors per pass; matrix rows that share each load of a vector
#elif defined(GRACE_AVX2)
constexpr int64_t WIDE = 1, SHARED = 4;
#else
constexpr int64_t WIDE = 1, SHARED = 1;
#endif

INLINE int64_t whole(int64_t n) { return (n + W - 1) / W * W; }

// Scratch for a tile: four arrays of the size of the tile, with both sides padded to whole vectors.
struct Workbench {
  int64_t lanes;  // elements per row of `v` and of its transforms
  float *v, *one, *other, *scratch;
  INLINE_MEMBER Workbench(const Tile& tile, float* room) : lanes(whole(tile.columns)), v(room) {
    const int64_t size = lanes * whole(tile.rows);
    one = v + size, other = one + size, scratch = other + size;
  }
};

INLINE int64_t length(const Tile& tile, int64_t row) { return row + 1 < tile.height ? tile.width : tile.last; }

// ---- the transform and its inverse ----------------------------------------------------------------------------------

// Returns sum + x * y. If ONCE, uses FMA where the machine has it. If not, the result has the same bits on all
// machines.
template <bool ONCE>
INLINE F added(F sum, F x, F y) {
#if defined(GRACE_AVX512) || defined(GRACE_AVX2)
  if constexpr (ONCE) return fused(x, y, sum);
#endif
  return sum + x * y;
}

// Multiplies rows first .. first + ROWS - 1 of matrix[.., n] by x, which has n rows of N vectors; the rows are `apart`
// elements apart. Calls emit(row, lane, vector) for each result.
template <bool ONCE, int64_t ROWS, int64_t N, class Emit>
INLINE void some_products(const float* matrix, int64_t n, int64_t first, const float* x, int64_t apart,
                          const Emit& emit) {
  F sums[ROWS][N];
  const float* factors = matrix + first * n;
  EACH_OF(N) {
    const F each = load(x + k * W);
    for (int64_t i = 0; i < ROWS; i++) sums[i][k] = fill(factors[i * n]) * each;
  }
  for (int64_t m = 1; m < n; m++) {
    x += apart;
    F each[N];
    EACH_OF(N) each[k] = load(x + k * W);
    for (int64_t i = 0; i < ROWS; i++) {
      const F factor = fill(factors[i * n + m]);
      EACH_OF(N) sums[i][k] = added<ONCE>(sums[i][k], factor, each[k]);
    }
  }
  for (int64_t i = 0; i < ROWS; i++) EACH_OF(N) emit(first + i, k * W, sums[i][k]);
}

// As some_products, for all n rows of the matrix.
template <bool ONCE, int64_t N, class Emit>
INLINE void products(const float* matrix, int64_t n, const float* x, int64_t apart, const Emit& emit) {
  int64_t i = 0;
  for (; i + SHARED <= n; i += SHARED) some_products<ONCE, SHARED, N>(matrix, n, i, x, apart, emit);
  for (; i < n; i++) some_products<ONCE, 1, N>(matrix, n, i, x, apart, emit);
}

// Prefetches each position of the next tile when the same position of the current tile is written. Hardware prefetchers
// do not follow distant rows.
struct Coming {
  const float* x;  // null: nothing to prefetch
  int64_t stride;
  INLINE_MEMBER void ask(int64_t row, int64_t lane) const {
    if (x) __builtin_prefetch(x + row * stride + lane);
  }
};

// y = the transform of x along columns, for N vectors of each row. Rows are `lanes` elements apart. scratch: room for
// how.size rows of N vectors.
template <int64_t N>
OUTLINE void transform_some(const Cosines& how, const float* x, float* y, int64_t lanes, float* scratch,
                            const Coming& coming) {
  float *const sums = scratch, *const differences = scratch + how.size / 2 * N * W;
  const float* matrix = how.halves + how.count;
  int64_t size = how.size, step = 1, apart = lanes;
  const auto emit = [&](int64_t row, int64_t lane, F sum) __attribute__((always_inline)) {
    store(y + row * lanes + lane, sum);
    coming.ask(row, lane);
  };
  for (; size % 2 == 0; size /= 2, step *= 2) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i++)
      EACH_OF(N) {
        const F a = load(x + i * apart + k * W), b = load(x + (size - 1 - i) * apart + k * W);
        store(sums + (i * N + k) * W, a + b);
        store(differences + (i * N + k) * W, a - b);
      }
    matrix -= half * half;
    products<true, N>(matrix, half, differences, N * W, [&](int64_t i, int64_t lane, F sum)
                      __attribute__((always_inline)) { emit(step * (2 * i + 1), lane, sum); });
    x = sums, apart = N * W;
  }
  products<true, N>(how.odd, size, x, apart, [&](int64_t i, int64_t lane, F sum)
                    __attribute__((always_inline)) { emit(step * i, lane, sum); });
}

// The inverse of transform_some. y must not alias x.
template <int64_t N>
OUTLINE void restore_some(const Cosines& how, const float* x, float* y, int64_t lanes) {
  int64_t size = how.size, step = 1;
  for (; size % 2 == 0; size /= 2) step *= 2;
  products<false, N>(how.odd + size * size, size, x, step * lanes, [&](int64_t i, int64_t lane, F sum)
                     __attribute__((always_inline)) { store(y + i * lanes + lane, sum); });
  const float* matrix = how.halves;
  for (; size < how.size; matrix += size * size, size *= 2) {
    step /= 2;
    const auto emit = [&](int64_t i, int64_t lane, F odd) __attribute__((always_inline)) {
      float* const to = y + i * lanes + lane;
      const F even = load(to);
      store(to, even + odd);
      store(y + (2 * size - 1 - i) * lanes + lane, even - odd);
    };
    products<false, N>(matrix, size, x + step * lanes, 2 * step * lanes, emit);
  }
}

INLINE void transform_columns(const Cosines& how, const float* x, float* y, int64_t lanes, float* scratch,
                              const float* coming, int64_t stride) {
  const auto from = [=](int64_t j) { return Coming{coming ? coming + j : nullptr, stride}; };
  int64_t j = 0;
  for (; j + WIDE * W <= lanes; j += WIDE * W) transform_some<WIDE>(how, x + j, y + j, lanes, scratch, from(j));
  for (; j < lanes; j += W) transform_some<1>(how, x + j, y + j, lanes, scratch, from(j));
}

INLINE void restore_columns(const Cosines& how, const float* x, float* y, int64_t lanes) {
  int64_t j = 0;
  for (; j + WIDE * W <= lanes; j += WIDE * W) restore_some<WIDE>(how, x + j, y + j, lanes);
  for (; j < lanes; j += W) restore_some<1>(how, x + j, y + j, lanes);
}

// y = the transpose of 4 x 4 elements of x.
INLINE void turn(const float* x, int64_t apart, float* y, int64_t lanes) {
#if defined(GRACE_AVX512) || defined(GRACE_AVX2)
  __m128 a = _mm_loadu_ps(x), b = _mm_loadu_ps(x + apart), c = _mm_loadu_ps(x + 2 * apart),
         d = _mm_loadu_ps(x + 3 * apart);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  _mm_storeu_ps(y, a), _mm_storeu_ps(y + lanes, b), _mm_storeu_ps(y + 2 * lanes, c), _mm_storeu_ps(y + 3 * lanes, d);
#else
  for (int64_t j = 0; j < 4; j++) {
    const f4 row = {x[j], x[apart + j], x[2 * apart + j], x[3 * apart + j]};
    memcpy(y + j * lanes, &row, 16);
  }
#endif
}

// y[columns, rows] = the transpose of x[rows, columns]. Rows are `apart` elements apart in x, and `lanes` in y.
OUTLINE void transpose(const float* x, int64_t rows, int64_t columns, int64_t apart, float* y, int64_t lanes) {
  const int64_t fours = rows / 4 * 4, across = columns / 4 * 4;
  for (int64_t j = 0; j < across; j += 4)
    for (int64_t i = 0; i < fours; i += 4) turn(x + i * apart + j, apart, y + j * lanes + i, lanes);
  for (int64_t j = 0; j < columns; j++)
    for (int64_t i = j < across ? fours : 0; i < rows; i++) y[j * lanes + i] = x[i * apart + j];
}

// ---- tiles: demo ----------------------------------------------------------------------------------------------------

template <bool RESIDUAL>
INLINE void tile_to(const Tile& tile, const float* x, const float* residual, const Workbench& bench) {
  for (int64_t i = 0; i < tile.height; i++) {
    const float *from = x + i * tile.stride, *other = RESIDUAL ? residual + i * tile.stride : nullptr;
    float* const to = bench.v + i * bench.lanes;
    int64_t j = load_all<RESIDUAL>(to, from, other, 0, length(tile, i));
    for (; j < bench.lanes; j += W) store(to + j, fill(0));
  }
  memset(bench.v + tile.height * bench.lanes, 0, size_t((tile.rows - tile.height) * bench.lanes) * sizeof(float));
}

// Returns the coefficients of x + residual, float32[rows, columns]. Leaves x + residual in `room`, for demo_left.
const float* demo_of(const Tile* tile, const float* x, const float* residual, float* room) {
  const Workbench bench(*tile, room);
  const int64_t rows = tile->rows, columns = tile->columns, lanes = whole(rows);
  residual ? tile_to<true>(*tile, x, residual, bench) : tile_to<false>(*tile, x, nullptr, bench);
  const float *from = bench.v, *coming = nullptr;
  if (tile->down) {
    transform_columns(*tile->down, bench.v, bench.one, bench.lanes, bench.scratch, x + tile->next, tile->stride);
    from = bench.one, coming = residual ? residual + tile->next : nullptr;
  }
  transpose(from, rows, columns, bench.lanes, bench.other, lanes);
  transform_columns(*tile->across, bench.other, bench.one, lanes, bench.scratch, coming, tile->stride);
  transpose(bench.one, columns, rows, lanes, bench.other, columns);
  return bench.other;
}

// out = the sum of the terms of each row, for N vectors of columns. `matrix` and `out` begin at the first column.
template <int64_t N>
INLINE void sum_terms(const Terms& terms, const float* matrix, int64_t rows, int64_t lanes, float* out) {
  for (int64_t row = 0, t = 0; row < rows; row++) {
    F sums[N];
    EACH_OF(N) sums[k] = fill(0);
    for (; t < terms.count && terms.rows[t] == row; t++) {
      const F value = fill(terms.values[t]);
      const float* const from = matrix + terms.columns[t] * lanes;
      EACH_OF(N) sums[k] = added<false>(sums[k], value, load(from + k * W));
    }
    EACH_OF(N) store(out + row * lanes + k * W, sums[k]);
  }
}

// Decode: returns the values of a tile, in rows of bench.lanes elements. There are few terms, so the transform along
// rows adds their basis vectors directly.
OUTLINE const float* restored(const Tile& tile, const Terms& terms, const Workbench& bench) {
  const float* const matrix = tile.across->matrix;
  int64_t j = 0;
  for (; j + WIDE * W <= bench.lanes; j += WIDE * W)
    sum_terms<WIDE>(terms, matrix + j, tile.rows, bench.lanes, bench.one + j);
  for (; j < bench.lanes; j += W) sum_terms<1>(terms, matrix + j, tile.rows, bench.lanes, bench.one + j);
  if (!tile.down) return bench.one;
  restore_columns(*tile.down, bench.one, bench.other, bench.lanes);
  return bench.other;
}

// out = x - decode(terms). If x is null, out = v - decode(terms), where v = x + residual, which demo_of left in `room`.
void demo_left(const Tile* tile, const Terms* terms, const float* x, float* out, float* room) {
  const Workbench bench(*tile, room);
  const float* const carried = restored(*tile, *terms, bench);
  for (int64_t i = 0; i < tile->height; i++) {
    const int64_t size = length(*tile, i);
    const float *v = x ? x + i * tile->stride : bench.v + i * bench.lanes, *each = carried + i * bench.lanes;
    float* const to = out + i * tile->stride;
    int64_t j = 0;
    for (; j + W <= size; j += W) store(to + j, load(v + j) - load(each + j));
    if (j < size) store_some(to + j, load_some(v + j, size - j) - load(each + j), size - j);
  }
}

INLINE F sign_of(F x) {  // 0 for 0, and NaN for NaN
  return pick(below_zero(x), fill(-1), pick(below_zero(fill(0) - x), fill(1), x));
}

template <bool STREAM>
INLINE void tile_values_to(const Tile& tile, const float* values, float* out, bool sign, const Workbench& bench) {
  for (int64_t i = 0; i < tile.height; i++) {
    const int64_t size = length(tile, i);
    const float* const from = values + i * bench.lanes;
    float* const to = out + i * tile.stride;
    int64_t j = 0;
    for (; j + W <= size; j += W) put<STREAM>(to + j, sign ? sign_of(load(from + j)) : load(from + j));
    if (j < size) store_some(to + j, sign ? sign_of(load(from + j)) : load(from + j), size - j);
  }
  if (STREAM) fence();
}

void demo_values(const Tile* tile, const Terms* terms, float* out, float* room, bool sign, bool stream) {
  const Workbench bench(*tile, room);
  const float* const values = restored(*tile, *terms, bench);
  stream ? tile_values_to<true>(*tile, values, out, sign, bench) : tile_values_to<false>(*tile, values, out, sign, bench);
}

// most[g] = the largest key (the bits of a magnitude, capped at infinity) of x + residual at positions congruent to g
// modulo `groups`, a multiple of 64. May ignore some of the last n % groups elements.
template <bool RESIDUAL, int64_t COUNT>
INLINE void some_largest(const float* x, const float* residual, int64_t n, int64_t groups, int32_t* most) {
  const I cap = fill_int(0x7f800000);
  I found[COUNT];
  EACH_OF(COUNT) found[k] = fill_int(0);
  for (int64_t i = 0; i + COUNT * W <= n; i += groups)
    EACH_OF(COUNT) found[k] = larger(found[k], magnitude_bits(value<RESIDUAL>(x, residual, i + k * W)));
  EACH_OF(COUNT) write(reinterpret_cast<I*>(most), k, smaller(found[k], cap));
}

template <bool RESIDUAL>
INLINE void groups_largest_of(const float* x, const float* residual, int64_t n, int64_t groups, int32_t* most) {
  int64_t j = 0;
  for (; j + 8 * W <= groups; j += 8 * W)
    some_largest<RESIDUAL, 8>(x + j, RESIDUAL ? residual + j : nullptr, n - j, groups, most + j);
  if (j < groups) some_largest<RESIDUAL, 4>(x + j, RESIDUAL ? residual + j : nullptr, n - j, groups, most + j);
}

void groups_largest(const float* x, const float* residual, int64_t n, int64_t groups, int32_t* most) {
  residual ? groups_largest_of<true>(x, residual, n, groups, most)
           : groups_largest_of<false>(x, nullptr, n, groups, most);
}

// Returns a bound such that exactly k keys are >= the bound; if ties prevent that, the k-th largest key. Searches bit
// by bit, so that no branch depends on a single key. n: a multiple of W. 1 <= k <= n. Ignores keys of 0.
int32_t bound_of(const int32_t* keys, int64_t n, int64_t k) {
  int32_t bound = 0;
  for (int32_t bit = 1 << 30; bit; bit >>= 1) {
    const I trial = fill_int(bound | bit);
    I counts = fill_int(0);
    for (int64_t j = 0; j < n; j += W)
      counts = raised(at_least(magnitude_bits(load(reinterpret_cast<const float*>(keys + j))), trial), counts, 1);
    int32_t each[W], count = 0;
    memcpy(each, &counts, sizeof each);
    for (int64_t j = 0; j < W; j++) count += each[j];
    if (count < k) continue;
    bound |= bit;
    if (count == k) break;
  }
  return bound;
}

}  // namespace
