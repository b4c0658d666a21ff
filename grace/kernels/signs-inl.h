// Codes of one bit per element: efsignsgd, and the loops that onebit shares with it.
#pragma once

#include <cstdint>

#include "common-inl.h"
#include "vectors-inl.h"

namespace {

// ---- signs: efsignsgd, and onebit in levels-inl.h -------------------------------------------------------------------

// efsignsgd. of: returns the values of elements, given the mask of set bits. bits: returns this mask.
struct Signs {
  F plus, minus;
  INLINE_MEMBER explicit Signs(float scale) : plus(fill(scale)), minus(fill(-scale)) {}
  INLINE_MEMBER Signs(const float* scales, int64_t b) : Signs(read(scales, b)) {}
  INLINE_MEMBER F of(M m) const { return pick(m, plus, minus); }
  static INLINE_MEMBER M bits(F v) { return not_below_zero(v); }
};

// Encode: writes the bits and the new residual. pair: the values of set and unset bits. Returns the sum of magnitudes
// of the next block, which begins `after` elements later.
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
void efsignsgd_blocks_to(const float* x, const float* residual, float* out, uint8_t* bits, float* scales, int64_t n,
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

double efsignsgd_total(const float* x, const float* residual, int64_t n) {
  return residual ? statistic_of<Total, true>(x, residual, n) : statistic_of<Total, false>(x, residual, n);
}

void efsignsgd_emit(const float* x, const float* residual, float* out, uint8_t* bits, float scale, int64_t n, Out form) {
  FORMS(bits_emit_to, x, residual, out, bits, Signs(scale), n, 0);
  if (form == STREAMED) fence();
}

void efsignsgd_blocks(const float* x, const float* residual, float* out, uint8_t* bits, float* scales, int64_t n,
                      int64_t block, Out form) {
  FORMS(efsignsgd_blocks_to, x, residual, out, bits, scales, n, block);
}

// Averages N vectors from element `at` on, a multiple of 8. All their elements lie in block b.
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
  for (int64_t at = begin; at < end; at += block, b++) {  // either `begin` starts a block, or there is one block
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

}  // namespace
