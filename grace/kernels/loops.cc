// The loops of the kernels. The build compiles this file into one library per instruction set: with -DGRACE_AVX512,
// with -DGRACE_AVX2, or with neither.
//
// Call only inlined functions in the loops. All libraries share one process, so code for older processors could bind to
// a standard-library function that was compiled here for AVX-512.
#include "api.h"
#include "common-inl.h"
#include "cosines-inl.h"
#include "floats-inl.h"
#include "kernels.h"
#include "levels-inl.h"
#include "methods-inl.h"
#include "patch-inl.h"
#include "rotations-inl.h"
#include "signs-inl.h"
#include "vectors-inl.h"

#if defined(GRACE_AVX512)
#define NAME "avx512"
#elif defined(GRACE_AVX2)
#define NAME "avx2"
#elif defined(__aarch64__)
#define NAME "neon"
#else
#define NAME "scalar"
#endif

namespace {

// ---- integers: blockint ---------------------------------------------------------------------------------------------

template <bool RESIDUAL, Out OUT, int BITS, bool RANDOM>
OUTLINE int32_t blockint_emit_as(const float* x, const float* residual, float* out, uint8_t* codes, float scale, int64_t n,
                                 const Noise& noise, int64_t first, int64_t after) {
  const float top = float((1 << (BITS - 1)) - 1);
  const F tops = fill(top), step = fill(scale / top), divisor = fill(scale == 0.0f ? 1.0f : scale);
  const int64_t start = noise.start + first;
  Next<Largest, RESIDUAL> next(x, residual, after);
  const auto emit = [&](int64_t i, const uint16_t* table, uint16_t offset) __attribute__((always_inline)) {
    next.look(i);
    const F v = value<RESIDUAL>(x, residual, i);
    const F steps = v / divisor * tops;
    const I code = RANDOM ? down(steps + uniform(table, offset)) : nearest(steps);
    to_codes<BITS>(codes + i * BITS / 8, code);
    leave<OUT>(x, residual, out, i, v - to_float(code) * step);
  };
  int64_t i = 0;
  while (i + W <= n) {  // in runs of positions with the same offset
    const int64_t index = (start + i) & 65535, whole = RANDOM ? least(n - i, 65536 - index) / W : (n - i) / W;
    if (RANDOM && !whole) {
      uint16_t mixed[W];
      few_noise(mixed, noise, start + i, W);
      emit(i, mixed, 0);
      i += W;
      continue;
    }
    const uint16_t offset = RANDOM ? read(noise.offsets, ((start + i) >> 16) - noise.origin) : uint16_t(0);
    for (const int64_t from = i, stop = i + whole * W; i < stop; i += W)
      emit(i, RANDOM ? noise.table + index + (i - from) : nullptr, offset);
  }
  if (i < n) {
    const int64_t count = n - i;
    next.look_some(i, count);
    const F v = value_some<RESIDUAL>(x, residual, i, count);
    const F steps = v / divisor * tops;
    uint16_t mixed[W] = {};
    if (RANDOM) few_noise(mixed, noise, start + i, count);
    const I code = RANDOM ? down(steps + uniform(mixed, 0)) : nearest(steps);
    uint8_t bytes[W];
    to_codes<BITS>(bytes, code);
    memcpy(codes + i * BITS / 8, bytes, size_t((count * BITS + 7) / 8));  // the code of padding is 0
    leave_some<OUT>(x, residual, out, i, v - to_float(code) * step, count);
  }
  return next.found.result();
}

template <bool RESIDUAL, Out OUT>
INLINE int32_t blockint_emit_to(const float* x, const float* residual, float* out, uint8_t* codes, float scale, int64_t n,
                                int bits, const Noise& noise, int64_t first, int64_t after) {
#define AS(BITS, RANDOM) \
  blockint_emit_as<RESIDUAL, OUT, BITS, RANDOM>(x, residual, out, codes, scale, n, noise, first, after)
  if (noise.table) return bits == 8 ? AS(8, true) : bits == 4 ? AS(4, true) : AS(2, true);
  return bits == 8 ? AS(8, false) : bits == 4 ? AS(4, false) : AS(2, false);
#undef AS
}

template <bool RESIDUAL, Out OUT>
INLINE void blockint_blocks_to(const float* x, const float* residual, float* out, uint8_t* codes, float* scales, int64_t n,
                               int64_t block, int bits, const Noise& noise, int64_t first) {
  const auto emit = [&](int64_t at, int64_t size, int32_t largest, int64_t after) __attribute__((always_inline)) {
    const float* r = RESIDUAL ? residual + at : nullptr;
    const float scale = as_float(largest);
    write(scales, at / block, scale);
    float* const to = OUT == NONE ? nullptr : out + at;
    return blockint_emit_to<RESIDUAL, OUT>(x + at, r, to, codes + at * bits / 8, scale, size, bits, noise, first + at,
                                           after);
  };
  in_blocks<Largest, RESIDUAL>(x, residual, n, block, emit);
  if (OUT == STREAMED) fence();
}

void blockint_emit(const float* x, const float* residual, float* out, uint8_t* codes, float scale, int64_t n, int bits,
                   const Noise* noise, int64_t first, Out form) {
  FORMS(blockint_emit_to, x, residual, out, codes, scale, n, bits, *noise, first, 0);
  if (form == STREAMED) fence();
}

void blockint_blocks(const float* x, const float* residual, float* out, uint8_t* codes, float* scales, int64_t n,
                     int64_t block, int bits, const Noise* noise, int64_t first, Out form) {
  FORMS(blockint_blocks_to, x, residual, out, codes, scales, n, block, bits, *noise, first);
}

template <int N, int BITS, bool STREAM>
INLINE void blockint_tile(const uint8_t* const* codes, const float* const* scales, int64_t workers, float* out, int64_t at,
                          int64_t b, const Divisor& divisor) {
  F sum[N] = {};
  for (int64_t w = 0; w < workers; w++) {
    const Scaled<BITS> scaled(read(scales[w], b));
    const uint8_t* from = codes[w] + at * BITS / 8;
    for (int i = 0; i < N; i++) {
      const F v = scaled.at(from + i * W * BITS / 8);
      sum[i] = w ? sum[i] + v : v;
    }
  }
  for (int i = 0; i < N; i++) put<STREAM>(out + at + i * W, divisor.divided(sum[i]));
}

template <int BITS, bool STREAM>
INLINE void blockint_sum_to(const uint8_t* const* codes, const float* const* scales, int64_t workers, float* out,
                            int64_t begin, int64_t end, int64_t block) {
  const Divisor divisor(workers);
  int64_t b = begin / block;
  for (int64_t at = begin; at < end; at += block, b++) {
    const int64_t stop = least(at + block, end);
    int64_t i = at;
    for (; i + TILE * W <= stop; i += TILE * W)
      blockint_tile<TILE, BITS, STREAM>(codes, scales, workers, out, i, b, divisor);
    for (; i + W <= stop; i += W) blockint_tile<1, BITS, STREAM>(codes, scales, workers, out, i, b, divisor);
    if (i < stop) {
      F sum = fill(0);
      for (int64_t w = 0; w < workers; w++) {
        uint8_t bytes[W] = {};
        memcpy(bytes, codes[w] + i * BITS / 8, size_t(((stop - i) * BITS + 7) / 8));
        const F v = Scaled<BITS>(read(scales[w], b)).at(bytes);
        sum = w ? sum + v : v;
      }
      store_some(out + i, divisor.divided(sum), stop - i);
    }
  }
  if (STREAM) fence();
}

void blockint_sum(const uint8_t* const* codes, const float* const* scales, int64_t workers, float* out, int64_t begin,
                  int64_t end, int64_t block, int bits, bool stream) {
#define AS(BITS)                                                                        \
  (stream ? blockint_sum_to<BITS, true>(codes, scales, workers, out, begin, end, block) \
          : blockint_sum_to<BITS, false>(codes, scales, workers, out, begin, end, block))
  bits == 8 ? AS(8) : bits == 4 ? AS(4) : AS(2);
#undef AS
}

// ---- large elements: topk, threshold, dgc, adaq; sparse means -------------------------------------------------------

template <bool RESIDUAL, Out OUT>
INLINE Found select_to(const float* x, const float* residual, float* out, int64_t n, int32_t bound, int32_t cap,
                       float* values, int32_t* positions, int64_t capacity, int32_t first) {
  const I bounds = fill_int(bound), caps = fill_int(cap);
  int64_t i = 0, count = 0;
  for (; i + W <= n && capacity - count >= W; i += W) {
    const F v = value<RESIDUAL>(x, residual, i);
    const M m = at_least(smaller(magnitude_bits(v), caps), bounds);
    leave<OUT>(x, residual, out, i, clear(m, v));
    count += compact(m, v, first + int32_t(i), values + count, positions + count);
  }
  if (i + W > n && capacity - count >= W) {
    for (; i < n; i++) {
      float v = read(x, i);
      if (RESIDUAL) v += read(residual, i);
      int32_t key;
      memcpy(&key, &v, 4);
      key &= ABS;
      const bool chosen = (key < cap ? key : cap) >= bound;
      if (chosen) {
        write(values, count, v);
        write(positions, count++, first + int32_t(i));
      }
      if constexpr (OUT == SWAPPED) write(const_cast<float*>(x), i, read(residual, i));
      if constexpr (OUT != NONE) write(out, i, chosen ? 0.0f : v);
    }
  }
  if (OUT == STREAMED) fence();
  return {i, count};
}

Found select(const float* x, const float* residual, float* out, int64_t n, int32_t bound, int32_t cap, float* values,
             int32_t* positions, int64_t capacity, int32_t first, Out form) {
  return FORMS(select_to, x, residual, out, n, bound, cap, values, positions, capacity, first);
}

// ---- low-rank products: powersgd, gradzip, acpsgd, atomo ------------------------------------------------------------

constexpr int64_t RANKS = 8;  // maximum number of factors held in registers

// Returns how many columns of sums, in `count` rows, fit into the L1 cache.
constexpr int64_t columns(int64_t count) { return count > 4 ? 512 : 1024; }

// Returns how many rows share each load of q: 4, 2 or 1, depending on how many factors (or sums) fit into registers.
constexpr int64_t together(int64_t count) {
  return count * 4 <= REGISTERS ? 4 : count * 2 <= REGISTERS ? 2 : 1;
}

// As `together`, for loops that also write rows. WIDTH: their columns per pass. Memory is fastest if few, long rows are
// written at a time; q then comes from the L2 cache.
constexpr int64_t WIDTH = 4096;
constexpr int64_t written_together(int64_t count) { return together(count) > 2 ? 2 : together(count); }

// Calls CALL with min(count, RANKS) as a compile-time constant.
#define RANKED(count, CALL) \
  switch (count) {          \
    case 1: CALL(1); break; \
    case 2: CALL(2); break; \
    case 3: CALL(3); break; \
    case 4: CALL(4); break; \
    case 5: CALL(5); break; \
    case 6: CALL(6); break; \
    case 7: CALL(7); break; \
    default: CALL(8);       \
  }

// Prefetches the next rows into the L2 cache; in the L1 cache they would evict q.
template <int64_t ROWS>
INLINE void prefetch_rows(const float* m, int64_t b) {
  for (int64_t i = 0; i < ROWS; i++) __builtin_prefetch(m + (ROWS + i) * b, 0, 2);
}

// How to use a product. WRITTEN: out = product. TAKEN: out = x - product. PARTED: as TAKEN, then x = product.
// ADDED: out = x + product.
enum Way { WRITTEN, TAKEN, PARTED, ADDED };

// Computes the product p[ROWS, COUNT] q[COUNT, b], with COUNT of the r factors, for columns begin .. end, and uses it
// as in WAY.
template <Way WAY, bool STREAM, int64_t ROWS, int64_t COUNT>
INLINE void product_rows(float* x, const float* p, const float* q, float* out, int64_t b, int64_t r, int64_t begin,
                         int64_t end) {
  F factors[ROWS][COUNT];
  for (int64_t i = 0; i < ROWS; i++)
    for (int64_t k = 0; k < COUNT; k++) factors[i][k] = fill(read(p, i * r + k));
  int64_t j = begin;
  for (; j + W <= end; j += W) {
    F rows[COUNT];
    for (int64_t k = 0; k < COUNT; k++) rows[k] = load(q + k * b + j);
    if (WAY != WRITTEN) prefetch_rows<ROWS>(x + j, b);
    for (int64_t i = 0; i < ROWS; i++) {
      F sum = factors[i][0] * rows[0];
      for (int64_t k = 1; k < COUNT; k++) sum = sum + factors[i][k] * rows[k];
      const int64_t at = i * b + j;
      if (WAY == WRITTEN) put<STREAM>(out + at, sum);
      if (WAY == TAKEN || WAY == PARTED) put<STREAM>(out + at, load(x + at) - sum);
      if (WAY == ADDED) put<STREAM>(out + at, load(x + at) + sum);
      if (WAY == PARTED) store(x + at, sum);
    }
  }
  if (j < end) {
    const int64_t size = end - j;
    for (int64_t i = 0; i < ROWS; i++) {
      F sum = factors[i][0] * load_some(q + j, size);
      for (int64_t k = 1; k < COUNT; k++) sum = sum + factors[i][k] * load_some(q + k * b + j, size);
      const int64_t at = i * b + j;
      if (WAY == WRITTEN) store_some(out + at, sum, size);
      if (WAY == TAKEN || WAY == PARTED) store_some(out + at, load_some(x + at, size) - sum, size);
      if (WAY == ADDED) store_some(out + at, load_some(x + at, size) + sum, size);
      if (WAY == PARTED) store_some(x + at, sum, size);
    }
  }
}

template <Way WAY, bool STREAM, int64_t COUNT>
OUTLINE void product_some(float* x, const float* p, const float* q, float* out, int64_t rows, int64_t b, int64_t r) {
  constexpr int64_t ROWS = written_together(COUNT);
  for (int64_t begin = 0; begin < b; begin += WIDTH) {
    const int64_t end = least(begin + WIDTH, b);
    int64_t i = 0;
    for (; i + ROWS <= rows; i += ROWS)
      product_rows<WAY, STREAM, ROWS, COUNT>(x + i * b, p + i * r, q, out + i * b, b, r, begin, end);
    for (; i < rows; i++)
      product_rows<WAY, STREAM, 1, COUNT>(x + i * b, p + i * r, q, out + i * b, b, r, begin, end);
  }
}

template <Way WAY, bool STREAM>
INLINE void product_of(float* x, const float* p, const float* q, float* out, int64_t rows, int64_t b, int64_t r,
                       int64_t count) {
#define SOME(COUNT) product_some<WAY, STREAM, COUNT>(x, p, q, out, rows, b, r)
  RANKED(count, SOME)
#undef SOME
}

// p[ROWS, r] = m[ROWS, b] q^T, with q[r, b], for COUNT of the r columns. If RESIDUAL, m += residual first.
template <bool RESIDUAL, int64_t ROWS, int64_t COUNT>
INLINE void left_rows(float* m, const float* residual, const float* q, float* p, int64_t b, int64_t r) {
  F sums[ROWS][COUNT];
  for (int64_t i = 0; i < ROWS; i++)
    for (int64_t k = 0; k < COUNT; k++) sums[i][k] = fill(0);
  int64_t j = 0;
  for (; j + W <= b; j += W) {
    F values[ROWS];
    for (int64_t i = 0; i < ROWS; i++) {
      values[i] = value<RESIDUAL>(m, residual, i * b + j);
      if (RESIDUAL) store(m + i * b + j, values[i]);
    }
    prefetch_rows<ROWS>(m + j, b);
    if (RESIDUAL) prefetch_rows<ROWS>(residual + j, b);
    for (int64_t k = 0; k < COUNT; k++) {
      const F each = load(q + k * b + j);
      for (int64_t i = 0; i < ROWS; i++) sums[i][k] = accumulated(values[i], each, sums[i][k]);
    }
  }
  for (int64_t i = 0; i < ROWS; i++) {
    const int64_t size = b - j;
    F last = fill(0);
    if (size) last = value_some<RESIDUAL>(m, residual, i * b + j, size);
    if (RESIDUAL && size) store_some(m + i * b + j, last, size);
    for (int64_t k = 0; k < COUNT; k++) {
      F sum = sums[i][k];
      if (size) sum = accumulated(last, load_some(q + k * b + j, size), sum);
      write(p, i * r + k, total(sum));
    }
  }
}

template <bool RESIDUAL, int64_t COUNT>
OUTLINE void left_some(float* m, const float* residual, const float* q, float* p, int64_t rows, int64_t b, int64_t r) {
  constexpr int64_t ROWS = together(COUNT);
  int64_t i = 0;
  for (; i + ROWS <= rows; i += ROWS)
    left_rows<RESIDUAL, ROWS, COUNT>(m + i * b, residual + i * b, q, p + i * r, b, r);
  for (; i < rows; i++) left_rows<RESIDUAL, 1, COUNT>(m + i * b, residual + i * b, q, p + i * r, b, r);
}

void lowrank_left(float* m, const float* residual, const float* q, float* p, int64_t rows, int64_t b, int64_t r) {
  for (int64_t k = 0; k < r; k += RANKS) {
#define SOME(COUNT)                                                      \
  residual && !k ? left_some<true, COUNT>(m, residual, q, p, rows, b, r) \
                 : left_some<false, COUNT>(m, m, q + k * b, p + k, rows, b, r)
    RANKED(r - k, SOME)
#undef SOME
  }
}

// sums[COUNT, columns(COUNT)] += p^T m, with p[ROWS, r] and m[ROWS, size], for COUNT of the r rows.
template <int64_t ROWS, int64_t COUNT>
INLINE void right_rows(const float* m, const float* p, float* sums, int64_t b, int64_t r, int64_t size) {
  F factors[ROWS][COUNT];
  for (int64_t i = 0; i < ROWS; i++)
    for (int64_t k = 0; k < COUNT; k++) factors[i][k] = fill(read(p, i * r + k));
  for (int64_t j = 0; j < size; j += W) {
    F values[ROWS];
    for (int64_t i = 0; i < ROWS; i++)
      values[i] = j + W <= size ? load(m + i * b + j) : load_some(m + i * b + j, size - j);
    prefetch_rows<ROWS>(m + j, b);
    for (int64_t k = 0; k < COUNT; k++) {
      float* to = sums + k * columns(COUNT) + j;
      F sum = load(to);
      for (int64_t i = 0; i < ROWS; i++) sum = accumulated(factors[i][k], values[i], sum);
      store(to, sum);
    }
  }
}

// q[r, b] = p^T m, with p[rows, r] and m[rows, b], for COUNT of the r rows and columns begin .. end.
template <int64_t COUNT>
OUTLINE void right_some(const float* m, const float* p, float* q, int64_t rows, int64_t b, int64_t r, int64_t begin,
                        int64_t end) {
  constexpr int64_t ROWS = together(COUNT);
  float sums[COUNT * columns(COUNT)];
  for (; begin < end; begin += columns(COUNT)) {
    const int64_t size = least(columns(COUNT), end - begin);
    memset(sums, 0, sizeof sums);
    int64_t i = 0;
    for (; i + ROWS <= rows; i += ROWS) right_rows<ROWS, COUNT>(m + begin + i * b, p + i * r, sums, b, r, size);
    for (; i < rows; i++) right_rows<1, COUNT>(m + begin + i * b, p + i * r, sums, b, r, size);
    for (int64_t k = 0; k < COUNT; k++)
      memcpy(reinterpret_cast<char*>(q) + (k * b + begin) * int64_t(sizeof(float)), sums + k * columns(COUNT),
             size_t(size) * sizeof(float));
  }
}

void lowrank_right(const float* m, const float* p, float* q, int64_t rows, int64_t b, int64_t r, int64_t begin,
                   int64_t end) {
  for (int64_t k = 0; k < r; k += RANKS) {
#define SOME(COUNT) right_some<COUNT>(m, p + k, q + k * b, rows, b, r, begin, end)
    RANKED(r - k, SOME)
#undef SOME
  }
}

// Processes RANKS columns of p and rows of q at a time; each later group updates the result in out.
void lowrank_product(const float* x, const float* p, const float* q, float* out, int64_t rows, int64_t b, int64_t r) {
  if (x)
    product_of<TAKEN, false>(const_cast<float*>(x), p, q, out, rows, b, r, r);
  else
    product_of<WRITTEN, false>(out, p, q, out, rows, b, r, r);
  for (int64_t k = RANKS; k < r; k += RANKS) {
    if (x)
      product_of<TAKEN, false>(out, p + k, q + k * b, out, rows, b, r, r - k);
    else
      product_of<ADDED, false>(out, p + k, q + k * b, out, rows, b, r, r - k);
  }
}

void lowrank_part(float* x, const float* p, const float* q, float* rest, int64_t rows, int64_t b, int64_t r, bool stream) {
  if (r > RANKS) {  // a group of rows stays in the cache for the second product
    const int64_t height = 1 + 16384 / b;
    for (int64_t i = 0; i < rows; i += height) {
      const int64_t count = least(height, rows - i);
      lowrank_product(x + i * b, p + i * r, q, rest + i * b, count, b, r);
      lowrank_product(nullptr, p + i * r, q, x + i * b, count, b, r);
    }
    return;
  }
  stream ? product_of<PARTED, true>(x, p, q, rest, rows, b, r, r) : product_of<PARTED, false>(x, p, q, rest, rows, b, r, r);
  if (stream) fence();
}

const grace::MethodLoops METHODS = {
    .order_keys = order_keys,
    .order_bins = order_bins,
    .order_codes = order_codes,
    .sketch_emit = sketch_emit,
    .sketch_sum = sketch_sum,
    .adaq_count = adaq_count,
    .inceptionn_count = inceptionn_count,
    .inceptionn_emit = inceptionn_emit,
    .tags_count = tags_count,
    .inceptionn_sum = inceptionn_sum,
    .excess = excess,
    .demo_of = demo_of,
    .demo_left = demo_left,
    .demo_values = demo_values,
    .groups_largest = groups_largest,
    .bound_of = bound_of,
    .shared_int_emit = shared_int_emit,
    .shared_int_values = shared_int_values,
    .patch_diff = patch_diff,
};

const grace::Loops LOOPS = {
    .name = NAME,
    .efsignsgd_total = efsignsgd_total,
    .efsignsgd_emit = efsignsgd_emit,
    .efsignsgd_blocks = efsignsgd_blocks,
    .efsignsgd_sum = bits_sum<Signs>,
    .largest_magnitude = largest_magnitude,
    .blockint_emit = blockint_emit,
    .blockint_blocks = blockint_blocks,
    .blockint_sum = blockint_sum,
    .select = select,
    .divide = divide,
    .words = words,
    .inverse = inverse,
    .noise = noise,
    .lowrank_product = lowrank_product,
    .lowrank_part = lowrank_part,
    .lowrank_left = lowrank_left,
    .lowrank_right = lowrank_right,
    .squares = squares,
    .qsgd_emit = qsgd_emit,
    .qsgd_blocks = qsgd_blocks,
    .qsgd_sum = qsgd_sum,
    .signsgd_encode = signsgd_encode,
    .signsgd_sum = signsgd_sum,
    .onebit_halves = onebit_halves,
    .onebit_emit = onebit_emit,
    .onebit_sum = bits_sum<Means>,
    .threelc_emit = threelc_emit,
    .threelc_sum = threelc_sum,
    .codes_largest = codes_largest,
    .codes_scale = codes_scale,
    .codes_emit = codes_emit,
    .codes_sum = codes_sum,
    .eden_blocks = eden_blocks,
    .eden_sum = eden_sum,
    .thc_blocks = thc_blocks,
    .thc_values = thc_values,
    .methods = &METHODS,
};

}  // namespace

API const grace::Loops* grace_loops() { return &LOOPS; }
