// The kernels' loops, compiled into one library per instruction set: with -DGRACE_AVX512, -DGRACE_AVX2 or neither.
//
// Call only inlined functions here. All libraries share one process, so code for older processors could otherwise bind to a
// function of the standard library that this file compiled for AVX-512.
#include "kernels.h"
#include "vectors-inl.h"

#include "api.h"

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

using grace::Found;
using grace::Noise;
using grace::Out;
using grace::NONE, grace::KEPT, grace::STREAMED, grace::SWAPPED;

template <bool RESIDUAL>
INLINE F value(const float* x, const float* residual, int64_t i) {
  if constexpr (RESIDUAL) return load(x + i) + load(residual + i);
  return load(x + i);
}

template <bool RESIDUAL>
INLINE F value_some(const float* x, const float* residual, int64_t i, int64_t count) {
  if constexpr (RESIDUAL) return load_some(x + i, count) + load_some(residual + i, count);
  return load_some(x + i, count);
}

// Writes the new residual according to OUT.
template <Out OUT>
INLINE void leave(const float* x, const float* residual, float* out, int64_t i, F left) {
  if constexpr (OUT == SWAPPED) store(const_cast<float*>(x) + i, load(residual + i));
  if constexpr (OUT != NONE) put<OUT == STREAMED>(out + i, left);
}

template <Out OUT>
INLINE void leave_some(const float* x, const float* residual, float* out, int64_t i, F left, int64_t count) {
  if constexpr (OUT == SWAPPED) store_some(const_cast<float*>(x) + i, load_some(residual + i, count), count);
  if constexpr (OUT != NONE) store_some(out + i, left, count);
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Prefetches into the L2 cache: with several arrays, the hardware prefetcher is too late.
template <bool RESIDUAL>
INLINE void prefetch(const float* x, const float* residual, int64_t i) {
  __builtin_prefetch(x + i, 0, 2);
  if constexpr (RESIDUAL) __builtin_prefetch(residual + i, 0, 2);
}

constexpr int64_t AHEAD = 2048;  // minimum prefetch distance in elements

// Statistics of all elements, in order: the sum of magnitudes, or the largest magnitude.
struct Total {
  D sum = zeros();
  INLINE_MEMBER void add(F v) { add_magnitude(sum, v); }
  INLINE_MEMBER double result() const { return total(sum); }
};

// Magnitudes compare as integers, with NaN above infinity: the largest is NaN if any element is NaN.
struct Largest {
  I most = fill_int(0);
  INLINE_MEMBER void add(F v) { most = larger(most, magnitude_bits(v)); }
  INLINE_MEMBER int32_t result() const { return largest(most); }
};

template <class Statistic, bool RESIDUAL>
INLINE auto statistic_of(const float* x, const float* residual, int64_t n) {
  Statistic found;
  int64_t i = 0;
  for (; i + W <= n; i += W) found.add(value<RESIDUAL>(x, residual, i));
  if (i < n) found.add(value_some<RESIDUAL>(x, residual, i, n - i));
  return found.result();
}

// Computes the statistic of the next block, `after` elements ahead, vector by vector while the current block is written, so
// that memory is not idle in between. after == 0: no next block.
template <class Statistic, bool RESIDUAL>
struct Next {
  const float* x;
  const float* residual;
  bool there;
  Statistic found;
  INLINE_MEMBER Next(const float* x, const float* residual, int64_t after)
      : x(x + after), residual(RESIDUAL ? residual + after : nullptr), there(after > 0) {}
  INLINE_MEMBER void look(int64_t i) {
    if (!there) return;
    prefetch<RESIDUAL>(x, residual, i + AHEAD);
    found.add(value<RESIDUAL>(x, residual, i));
  }
  INLINE_MEMBER void look_some(int64_t i, int64_t count) {
    if (there) found.add(value_some<RESIDUAL>(x, residual, i, count));
  }
};

#if defined(GRACE_AVX512) || defined(GRACE_AVX2)
constexpr bool LOOKS = true;
#else
constexpr bool LOOKS = false;  // too few registers: the lookahead would cost more than it saves
#endif

// Calls emit(begin, size, statistic, after) for each block in turn; it returns the statistic of the next block, if any.
template <class Statistic, bool RESIDUAL, class Emit>
INLINE void in_blocks(const float* x, const float* residual, int64_t n, int64_t block, const Emit& emit) {
  const auto statistic = [&](int64_t at) __attribute__((always_inline)) {
    return statistic_of<Statistic, RESIDUAL>(x + at, RESIDUAL ? residual + at : nullptr, least(block, n - at));
  };
  auto found = statistic(0);
  for (int64_t at = 0; at < n; at += block) {
    const int64_t next = at + block, after = LOOKS && next + block <= n ? block : 0;
    found = emit(at, least(block, n - at), found, after);
    if (next < n && !after) found = statistic(next);
  }
}

// Calls f<RESIDUAL, OUT>(...) for the given arguments; without a residual there is no SWAPPED.
#define FORMS(f, ...)                                               \
  (!residual ? (form == NONE       ? f<false, NONE>(__VA_ARGS__)    \
                : form == STREAMED ? f<false, STREAMED>(__VA_ARGS__) \
                                   : f<false, KEPT>(__VA_ARGS__))   \
             : (form == NONE       ? f<true, NONE>(__VA_ARGS__)     \
                : form == STREAMED ? f<true, STREAMED>(__VA_ARGS__) \
                : form == SWAPPED  ? f<true, SWAPPED>(__VA_ARGS__)  \
                                   : f<true, KEPT>(__VA_ARGS__)))

// ---- signs -----------------------------------------------------------------------------------------------------------

// The value of a bit in a block, and the mask of elements whose bit is set.
struct Signs {
  F plus, minus;
  INLINE_MEMBER explicit Signs(float scale) : plus(fill(scale)), minus(fill(-scale)) {}
  INLINE_MEMBER Signs(const float* scales, int64_t b) : Signs(read(scales, b)) {}
  INLINE_MEMBER F of(M m) const { return pick(m, plus, minus); }
  static INLINE_MEMBER M bits(F v) { return not_below_zero(v); }
};

template <bool RESIDUAL, Out OUT, class Pair>
INLINE double bits_emit_to(const float* x, const float* residual, float* out, uint8_t* bits, const Pair& pair, int64_t n,
                           int64_t after) {
  Next<Total, RESIDUAL> next(x, residual, after);
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    next.look(i);
    const F v = value<RESIDUAL>(x, residual, i);
    const M m = Pair::bits(v);
    write(reinterpret_cast<uint16_t*>(bits + i / 8), 0, uint16_t(bits_of(m)));
    leave<OUT>(x, residual, out, i, v - pair.of(m));
  }
  if (i < n) {
    next.look_some(i, n - i);
    const F v = value_some<RESIDUAL>(x, residual, i, n - i);
    const M m = Pair::bits(v);
    const uint32_t some = bits_of(m) & ((1u << (n - i)) - 1);
    bits[i / 8] = uint8_t(some);
    if (n - i > 8) bits[i / 8 + 1] = uint8_t(some >> 8);
    leave_some<OUT>(x, residual, out, i, v - pair.of(m), n - i);
  }
  return next.found.result();
}

template <bool RESIDUAL, Out OUT>
void signs_blocks_to(const float* x, const float* residual, float* out, uint8_t* bits, float* scales, int64_t n,
                     int64_t block) {
  const auto emit = [&](int64_t at, int64_t size, double total, int64_t after) __attribute__((always_inline)) {
    const float* r = RESIDUAL ? residual + at : nullptr;
    const float scale = float(total) / float(size);
    write(scales, at / block, scale);
    float* const to = OUT == NONE ? nullptr : out + at;
    return bits_emit_to<RESIDUAL, OUT>(x + at, r, to, bits + at / 8, Signs(scale), size, after);
  };
  in_blocks<Total, RESIDUAL>(x, residual, n, block, emit);
  if (OUT == STREAMED) fence();
}

double signs_total(const float* x, const float* residual, int64_t n) {
  return residual ? statistic_of<Total, true>(x, residual, n) : statistic_of<Total, false>(x, residual, n);
}

void signs_emit(const float* x, const float* residual, float* out, uint8_t* bits, float scale, int64_t n, Out form) {
  FORMS(bits_emit_to, x, residual, out, bits, Signs(scale), n, 0);
  if (form == STREAMED) fence();
}

void signs_blocks(const float* x, const float* residual, float* out, uint8_t* bits, float* scales, int64_t n,
                  int64_t block, Out form) {
  FORMS(signs_blocks_to, x, residual, out, bits, scales, n, block);
}

// The mean over workers of N vectors in block b; `at` is a multiple of 8.
template <class Pair, int N, bool STREAM>
INLINE void bits_tile(const uint8_t* const* bits, const float* const* scales, int64_t workers, float* out, int64_t at,
                      int64_t b, const Divisor& divisor) {
  F sum[N] = {};
  for (int64_t w = 0; w < workers; w++) {
    const Pair pair(scales[w], b);
    const uint8_t* from = bits[w] + at / 8;
    for (int i = 0; i < N; i++) {
      const F v = pair.of(mask_of(read(reinterpret_cast<const uint16_t*>(from), i)));
      sum[i] = w ? sum[i] + v : v;
    }
  }
  for (int i = 0; i < N; i++) put<STREAM>(out + at + i * W, divisor.divided(sum[i]));
}

template <class Pair, bool STREAM>
INLINE void bits_sum_to(const uint8_t* const* bits, const float* const* scales, int64_t workers, float* out,
                        int64_t begin, int64_t end, int64_t block) {
  const Divisor divisor(workers);
  int64_t b = begin / block;
  for (int64_t at = begin; at < end; at += block, b++) {  // begin starts a block, or there is one block
    const int64_t stop = least(at + block, end);
    int64_t i = at;
    for (; i + TILE * W <= stop; i += TILE * W) bits_tile<Pair, TILE, STREAM>(bits, scales, workers, out, i, b, divisor);
    for (; i + W <= stop; i += W) bits_tile<Pair, 1, STREAM>(bits, scales, workers, out, i, b, divisor);
    if (i < stop) {
      F sum = fill(0);
      for (int64_t w = 0; w < workers; w++) {
        uint32_t some = bits[w][i / 8];
        if (stop - i > 8) some |= uint32_t(bits[w][i / 8 + 1]) << 8;
        const F v = Pair(scales[w], b).of(mask_of(some));
        sum = w ? sum + v : v;
      }
      store_some(out + i, divisor.divided(sum), stop - i);
    }
  }
  if (STREAM) fence();
}

template <class Pair>
void bits_sum(const uint8_t* const* bits, const float* const* scales, int64_t workers, float* out, int64_t begin,
              int64_t end, int64_t block, bool stream) {
  stream ? bits_sum_to<Pair, true>(bits, scales, workers, out, begin, end, block)
         : bits_sum_to<Pair, false>(bits, scales, workers, out, begin, end, block);
}

// ---- integers --------------------------------------------------------------------------------------------------------

// Noise at `count` positions: upper halves of words. The range may wrap around the end of the table.
INLINE void noise_at(uint16_t* out, const Noise& noise, int64_t position, int64_t count) {
  while (count > 0) {
    const int64_t index = position & 65535, run = least(count, 65536 - index);
    const uint16_t offset = read(noise.offsets, (position >> 16) - noise.origin);
    memcpy(out, reinterpret_cast<const char*>(noise.table) + 2 * index, size_t(run) * 2);
    for (int64_t j = 0; j < run; j++) out[j] = uint16_t(out[j] + offset);
    position += run, count -= run, out += run;
  }
}

OUTLINE void few_noise(uint16_t* out, const Noise& noise, int64_t position, int64_t count) {
  noise_at(out, noise, position, count);
}

template <bool RESIDUAL, Out OUT, int BITS, bool RANDOM>
OUTLINE int32_t ints_emit_as(const float* x, const float* residual, float* out, uint8_t* codes, float scale, int64_t n,
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
  while (i + W <= n) {  // while one offset applies
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
    memcpy(codes + i * BITS / 8, bytes, size_t((count * BITS + 7) / 8));  // padding is 0 / scale, code 0
    leave_some<OUT>(x, residual, out, i, v - to_float(code) * step, count);
  }
  return next.found.result();
}

template <bool RESIDUAL, Out OUT>
INLINE int32_t ints_emit_to(const float* x, const float* residual, float* out, uint8_t* codes, float scale, int64_t n,
                            int bits, const Noise& noise, int64_t first, int64_t after) {
#define AS(BITS, RANDOM) ints_emit_as<RESIDUAL, OUT, BITS, RANDOM>(x, residual, out, codes, scale, n, noise, first, after)
  if (noise.table) return bits == 8 ? AS(8, true) : bits == 4 ? AS(4, true) : AS(2, true);
  return bits == 8 ? AS(8, false) : bits == 4 ? AS(4, false) : AS(2, false);
#undef AS
}

INLINE float as_float(int32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

template <bool RESIDUAL, Out OUT>
INLINE void ints_blocks_to(const float* x, const float* residual, float* out, uint8_t* codes, float* scales, int64_t n,
                           int64_t block, int bits, const Noise& noise, int64_t first) {
  const auto emit = [&](int64_t at, int64_t size, int32_t largest, int64_t after) __attribute__((always_inline)) {
    const float* r = RESIDUAL ? residual + at : nullptr;
    const float scale = as_float(largest);
    write(scales, at / block, scale);
    float* const to = OUT == NONE ? nullptr : out + at;
    return ints_emit_to<RESIDUAL, OUT>(x + at, r, to, codes + at * bits / 8, scale, size, bits, noise, first + at, after);
  };
  in_blocks<Largest, RESIDUAL>(x, residual, n, block, emit);
  if (OUT == STREAMED) fence();
}

int32_t ints_largest(const float* x, const float* residual, int64_t n) {
  return residual ? statistic_of<Largest, true>(x, residual, n) : statistic_of<Largest, false>(x, residual, n);
}

void ints_emit(const float* x, const float* residual, float* out, uint8_t* codes, float scale, int64_t n, int bits,
               const Noise* noise, int64_t first, Out form) {
  FORMS(ints_emit_to, x, residual, out, codes, scale, n, bits, *noise, first, 0);
  if (form == STREAMED) fence();
}

void ints_blocks(const float* x, const float* residual, float* out, uint8_t* codes, float* scales, int64_t n,
                 int64_t block, int bits, const Noise* noise, int64_t first, Out form) {
  FORMS(ints_blocks_to, x, residual, out, codes, scales, n, block, bits, *noise, first);
}

template <int N, int BITS, bool STREAM>
INLINE void ints_tile(const uint8_t* const* codes, const float* const* scales, int64_t workers, float* out, int64_t at,
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
INLINE void ints_sum_to(const uint8_t* const* codes, const float* const* scales, int64_t workers, float* out,
                        int64_t begin, int64_t end, int64_t block) {
  const Divisor divisor(workers);
  int64_t b = begin / block;
  for (int64_t at = begin; at < end; at += block, b++) {
    const int64_t stop = least(at + block, end);
    int64_t i = at;
    for (; i + TILE * W <= stop; i += TILE * W) ints_tile<TILE, BITS, STREAM>(codes, scales, workers, out, i, b, divisor);
    for (; i + W <= stop; i += W) ints_tile<1, BITS, STREAM>(codes, scales, workers, out, i, b, divisor);
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

void ints_sum(const uint8_t* const* codes, const float* const* scales, int64_t workers, float* out, int64_t begin,
              int64_t end, int64_t block, int bits, bool stream) {
#define AS(BITS)                                                                      \
  (stream ? ints_sum_to<BITS, true>(codes, scales, workers, out, begin, end, block)   \
          : ints_sum_to<BITS, false>(codes, scales, workers, out, begin, end, block))
  bits == 8 ? AS(8) : bits == 4 ? AS(4) : AS(2);
#undef AS
}

// ---- sparse ----------------------------------------------------------------------------------------------------------

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

template <bool STREAM>
INLINE void divide_to(const float* x, float* out, int64_t n, int64_t divisor) {
  const Divisor by(divisor);
  int64_t i = 0;
  for (; i + W <= n; i += W) put<STREAM>(out + i, by.divided(load(x + i)));
  if (i < n) store_some(out + i, by.divided(load_some(x + i, n - i)), n - i);
}

void accumulate(float* x, float* last, float beta, float gamma, int64_t n) {
  const F one = fill(beta), two = fill(gamma);
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    prefetch<true>(x, last, i + AHEAD);
    const F before = load(last + i);
    store(last + i, one * before + two * load(x + i));
    store(x + i, before);
  }
  if (i == n) return;
  const F before = load_some(last + i, n - i);
  store_some(last + i, one * before + two * load_some(x + i, n - i), n - i);
  store_some(x + i, before, n - i);
}

// The caller adds the fence: a fence for every small part would take longer than the part.
INLINE void divide_part(const float* x, float* out, int64_t n, int64_t divisor, bool stream) {
  stream ? divide_to<true>(x, out, n, divisor) : divide_to<false>(x, out, n, divisor);
}

void divide(const float* x, float* out, int64_t n, int64_t divisor, bool stream) {
  divide_part(x, out, n, divisor, stream);
  if (stream) fence();
}

// ---- low-rank products -----------------------------------------------------------------------------------------------

constexpr int64_t RANKS = 8;  // factors held in registers

// Columns of sums that stay in the L1 cache for all rows.
constexpr int64_t columns(int64_t count) { return count > 4 ? 512 : 1024; }

// Rows that share loads of q: as many as have their factors, or sums, in registers.
constexpr int64_t together(int64_t count) {
  return count * 4 <= REGISTERS ? 4 : count * 2 <= REGISTERS ? 2 : 1;
}

// The same for loops that also write rows. Memory is fastest with few, long rows; q then comes from the L2 cache.
constexpr int64_t WIDTH = 4096;
constexpr int64_t written_together(int64_t count) { return together(count) > 2 ? 2 : together(count); }

// Calls CALL(number of factors), for 1 .. RANKS.
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

// Prefetches lines of the next rows into L2; in L1 they would evict q.
template <int64_t ROWS>
INLINE void prefetch_rows(const float* m, int64_t b) {
  for (int64_t i = 0; i < ROWS; i++) __builtin_prefetch(m + (ROWS + i) * b, 0, 2);
}

// Uses of a product: out = product; out = x - product; the same, then x = product; out = x + product.
enum Way { WRITTEN, TAKEN, PARTED, ADDED };

// The product of p[COUNT] and q[COUNT, b], from column j on.
template <int64_t COUNT>
INLINE F product_at(const float* p, const float* q, int64_t b, int64_t j) {
  F sum = fill(read(p, 0)) * load(q + j);
  for (int64_t k = 1; k < COUNT; k++) sum = sum + fill(read(p, k)) * load(q + k * b + j);
  return sum;
}

template <int64_t COUNT>
INLINE F product_at_some(const float* p, const float* q, int64_t b, int64_t j, int64_t size) {
  F sum = fill(read(p, 0)) * load_some(q + j, size);
  for (int64_t k = 1; k < COUNT; k++) sum = sum + fill(read(p, k)) * load_some(q + k * b + j, size);
  return sum;
}

// rest = x - taken product, then x = the other product, each p[ROWS, COUNT] times q[COUNT, b]; columns begin .. end.
template <bool STREAM, int64_t ROWS, int64_t COUNT>
INLINE void part_rows(float* x, const float* p, const float* q, const float* taken_p, const float* taken_q, float* rest,
                      int64_t b, int64_t begin, int64_t end) {
  int64_t j = begin;
  for (; j + W <= end; j += W) {
    prefetch_rows<ROWS>(x + j, b);
    for (int64_t i = 0; i < ROWS; i++) {
      const int64_t at = i * b + j;
      put<STREAM>(rest + at, load(x + at) - product_at<COUNT>(taken_p + i * COUNT, taken_q, b, j));
      store(x + at, product_at<COUNT>(p + i * COUNT, q, b, j));
    }
  }
  for (int64_t i = 0; i < ROWS && j < end; i++) {
    const int64_t at = i * b + j, size = end - j;
    store_some(rest + at, load_some(x + at, size) - product_at_some<COUNT>(taken_p + i * COUNT, taken_q, b, j, size), size);
    store_some(x + at, product_at_some<COUNT>(p + i * COUNT, q, b, j, size), size);
  }
}

template <bool STREAM, int64_t COUNT>
OUTLINE void part_some(float* x, const float* p, const float* q, const float* taken_p, const float* taken_q, float* rest,
                       int64_t rows, int64_t b) {
  constexpr int64_t ROWS = written_together(COUNT);
  for (int64_t begin = 0; begin < b; begin += WIDTH) {
    const int64_t end = least(begin + WIDTH, b);
    int64_t i = 0;
#define NEXT(ROWS) \
  part_rows<STREAM, ROWS, COUNT>(x + i * b, p + i * COUNT, q, taken_p + i * COUNT, taken_q, rest + i * b, b, begin, end)
    for (; i + ROWS <= rows; i += ROWS) NEXT(ROWS);
    for (; i < rows; i++) NEXT(1);
#undef NEXT
  }
}

// The product of p[ROWS, COUNT] and q[COUNT, b], COUNT of r factors, in columns begin .. end.
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

INLINE F accumulated(F x, F y, F sum) {  // with one rounding if the machine has FMA
#if defined(GRACE_AVX512) || defined(GRACE_AVX2)
  return fused(x, y, sum);
#else
  return x * y + sum;
#endif
}

// p[ROWS, r] = m[ROWS, b] times the transpose of q[r, b], for COUNT of r. With RESIDUAL, m += residual before.
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

void left(float* m, const float* residual, const float* q, float* p, int64_t rows, int64_t b, int64_t r) {
  for (int64_t k = 0; k < r; k += RANKS) {
#define SOME(COUNT)                                                               \
  residual && !k ? left_some<true, COUNT>(m, residual, q, p, rows, b, r)          \
                 : left_some<false, COUNT>(m, m, q + k * b, p + k, rows, b, r)
    RANKED(r - k, SOME)
#undef SOME
  }
}

// Adds the transpose of p[ROWS, r] times m[ROWS, size] to sums[COUNT, columns(COUNT)], for COUNT of r. With RESIDUAL,
// m += residual before.
template <bool RESIDUAL, int64_t ROWS, int64_t COUNT>
INLINE void right_rows(float* m, const float* residual, const float* p, float* sums, int64_t b, int64_t r, int64_t size) {
  F factors[ROWS][COUNT];
  for (int64_t i = 0; i < ROWS; i++)
    for (int64_t k = 0; k < COUNT; k++) factors[i][k] = fill(read(p, i * r + k));
  for (int64_t j = 0; j < size; j += W) {
    F values[ROWS];
    for (int64_t i = 0; i < ROWS; i++) {
      const int64_t at = i * b + j;
      values[i] = j + W <= size ? value<RESIDUAL>(m, residual, at) : value_some<RESIDUAL>(m, residual, at, size - j);
      if (RESIDUAL) j + W <= size ? store(m + at, values[i]) : store_some(m + at, values[i], size - j);
    }
    prefetch_rows<ROWS>(m + j, b);
    if (RESIDUAL) prefetch_rows<ROWS>(residual + j, b);
    for (int64_t k = 0; k < COUNT; k++) {
      float* to = sums + k * columns(COUNT) + j;
      F sum = load(to);
      for (int64_t i = 0; i < ROWS; i++) sum = accumulated(factors[i][k], values[i], sum);
      store(to, sum);
    }
  }
}

// q[r, b], columns begin .. end = the transpose of p[rows, r] times m[rows, b], for COUNT of r.
template <bool RESIDUAL, int64_t COUNT>
OUTLINE void right_some(float* m, const float* residual, const float* p, float* q, int64_t rows, int64_t b, int64_t r,
                        int64_t begin, int64_t end) {
  constexpr int64_t ROWS = together(COUNT);
  float sums[COUNT * columns(COUNT)];
  for (; begin < end; begin += columns(COUNT)) {
    const int64_t size = least(columns(COUNT), end - begin);
    memset(sums, 0, sizeof sums);
    int64_t i = 0;
#define NEXT(ROWS) \
  right_rows<RESIDUAL, ROWS, COUNT>(m + begin + i * b, residual + begin + i * b, p + i * r, sums, b, r, size)
    for (; i + ROWS <= rows; i += ROWS) NEXT(ROWS);
    for (; i < rows; i++) NEXT(1);
#undef NEXT
    for (int64_t k = 0; k < COUNT; k++)
      memcpy(reinterpret_cast<char*>(q) + (k * b + begin) * int64_t(sizeof(float)), sums + k * columns(COUNT),
             size_t(size) * sizeof(float));
  }
}

void right(float* m, const float* residual, const float* p, float* q, int64_t rows, int64_t b, int64_t r, int64_t begin,
           int64_t end) {
  for (int64_t k = 0; k < r; k += RANKS) {
#define SOME(COUNT)                                                                              \
  residual && !k ? right_some<true, COUNT>(m, residual, p, q, rows, b, r, begin, end)            \
                 : right_some<false, COUNT>(m, m, p + k, q + k * b, rows, b, r, begin, end)
    RANKED(r - k, SOME)
#undef SOME
  }
}

// Each group of RANKS factors continues from the result of the previous one.
void product(const float* x, const float* p, const float* q, float* out, int64_t rows, int64_t b, int64_t r) {
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

void part(float* x, const float* p, const float* q, const float* taken_p, const float* taken_q, float* rest, int64_t rows,
          int64_t b, int64_t r, bool stream) {
  if (r > RANKS) {  // in groups of rows that are still cached in the second pass
    const int64_t height = 1 + 16384 / b;
    for (int64_t i = 0; i < rows; i += height) {
      const int64_t count = least(height, rows - i);
      product(x + i * b, taken_p + i * r, taken_q, rest + i * b, count, b, r);
      product(nullptr, p + i * r, q, x + i * b, count, b, r);
    }
    return;
  }
  if (p == taken_p && q == taken_q) {
    stream ? product_of<PARTED, true>(x, p, q, rest, rows, b, r, r) : product_of<PARTED, false>(x, p, q, rest, rows, b, r, r);
  } else {
#define SOME(COUNT)                                                               \
  stream ? part_some<true, COUNT>(x, p, q, taken_p, taken_q, rest, rows, b)       \
         : part_some<false, COUNT>(x, p, q, taken_p, taken_q, rest, rows, b)
    RANKED(r, SOME)
#undef SOME
  }
  if (stream) fence();
}

// ---- momentum ---------------------------------------------------------------------------------------------------------

template <bool NESTEROV, bool STREAM>
INLINE void correct_to(const float* g, const float* u, const float* v, float* u_out, float* v_out, float* last,
                       float momentum, int64_t n) {
  const F decay = fill(momentum);
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const F x = load(g + i), kept = load(v + i);
    const F next = NESTEROV ? (load(u + i) + x) * decay : load(u + i) * decay + x;
    if (last) store(last + i, kept);
    put<STREAM>(u_out + i, next);
    store(v_out + i, kept + (NESTEROV ? next + x : next));
  }
  if (const int64_t size = n - i; size > 0) {
    const F x = load_some(g + i, size), kept = load_some(v + i, size), old = load_some(u + i, size);
    const F next = NESTEROV ? (old + x) * decay : old * decay + x;
    if (last) store_some(last + i, kept, size);
    store_some(u_out + i, next, size);
    store_some(v_out + i, kept + (NESTEROV ? next + x : next), size);
  }
  if (STREAM) fence();
}

void correct(const float* g, const float* u, const float* v, float* u_out, float* v_out, float* last, float momentum,
             bool nesterov, int64_t n, bool stream) {
#define AS(NESTEROV)                                                                               \
  (stream ? correct_to<NESTEROV, true>(g, u, v, u_out, v_out, last, momentum, n)                   \
          : correct_to<NESTEROV, false>(g, u, v, u_out, v_out, last, momentum, n))
  nesterov ? AS(true) : AS(false);
#undef AS
}

}  // namespace

#include "levels-inl.h"

namespace {

// ---- random bits -----------------------------------------------------------------------------------------------------

INLINE uint32_t mix(uint32_t h) {  // MurmurHash3's finaliser, as in grace/core/rng.py
  h ^= h >> 16;
  h *= 0x85EBCA6B;
  h ^= h >> 13;
  h *= 0xC2B2AE35;
  return h ^ (h >> 16);
}

template <class T, int SHIFT, bool INVERSE = false>
INLINE void words_as(uint32_t key0, uint32_t key1, int64_t start, int64_t n, T* out) {
  while (n > 0) {  // while the upper half of the counter is constant
    const uint32_t low = uint32_t(start), high = uint32_t(uint64_t(start) >> 32) + key1;
    const int32_t size = int32_t(least(least(n, 1 << 30), (int64_t(1) << 32) - int64_t(low)));
    for (int32_t j = 0; j < size; j++) {  // 32 bits like the words, for equally wide vectors
      const uint32_t word = mix(mix(low + uint32_t(j) + key0) ^ high);
      out[j] = T((INVERSE ? ~word : word) >> SHIFT);
    }
    start += size, n -= size, out += size;
  }
}

// `mix` without its last step, which changes only the lower half.
INLINE I upper_mixed(I h) { return folded<13>(folded<16>(h) * fill_int(int32_t(0x85EBCA6B))) * fill_int(int32_t(0xC2B2AE35)); }

// The top bits of the words, sixteen per result.
INLINE void top_bits_of_words(uint32_t key0, uint32_t key1, int64_t start, int64_t n, uint16_t* out) {
  const int32_t places[W] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const I place = read(reinterpret_cast<const I*>(places));
  for (int64_t j = 0; j < n; j += W, start += W) {
    const uint32_t low = uint32_t(start), high = uint32_t(uint64_t(start) >> 32) + key1;
    I word;
    if (__builtin_expect(low > uint32_t(-W), 0)) {  // the upper half of the counter changes in this vector
      int32_t some[W];
      words_as<int32_t, 0>(key0, key1, start, W, some);
      word = read(reinterpret_cast<const I*>(some));
    } else {
      word = upper_mixed(folded<16>(upper_mixed(place + fill_int(int32_t(low + key0)))) ^ fill_int(int32_t(high)));
    }
    write(out, j / W, uint16_t(top_bits(word)));
  }
}

void words(uint32_t key0, uint32_t key1, int64_t start, int64_t n, int32_t* out) {
  words_as<int32_t, 0>(key0, key1, start, n, out);
}

void inverse(uint32_t key0, uint32_t key1, int64_t start, int64_t n, int32_t* out) {
  words_as<int32_t, 1, true>(key0, key1, start, n, out);
}

void noise(uint32_t key0, uint32_t key1, int64_t n, uint16_t* out) { words_as<uint16_t, 16>(key0, key1, 0, n, out); }

// ---- minifloats ------------------------------------------------------------------------------------------------------

#include "floats-inl.h"

// ---- randomly rotated blocks -----------------------------------------------------------------------------------------

#include "rotations-inl.h"

// ---- cosine transforms of chunks -------------------------------------------------------------------------------------

#include "cosines-inl.h"

// ---- single methods --------------------------------------------------------------------------------------------------

#include "methods-inl.h"

const grace::MethodLoops METHODS = {
    .order_keys = order_keys,
    .order_bins = order_bins,
    .order_codes = order_codes,
    .quantile_emit = quantile_emit,
    .quantile_sum = quantile_sum,
    .signs_count = signs_count,
    .hashed_add = hashed_add,
    .hashed_estimate = hashed_estimate,
    .tagged_count = tagged_count,
    .tagged_emit = tagged_emit,
    .tags_count = tags_count,
    .tagged_sum = tagged_sum,
    .bins_emit = bins_emit,
    .range = range,
    .chances_sum = chances_sum,
    .chances_emit = chances_emit,
    .excess = excess,
    .accumulate = accumulate_tail,
    .cosines_of = cosines_of,
    .cosines_left = cosines_left,
    .cosines_values = cosines_values,
    .groups_largest = groups_largest,
    .bound_of = bound_of,
    .shared_emit = shared_emit,
    .shared_values = shared_values,
    .signed_sums = signed_sums,
};

const grace::Loops LOOPS = {
    .name = NAME,
    .signs_total = signs_total,
    .signs_emit = signs_emit,
    .signs_blocks = signs_blocks,
    .signs_sum = bits_sum<Signs>,
    .ints_largest = ints_largest,
    .ints_emit = ints_emit,
    .ints_blocks = ints_blocks,
    .ints_sum = ints_sum,
    .select = select,
    .accumulate = accumulate,
    .divide = divide,
    .words = words,
    .inverse = inverse,
    .noise = noise,
    .product = product,
    .part = part,
    .left = left,
    .right = right,
    .squares = squares,
    .levels_emit = levels_emit,
    .levels_blocks = levels_blocks,
    .levels_sum = levels_sum,
    .votes_encode = votes_encode,
    .votes_sum = votes_sum,
    .halves = halves,
    .halves_emit = halves_emit,
    .halves_sum = bits_sum<Means>,
    .trits_emit = trits_emit,
    .trits_sum = trits_sum,
    .correct = correct,
    .codes_largest = codes_largest,
    .codes_scale = codes_scale,
    .codes_emit = codes_emit,
    .codes_sum = codes_sum,
    .normal_blocks = normal_blocks,
    .normal_sum = normal_sum,
    .steps_blocks = steps_blocks,
    .steps_values = steps_values,
    .methods = &METHODS,
};

}  // namespace

API const grace::Loops* grace_loops() { return &LOOPS; }
