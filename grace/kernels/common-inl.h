// Shared by the loops of several methods: x + residual, the new residual, statistics of blocks, noise, random words.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"
#include "vectors-inl.h"

namespace {

using grace::Found;
using grace::Noise;
using grace::Out;
using grace::NONE, grace::KEPT, grace::STREAMED, grace::SWAPPED;

// Returns x + residual for the W elements from i on; value_some: for the first `count` elements, padded with zeros.
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

// Writes the new residual `left` in the form OUT (kernels.h); leave_some: writes its first `count` elements.
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

// Prefetches x and the residual into the L2 cache, because with several arrays the hardware prefetcher comes too late.
template <bool RESIDUAL>
INLINE void prefetch(const float* x, const float* residual, int64_t i) {
  __builtin_prefetch(x + i, 0, 2);
  if constexpr (RESIDUAL) __builtin_prefetch(residual + i, 0, 2);
}

constexpr int64_t AHEAD = 2048;  // the minimum prefetch distance, in elements

// A statistic: the sum of magnitudes, in double precision.
struct Total {
  D sum = zeros();
  INLINE_MEMBER void add(F v) { add_magnitude(sum, v); }
  INLINE_MEMBER double result() const { return total(sum); }
};

// A statistic: the bits of the largest magnitude. As integers, the bits of NaN are largest, so any NaN gives NaN.
struct Largest {
  I most = fill_int(0);
  INLINE_MEMBER void add(F v) { most = larger(most, magnitude_bits(v)); }
  INLINE_MEMBER int32_t result() const { return largest(most); }
};

// Returns a statistic of x + residual.
template <class Statistic, bool RESIDUAL>
INLINE auto statistic_of(const float* x, const float* residual, int64_t n) {
  Statistic found;
  int64_t i = 0;
  for (; i + W <= n; i += W) found.add(value<RESIDUAL>(x, residual, i));
  if (i < n) found.add(value_some<RESIDUAL>(x, residual, i, n - i));
  return found.result();
}

// Computes the statistic of the next block while the current block is written, vector by vector, so that memory is
// never idle. after: distance to the next block, or 0 if there is none.
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
constexpr bool LOOKS = false;  // with few registers, the lookahead costs more than it saves
#endif

// Calls emit(begin, size, statistic, after) for each block in turn. If after > 0, emit returns the statistic of the
// next block, which begins `after` elements later.
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

// Calls f<RESIDUAL, OUT>(...), where `residual` and `form` select the template arguments. Without a residual, form must
// not be SWAPPED.
#define FORMS(f, ...)                                                \
  (!residual ? (form == NONE       ? f<false, NONE>(__VA_ARGS__)     \
                : form == STREAMED ? f<false, STREAMED>(__VA_ARGS__) \
                                   : f<false, KEPT>(__VA_ARGS__))    \
             : (form == NONE       ? f<true, NONE>(__VA_ARGS__)      \
                : form == STREAMED ? f<true, STREAMED>(__VA_ARGS__)  \
                : form == SWAPPED  ? f<true, SWAPPED>(__VA_ARGS__)   \
                                   : f<true, KEPT>(__VA_ARGS__)))

// As FORMS, for kernels that support only two forms: NONE if `out` is null, otherwise KEPT.
#define KEPT_FORMS(f, ...)                                                       \
  (!residual ? (out ? f<false, KEPT>(__VA_ARGS__) : f<false, NONE>(__VA_ARGS__)) \
             : (out ? f<true, KEPT>(__VA_ARGS__) : f<true, NONE>(__VA_ARGS__)))

INLINE float as_float(int32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

int32_t largest_magnitude(const float* x, const float* residual, int64_t n) {
  return residual ? statistic_of<Largest, true>(x, residual, n) : statistic_of<Largest, false>(x, residual, n);
}

template <bool STREAM>
INLINE void divide_to(const float* x, float* out, int64_t n, int64_t divisor) {
  const Divisor by(divisor);
  int64_t i = 0;
  for (; i + W <= n; i += W) put<STREAM>(out + i, by.divided(load(x + i)));
  if (i < n) store_some(out + i, by.divided(load_some(x + i, n - i)), n - i);
}

// out = x / divisor. If `stream`, the caller must issue the fence: one fence per small part would be slow.
INLINE void divide_part(const float* x, float* out, int64_t n, int64_t divisor, bool stream) {
  stream ? divide_to<true>(x, out, n, divisor) : divide_to<false>(x, out, n, divisor);
}

void divide(const float* x, float* out, int64_t n, int64_t divisor, bool stream) {
  divide_part(x, out, n, divisor, stream);
  if (stream) fence();
}

INLINE F accumulated(F x, F y, F sum) {  // sum + x * y, rounded once if the machine has FMA
#if defined(GRACE_AVX512) || defined(GRACE_AVX2)
  return fused(x, y, sum);
#else
  return x * y + sum;
#endif
}

// ---- random bits, and randomk ---------------------------------------------------------------------------------------

INLINE uint32_t mix(uint32_t h) {  // the finaliser of MurmurHash3: grace.core.rng.mix
  h ^= h >> 16;
  h *= 0x85EBCA6B;
  h ^= h >> 13;
  h *= 0xC2B2AE35;
  return h ^ (h >> 16);
}

// out = random words (if INVERSE, their complements), shifted right by SHIFT bits and converted to T.
template <class T, int SHIFT, bool INVERSE = false>
INLINE void words_as(uint32_t key0, uint32_t key1, int64_t start, int64_t n, T* out) {
  while (n > 0) {  // within a run, the upper half of the counter is constant
    const uint32_t low = uint32_t(start), high = uint32_t(uint64_t(start) >> 32) + key1;
    const int32_t size = int32_t(least(least(n, 1 << 30), (int64_t(1) << 32) - int64_t(low)));
    for (int32_t j = 0; j < size; j++) {  // a 32-bit index, so that vectors of indices and of words have the same width
      const uint32_t word = mix(mix(low + uint32_t(j) + key0) ^ high);
      out[j] = T((INVERSE ? ~word : word) >> SHIFT);
    }
    start += size, n -= size, out += size;
  }
}

// `mix` without its last step, which changes only the lower 16 bits.
INLINE I upper_mixed(I h) { return folded<13>(folded<16>(h) * fill_int(int32_t(0x85EBCA6B))) * fill_int(int32_t(0xC2B2AE35)); }

// out = the top bit of each of n random words, sixteen bits per entry.
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

// out = the noise of positions position .. position + count - 1. The range may wrap around the end of the table.
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

}  // namespace
