// Codes of few bits: qsgd, terngrad, signsgd, signum, onebit and threelc.
//
// The compiler vectorises the plain loops here. They work on arrays of fixed size that stay in the L1 cache.
#pragma once

#include <cstdint>
#include <cstring>

#include "common-inl.h"
#include "kernels.h"
#include "signs-inl.h"
#include "vectors-inl.h"

namespace {

constexpr int64_t CHUNK = 1024;   // elements of a chunk, whose codes of any width fill whole bytes
constexpr int64_t VOTERS = 8192;  // elements that share a flag, as in grace/compressors/signsgd.py

using grace::Halves;
using grace::Qsgd;

// ---- codes of 1 .. 8 bits, as in grace/ops/packing.py ---------------------------------------------------------------

INLINE int64_t packed_size(int64_t n, int bits) { return 8 % bits ? (n + 7) / 8 * bits : (n * bits + 7) / 8; }

INLINE uint64_t lanes(int bits) { return 0x0101010101010101ull * ((1u << bits) - 1); }

// Copies a few hundred bytes, for which the start-up of the library's memcpy would take too long.
INLINE void copy_bytes(uint8_t* to, const uint8_t* from, int64_t n) {
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) memcpy(to + i, from + i, 64);
  if (i < n) memcpy(to + i, from + i, size_t(n - i));
}

// Packs up to CHUNK codes, given as bytes.
INLINE void pack_codes(const uint8_t* codes, int64_t n, int bits, uint8_t* packed) {
  if (bits == 8) return copy_bytes(packed, codes, n);
  uint8_t bytes[CHUNK + 8];
  const uint64_t mask = lanes(bits);
  int64_t at = 0;
  for (int64_t i = 0; i < n; i += 8, at += bits) {
    uint64_t word = 0;
    memcpy(&word, codes + i, n - i < 8 ? size_t(n - i) : 8);
#if defined(__BMI2__)
    word = _pext_u64(word, mask);
#else
    uint64_t all = 0;
    for (int j = 0; j < 8; j++) all |= (word >> 8 * j & mask & 0xff) << bits * j;
    word = all;
#endif
    memcpy(bytes + at, &word, 8);
  }
  memcpy(packed, bytes, size_t(packed_size(n, bits)));
}

// The inverse of pack_codes. codes needs room for n rounded up to a multiple of 8.
INLINE void unpack_codes(const uint8_t* packed, int64_t n, int bits, uint8_t* codes) {
  if (bits == 8) return copy_bytes(codes, packed, n);
  uint8_t bytes[CHUNK + 8];
  memcpy(bytes, packed, size_t(packed_size(n, bits)));
  const uint64_t mask = lanes(bits);
  int64_t at = 0;
  for (int64_t i = 0; i < n; i += 8, at += bits) {
    uint64_t word;
    memcpy(&word, bytes + at, 8);
#if defined(__BMI2__)
    word = _pdep_u64(word, mask);
#else
    uint64_t all = 0;
    for (int j = 0; j < 8; j++) all |= (word >> bits * j & mask & 0xff) << 8 * j;
    word = all;
#endif
    memcpy(codes + i, &word, 8);
  }
}

// v = x + residual, for up to CHUNK elements.
INLINE void values_of(const float* x, const float* residual, int64_t n, float* v) {
  if (!residual) {
    memcpy(v, x, size_t(n) * 4);
    return;
  }
  for (int64_t i = 0; i < n; i++) v[i] = read(x, i) + read(residual, i);
}

// Writes the new residual v - carried in the given form. carried: the decoded values.
INLINE void leave_values(const float* x, const float* residual, float* out, const float* v, const float* carried,
                         int64_t n, Out form) {
  float left[CHUNK];
  for (int64_t i = 0; i < n; i++) left[i] = v[i] - carried[i];
  if (form == SWAPPED) memcpy(const_cast<float*>(x), residual, size_t(n) * 4);
  memcpy(out, left, size_t(n) * 4);
}

INLINE const float* beyond(const float* p, int64_t i) { return p ? p + i : nullptr; }

// ---- levels and ternary numbers: qsgd, terngrad ---------------------------------------------------------------------

template <bool RESIDUAL>
INLINE double squares_of(const float* x, const float* residual, int64_t n, float largest) {
  const F divisor = fill(largest == 0.0f ? 1.0f : largest);
  D sum = zeros();
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const F v = value<RESIDUAL>(x, residual, i) / divisor;
    add_magnitude(sum, v * v);
  }
  if (i < n) {
    const F v = value_some<RESIDUAL>(x, residual, i, n - i) / divisor;
    add_magnitude(sum, v * v);
  }
  return total(sum);
}

double squares(const float* x, const float* residual, int64_t n, float largest) {
  return residual ? squares_of<true>(x, residual, n, largest) : squares_of<false>(x, residual, n, largest);
}

INLINE float norm_of(float largest, double squares) { return largest * __builtin_sqrtf(float(squares)); }

// Computes level / levels with the bits of a division. For integers up to 127, one correction step suffices.
struct Share {
  float by, inverse;
  INLINE_MEMBER explicit Share(int levels) : by(float(levels)), inverse(1.0f / float(levels)) {}
  INLINE_MEMBER float of(float level) const {
#if defined(__FMA__)
    const float quotient = level * inverse;
    return __builtin_fmaf(__builtin_fmaf(-quotient, by, level), inverse, quotient);
#else
    return level / by;
#endif
  }
};

// Decode: out = the values of codes. With ADD: out += these values.
template <bool ADD>
INLINE void qsgd_decode(const uint8_t* codes, int64_t n, const Qsgd& how, float scale, float* out) {
  if (how.levels) {
    const int sign = 1 << (how.bits - 1);
    const Share share(how.levels);
    for (int64_t i = 0; i < n; i++) {
      const int code = codes[i];
      const float level = share.of(float(code & (sign - 1)));
      const float v = (code & sign ? -level : level) * scale;
      out[i] = ADD ? out[i] + v : v;
    }
  } else {
    for (int64_t i = 0; i < n; i++) {
      const float v = (float(int(codes[i])) - 1.0f) * scale;
      out[i] = ADD ? out[i] + v : v;
    }
  }
}

void qsgd_emit(const float* x, const float* residual, float* out, uint8_t* codes, float scale, int64_t n,
               const Qsgd* how, int64_t first, Out form) {
  const float divisor = scale == 0.0f ? 1.0f : scale, top = float(how->levels);
  const int sign = 1 << (how->bits - 1), bits = how->bits;
  for (int64_t i = 0; i < n; i += CHUNK) {
    const int64_t count = least(CHUNK, n - i);
    float v[CHUNK], u[CHUNK];
    uint8_t all[CHUNK];
    values_of(x + i, beyond(residual, i), count, v);
    if (how->levels) {
      uint16_t noise[CHUNK];
      noise_at(noise, how->noise, how->noise.start + first + i, count);
      for (int64_t j = 0; j < count; j++) u[j] = (float(int(noise[j])) + 0.5f) * 0x1p-16f;
      for (int64_t j = 0; j < count; j++) {
        const float raised = __builtin_fabsf(v[j]) / divisor * top + u[j];
        const int level = int(raised < top + 1.0f ? raised : top);  // converts NaN to a valid level, too
        all[j] = uint8_t((level < how->levels ? level : how->levels) + (v[j] < 0.0f ? sign : 0));
      }
    } else {
      int32_t drawn[CHUNK];
      words(how->key0, how->key1, how->noise.start + first + i, count, drawn);
      for (int64_t j = 0; j < count; j++) {
        const float uniform = float(int32_t(uint32_t(drawn[j]) >> 8)) * 0x1p-24f;
        const int sent = uniform < __builtin_fabsf(v[j]) / divisor ? 1 : 0;
        all[j] = uint8_t(1 + (v[j] > 0.0f ? sent : 0) - (v[j] < 0.0f ? sent : 0));
      }
    }
    pack_codes(all, count, bits, codes + i / 8 * bits);
    if (form != NONE) {
      qsgd_decode<false>(all, count, *how, scale, u);
      leave_values(x + i, beyond(residual, i), out + i, v, u, count, form);
    }
  }
}

void qsgd_blocks(const float* x, const float* residual, float* out, uint8_t* codes, float* scales, int64_t n,
                 int64_t block, const Qsgd* how, int64_t first, Out form) {
  for (int64_t at = 0, b = 0; at < n; at += block, b++) {
    const int64_t size = least(block, n - at);
    const float* r = beyond(residual, at);
    float scale = as_float(largest_magnitude(x + at, r, size));
    if (how->levels) scale = norm_of(scale, squares(x + at, r, size, scale));
    write(scales, b, scale);
    qsgd_emit(x + at, r, form == NONE ? nullptr : out + at, codes + at / 8 * how->bits, scale, size, how, first + at,
              form);
  }
}

// Average: out = the mean over workers, in chunks of `chunk` <= CHUNK elements. add(worker, block, from, count, sum)
// must write the values of worker 0 to sum[count], and add the values of the other workers to it.
template <class Add>
INLINE void mean_of_chunks(int64_t workers, float* out, int64_t begin, int64_t end, int64_t block, int64_t chunk,
                           bool stream, const Add& add) {
  alignas(64) float sum[CHUNK];
  int64_t b = begin / block;
  for (int64_t at = begin; at < end; at += block, b++) {  // either `begin` starts a block, or there is one block
    const int64_t stop = least(at + block, end);
    for (int64_t i = at; i < stop; i += chunk) {
      const int64_t count = least(chunk, stop - i);
      for (int64_t w = 0; w < workers; w++) add(w, b, i, count, sum);
      divide_part(sum, out + i, count, workers, stream);
    }
  }
  if (stream) fence();
}

void qsgd_sum(const uint8_t* const* codes, const float* const* scales, int64_t workers, float* out, int64_t begin,
              int64_t end, int64_t block, const Qsgd* how, bool stream) {
  uint8_t all[CHUNK];
  mean_of_chunks(workers, out, begin, end, block, CHUNK, stream,
                 [&](int64_t w, int64_t b, int64_t i, int64_t count, float* sum) __attribute__((always_inline)) {
                   unpack_codes(codes[w] + i / 8 * how->bits, count, how->bits, all);
                   const float scale = read(scales[w], b);
                   w ? qsgd_decode<true>(all, count, *how, scale, sum)
                     : qsgd_decode<false>(all, count, *how, scale, sum);
                 });
}

// ---- votes: signsgd, signum -----------------------------------------------------------------------------------------

void signsgd_encode(const float* x, uint8_t* bits, uint8_t* flags, int64_t n) {
  for (int64_t at = 0, b = 0; at < n; at += VOTERS, b++) {
    const int64_t stop = least(at + VOTERS, n);
    I most = fill_int(0);
    int64_t i = at;
    for (; i + W <= stop; i += W) {
      const F v = load(x + i);
      write(reinterpret_cast<uint16_t*>(bits + i / 8), 0, uint16_t(bits_of(not_below_zero(v))));
      most = larger(most, magnitude_bits(v));
    }
    if (i < stop) {
      const F v = load_some(x + i, stop - i);
      const uint32_t some = bits_of(not_below_zero(v)) & ((1u << (stop - i)) - 1);
      bits[i / 8] = uint8_t(some);
      if (stop - i > 8) bits[i / 8 + 1] = uint8_t(some >> 8);
      most = larger(most, magnitude_bits(v));
    }
    flags[b] = largest(most) >= 0x7f800000;
  }
}

template <int N, bool STREAM>
INLINE void signsgd_tile(const uint8_t* const* bits, int64_t workers, float* out, int64_t at) {
  const F yes = fill(1.0f), no = fill(-1.0f);
  F sum[N] = {};
  for (int64_t w = 0; w < workers; w++) {
    const uint8_t* from = bits[w] + at / 8;
    for (int i = 0; i < N; i++) {
      const F v = pick(mask_of(read(reinterpret_cast<const uint16_t*>(from), i)), yes, no);
      sum[i] = w ? sum[i] + v : v;
    }
  }
  for (int i = 0; i < N; i++) put<STREAM>(out + at + i * W, pick(not_below_zero(sum[i]), yes, no));
}

template <bool STREAM>
INLINE void signsgd_sum_to(const uint8_t* const* bits, const uint8_t* const* flags, int64_t workers, float* out,
                           int64_t begin, int64_t end) {
  for (int64_t at = begin; at < end; at += VOTERS) {
    const int64_t stop = least(at + VOTERS, end), b = at / VOTERS;
    bool wrong = false;
    for (int64_t w = 0; w < workers; w++) wrong |= flags[w][b] != 0;
    int64_t i = at;
    if (wrong) {
      const F nothing = fill(__builtin_nanf(""));
      for (; i + W <= stop; i += W) put<STREAM>(out + i, nothing);
      if (i < stop) store_some(out + i, nothing, stop - i);
      continue;
    }
    for (; i + TILE * W <= stop; i += TILE * W) signsgd_tile<TILE, STREAM>(bits, workers, out, i);
    for (; i + W <= stop; i += W) signsgd_tile<1, STREAM>(bits, workers, out, i);
    if (i < stop) {
      F sum = fill(0);
      for (int64_t w = 0; w < workers; w++) {
        uint32_t some = bits[w][i / 8];
        if (stop - i > 8) some |= uint32_t(bits[w][i / 8 + 1]) << 8;
        sum = sum + pick(mask_of(some), fill(1.0f), fill(-1.0f));
      }
      store_some(out + i, pick(not_below_zero(sum), fill(1.0f), fill(-1.0f)), stop - i);
    }
  }
  if (STREAM) fence();
}

void signsgd_sum(const uint8_t* const* bits, const uint8_t* const* flags, int64_t workers, float* out, int64_t begin,
                 int64_t end, bool stream) {
  stream ? signsgd_sum_to<true>(bits, flags, workers, out, begin, end)
         : signsgd_sum_to<false>(bits, flags, workers, out, begin, end);
}

// ---- two means: onebit ----------------------------------------------------------------------------------------------

template <bool RESIDUAL>
INLINE Halves onebit_halves_of(const float* x, const float* residual, int64_t n) {
  D below = zeros(), rest = zeros();
  int64_t count = 0, i = 0;
  const auto add = [&](F v) __attribute__((always_inline)) {
    const M m = below_zero(v);
    count += __builtin_popcount(bits_of(m));
    add_magnitude(below, pick(m, v, fill(0)));
    add_magnitude(rest, clear(m, v));
  };
  for (; i + W <= n; i += W) add(value<RESIDUAL>(x, residual, i));
  if (i < n) add(value_some<RESIDUAL>(x, residual, i, n - i));
  return {count, count ? -total(below) : 0.0, total(rest)};
}

Halves onebit_halves(const float* x, const float* residual, int64_t n) {
  return residual ? onebit_halves_of<true>(x, residual, n) : onebit_halves_of<false>(x, residual, n);
}

// onebit. of: returns the values of elements, given the mask of set bits. bits: returns this mask. If one mean is not
// finite, both become NaN.
struct Means {
  F below, rest;
  INLINE_MEMBER Means(float x, float y) {
    const float wrong = (x - x) + (y - y);  // 0, or NaN
    below = fill(x + wrong), rest = fill(y + wrong);
  }
  INLINE_MEMBER Means(const float* means, int64_t b) : Means(read(means, 2 * b), read(means, 2 * b + 1)) {}
  INLINE_MEMBER F of(M m) const { return pick(m, below, rest); }
  static INLINE_MEMBER M bits(F v) { return below_zero(v); }
};

void onebit_emit(const float* x, const float* residual, float* out, uint8_t* bits, float below, float rest, int64_t n,
                 Out form) {
  FORMS(bits_emit_to, x, residual, out, bits, Means(below, rest), n, 0);
  if (form == STREAMED) fence();
}

// ---- five trits per byte: threelc -----------------------------------------------------------------------------------

using grace::Runs;

constexpr int64_t FIVES = 960;  // elements of a chunk: whole bytes and whole cache lines
constexpr int RUN = 243;        // with RUNS, bytes 243 .. 255 stand for 2 .. 14 bytes of five zeros each

// of: the trits of each byte, padded with zeros. lengths: the number of elements that the byte stands for.
template <bool RUNS>
struct Trits {
  int8_t of[256][8];
  uint8_t lengths[256];
  constexpr Trits() : of(), lengths() {
    for (int byte = 0; byte < 256; byte++) {
      const bool run = RUNS && byte >= RUN;
      lengths[byte] = uint8_t(run ? 5 * (byte - RUN + 2) : 5);
      for (int i = 0, rest = byte; i < 5 && !run; i++, rest /= 3) of[byte][i] = int8_t(rest % 3 - 1);
    }
  }
};
template <bool RUNS>
constexpr Trits<RUNS> TRITS;

// Decodes the next n <= FIVES elements (whole bytes) to `trits`, which needs room for 8 more. Returns whether any trit
// is nonzero.
template <bool RUNS>
INLINE bool written_out(Runs& from, int64_t n, int8_t* trits) {
  const uint8_t* next = from.next;
  int64_t at = from.zeros;
  uint64_t any = 0;
  if (RUNS) memset(trits, 0, FIVES);
  while (at < n) {  // an iteration depends on the previous one only by `next` and `at`
    const uint8_t byte = *next++;
    const uint64_t five = read(reinterpret_cast<const uint64_t*>(TRITS<RUNS>.of[byte]));
    write(reinterpret_cast<uint64_t*>(trits + at), 0, five);
    any |= five;
    at += RUNS ? TRITS<RUNS>.lengths[byte] : 5;
  }
  from = {next, at - n};
  return any;
}

// Converts eight groups of five bits to eight bytes: the bits of a group are read as base-3 digits.
INLINE uint64_t to_the_base_three(uint64_t bits) {
  const uint64_t one = 0x0101010101010101;
#if defined(__BMI2__)
  const uint64_t fives = _pdep_u64(bits, 31 * one);
#else
  uint64_t fives = 0;
  for (int j = 0; j < 8; j++) fives |= (bits >> 5 * j & 31) << 8 * j;
#endif
  uint64_t sum = 0;
  for (int digit = 4; digit >= 0; digit--) sum = 3 * sum + (fives >> digit & one);
  return sum;
}

template <bool RESIDUAL, Out OUT>
INLINE void threelc_emit_to(const float* x, const float* residual, float* out, uint8_t* bytes, float scale, int64_t n) {
  const float divisor = scale == 0.0f ? 1.0f : scale;
  const F high = fill(divisor), low = fill(-divisor);  // 2 v is exact, and |2 v| > divisor where |v / divisor| > 1/2
  const F plus = fill(scale), minus = fill(-scale), none = fill(0.0f * scale);
  for (int64_t i = 0; i < n; i += 5 * W) {
    uint64_t ups[5] = {}, downs[5] = {};
    const auto trits = [&](int64_t k, F v) __attribute__((always_inline)) {
      const M up = above(v + v, high), down = above(low, v + v);
      ups[k] = bits_of(up), downs[k] = bits_of(down);
      return v - pick(up, plus, pick(down, minus, none));
    };
    for (int64_t k = 0; k < 5; k++) {
      const int64_t at = i + k * W;
      prefetch<RESIDUAL>(x, residual, at + AHEAD);
      if (at + W <= n)
        leave<OUT>(x, residual, out, at, trits(k, value<RESIDUAL>(x, residual, at)));
      else if (at < n)
        leave_some<OUT>(x, residual, out, at, trits(k, value_some<RESIDUAL>(x, residual, at, n - at)), n - at);
    }
    const auto first = [](const uint64_t* m) { return m[0] | m[1] << 16 | m[2] << 32; };
    const auto second = [](const uint64_t* m) { return m[2] >> 8 | m[3] << 8 | m[4] << 24; };
    const uint64_t zeros = 0x7979797979797979;  // 121 = 1 + 3 + 9 + 27 + 81
    const uint64_t both[2] = {zeros + to_the_base_three(first(ups)) - to_the_base_three(first(downs)),
                              zeros + to_the_base_three(second(ups)) - to_the_base_three(second(downs))};
    memcpy(bytes + i / 5, both, i + 5 * W <= n ? sizeof both : size_t(n - i + 4) / 5);
  }
}

void threelc_emit(const float* x, const float* residual, float* out, uint8_t* bytes, float scale, int64_t n) {
  KEPT_FORMS(threelc_emit_to, x, residual, out, bytes, scale, n);
}

template <bool RUNS>
INLINE void threelc_sum_of(Runs* from, const float* const* scales, int64_t workers, float* out, int64_t begin, int64_t end,
                           int64_t block, bool stream) {
  alignas(64) float sum[FIVES];
  alignas(64) int8_t trits[FIVES + 8] = {};
  for (int64_t at = begin, b = begin / block; at < end; at += block, b++) {
    const int64_t stop = least(at + block, end);
    for (int64_t i = at; i < stop; i += FIVES) {
      const int64_t count = least(FIVES, stop - i);
      memset(sum, 0, sizeof sum);
      for (int64_t w = 0; w < workers; w++) {
        const float scale = read(scales[w], b);
        const bool any = written_out<RUNS>(from[w], (count + 4) / 5 * 5, trits);
        if (any || !(__builtin_fabsf(scale) < __builtin_inff()))  // 0 * infinity is NaN
          for (int64_t j = 0; j < FIVES; j++) sum[j] += float(int(trits[j])) * scale;
      }
      divide_part(sum, out + i, count, workers, stream);
    }
  }
  if (stream) fence();
}

void threelc_sum(Runs* from, const float* const* scales, int64_t workers, float* out, int64_t begin, int64_t end,
                 int64_t block, bool runs, bool stream) {
  runs ? threelc_sum_of<true>(from, scales, workers, out, begin, end, block, stream)
       : threelc_sum_of<false>(from, scales, workers, out, begin, end, block, stream);
}

}  // namespace
