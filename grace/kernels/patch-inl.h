// Loops of grace.patch, which compares two versions of a tensor bit by bit.
#pragma once

#include <cstdint>
#include <cstring>

#include "common-inl.h"
#include "vectors-inl.h"

#if defined(GRACE_AVX512) || defined(GRACE_AVX2)
#include <immintrin.h>
#endif

namespace {

// Returns a bit for each of 64 words: whether it differs.
template <class T>
INLINE uint64_t differing(const uint8_t* x, const uint8_t* y) {
#ifdef GRACE_AVX512
  constexpr int PER = 64 / int(sizeof(T));
  uint64_t found = 0;
  _Pragma("GCC unroll 8")
  for (int j = 0; j < 64 / PER; j++) {
    const __m512i a = _mm512_loadu_si512(x + 64 * j), b = _mm512_loadu_si512(y + 64 * j);
    uint64_t mask;
    if constexpr (sizeof(T) == 1) mask = _mm512_cmpneq_epi8_mask(a, b);
    if constexpr (sizeof(T) == 2) mask = _mm512_cmpneq_epi16_mask(a, b);
    if constexpr (sizeof(T) == 4) mask = _mm512_cmpneq_epi32_mask(a, b);
    if constexpr (sizeof(T) == 8) mask = _mm512_cmpneq_epi64_mask(a, b);
    found |= mask << (PER * j % 64);
  }
  return found;
#elif defined(GRACE_AVX2)
  const auto equal = [&](int j) __attribute__((always_inline)) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x) + j);
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(y) + j);
    if constexpr (sizeof(T) == 1) return _mm256_cmpeq_epi8(a, b);
    if constexpr (sizeof(T) == 2) return _mm256_cmpeq_epi16(a, b);
    if constexpr (sizeof(T) == 4) return _mm256_cmpeq_epi32(a, b);
    if constexpr (sizeof(T) == 8) return _mm256_cmpeq_epi64(a, b);
  };
  uint64_t same = 0;
  _Pragma("GCC unroll 16")
  for (int j = 0; j < int(2 * sizeof(T)); j++) {
    if constexpr (sizeof(T) == 1) same |= uint64_t(uint32_t(_mm256_movemask_epi8(equal(j)))) << (32 * j);
    if constexpr (sizeof(T) == 2) {
      if (j % 2) continue;
      const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi16(equal(j), equal(j + 1)), 0xd8);  // in order
      same |= uint64_t(uint32_t(_mm256_movemask_epi8(both))) << (16 * j);
    }
    if constexpr (sizeof(T) == 4)
      same |= uint64_t(uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(equal(j))))) << (8 * j);
    if constexpr (sizeof(T) == 8)
      same |= uint64_t(uint32_t(_mm256_movemask_pd(_mm256_castsi256_pd(equal(j))))) << (4 * j);
  }
  return ~same;
#else
  T a[64], b[64];
  memcpy(a, x, sizeof a);
  memcpy(b, y, sizeof b);
  alignas(64) uint8_t differs[64];
  for (int j = 0; j < 64; j++) differs[j] = a[j] != b[j];  // the compiler vectorises this
  uint64_t found = 0;
  for (int j = 0; j < 8; j++) {
    uint64_t eight;
    memcpy(&eight, differs + 8 * j, 8);
    found |= ((eight * 0x0102040810204080) >> 56) << (8 * j);  // bit 0 of byte i moves to bit i
  }
  return found;
#endif
}

// A chunk of n <= 65536 words: writes the places of those that differ, their new values, and steps = fresh - base.
// Returns their number.
template <class T>
OUTLINE int64_t patch_chunk(const uint8_t* fresh, const uint8_t* base, int64_t n, uint16_t* places, uint8_t* values,
                            uint8_t* steps) {
  int64_t k = 0;
  const auto keep = [&](int64_t i) __attribute__((always_inline)) {
    T a, b;
    memcpy(&a, fresh + i * int64_t(sizeof(T)), sizeof(T));
    memcpy(&b, base + i * int64_t(sizeof(T)), sizeof(T));
    const T step = T(a - b);
    places[k] = uint16_t(i);
    memcpy(values + k * int64_t(sizeof(T)), &a, sizeof(T));
    memcpy(steps + k * int64_t(sizeof(T)), &step, sizeof(T));
    k++;
  };
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    const int64_t byte = i * int64_t(sizeof(T));
    for (uint64_t left = differing<T>(fresh + byte, base + byte); left; left &= left - 1)
      keep(i + __builtin_ctzll(left));
  }
  for (; i < n; i++)
    if (memcmp(fresh + i * int64_t(sizeof(T)), base + i * int64_t(sizeof(T)), sizeof(T))) keep(i);
  return k;
}

int64_t patch_diff(const uint8_t* fresh, const uint8_t* base, int64_t n, int64_t size, uint16_t* places, uint8_t* values,
                   uint8_t* steps) {
  switch (size) {
    case 1: return patch_chunk<uint8_t>(fresh, base, n, places, values, steps);
    case 2: return patch_chunk<uint16_t>(fresh, base, n, places, values, steps);
    case 4: return patch_chunk<uint32_t>(fresh, base, n, places, values, steps);
    default: return patch_chunk<uint64_t>(fresh, base, n, places, values, steps);
  }
}

}  // namespace
