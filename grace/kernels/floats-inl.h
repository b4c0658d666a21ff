// Codes that are decoded by a table or a formula (`grace.kernels.Codes`): bf16, fp8, natural, natural_dithering and
// dettmers8.
//
// The compiler vectorises the plain loops here. They work on local arrays of 512 elements.
#pragma once

#include <cstdint>
#include <cstring>

#include "common-inl.h"
#include "kernels.h"
#include "levels-inl.h"
#include "vectors-inl.h"

namespace {

using grace::Codec;

constexpr int64_t SOME = 512;  // elements of a local array, which stays in the L1 cache; a multiple of W

struct Scratch {
  alignas(64) float v[SOME];
  alignas(64) float values[SOME];
  alignas(64) float found[SOME];
  alignas(64) uint32_t words[SOME];
  alignas(64) uint16_t wide[SOME];  // codes of 16 bits, or noise
  alignas(64) uint8_t codes[SOME];
};

INLINE int32_t as_bits(float x) {
  int32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

INLINE float float_of(int32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

INLINE float not_zero(float scale) { return scale == 0.0f ? 1.0f : scale; }

// v = x + residual, for `count` elements from i on, padded with zeros to a whole vector. Returns the padded size.
// ahead: distance to the elements to prefetch.
template <bool RESIDUAL>
INLINE int64_t load_all(float* v, const float* x, const float* residual, int64_t i, int64_t count, int64_t ahead = AHEAD) {
  int64_t j = 0;
  for (; j + W <= count; j += W) {
    prefetch<RESIDUAL>(x, residual, i + j + ahead);
    store(v + j, value<RESIDUAL>(x, residual, i + j));
  }
  if (j < count) store(v + j, value_some<RESIDUAL>(x, residual, i + j, count - j)), j += W;
  return j;
}

// A table of the values of 2^bits codes. If bits == -1, there is no table.
struct LookUp {
#if defined(GRACE_AVX512)
  // The lower and upper 16 bits of the entries, 32 per vector. A permutation looks up 32 codes in 64 entries.
  __m512i low[8], high[8];
  int64_t fours;
  INLINE_MEMBER LookUp(const float* table, int bits) : fours(bits <= 6 ? 1 : 4) {
    if (bits < 0) return;
    const auto sixteen = [=](int64_t k) __attribute__((always_inline)) {
      const int64_t count = (1 << bits) - k * W;
      return _mm512_castps_si512(load_some(table + k * W, count < 0 ? 0 : least(count, W)).v);
    };
    for (int64_t k = 0; k < 2 * fours; k++) {
      const __m512i a = sixteen(2 * k), b = sixteen(2 * k + 1);
      const auto pair = [](__m512i a, __m512i b) __attribute__((always_inline)) {
        return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(a)), _mm512_cvtepi32_epi16(b), 1);
      };
      low[k] = pair(a, b), high[k] = pair(_mm512_srli_epi32(a, 16), _mm512_srli_epi32(b, 16));
    }
  }
  template <int64_t FOURS>
  static INLINE_MEMBER __m512i halves(const __m512i* half, __m512i codes, __mmask32 odd, __mmask32 upper) {
    const auto pick = [&](int64_t k) __attribute__((always_inline)) {
      return _mm512_permutex2var_epi16(half[2 * k], codes, half[2 * k + 1]);
    };
    if constexpr (FOURS == 1) return pick(0);
    const __m512i lower = _mm512_mask_blend_epi16(odd, pick(0), pick(1));
    return _mm512_mask_blend_epi16(upper, lower, _mm512_mask_blend_epi16(odd, pick(2), pick(3)));
  }
  template <int64_t FOURS>
  INLINE_MEMBER void some(const uint8_t* codes, int64_t count, float* out) const {
    for (int64_t j = 0; j < count; j += 2 * W) {
      // Reorder the codes, because unpacklo and unpackhi below interleave the two halves.
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + j));
      const __m256i mixed = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
      const __m512i each = _mm512_cvtepu8_epi16(mixed);
      const __mmask32 odd = _mm512_test_epi16_mask(each, _mm512_set1_epi16(64));
      const __mmask32 upper = _mm512_test_epi16_mask(each, _mm512_set1_epi16(128));
      const __m512i a = halves<FOURS>(low, each, odd, upper), b = halves<FOURS>(high, each, odd, upper);
      _mm512_storeu_si512(out + j, _mm512_unpacklo_epi16(a, b));
      _mm512_storeu_si512(out + j + W, _mm512_unpackhi_epi16(a, b));
    }
  }
  // Looks up `count` codes. Both arrays need room for `count` rounded up to a multiple of 32.
  INLINE_MEMBER void of(const uint8_t* codes, int64_t count, float* out) const {
    fours == 1 ? some<1>(codes, count, out) : some<4>(codes, count, out);
  }
#else
  const float* table;
  INLINE_MEMBER LookUp(const float* table, int) : table(table) {}
  INLINE_MEMBER void of(const uint8_t* codes, int64_t count, float* out) const {
    for (int64_t j = 0; j < count; j++) out[j] = table[codes[j]];
  }
#endif
};

// ---- decoding -------------------------------------------------------------------------------------------------------

// Decode: sums = the values of `count` codes. With ADD: sums += these values.
template <bool ADD>
INLINE void decode_to(float* sums, const Codec& codec, const LookUp& table, const uint8_t* codes, int32_t scale_bits,
                      int64_t count, Scratch& scratch) {
#define EMIT(VALUE)                              \
  for (int64_t j = 0; j < count; j++) {          \
    const float value = VALUE;                   \
    sums[j] = ADD ? sums[j] + value : value;     \
  }
  const float scale = float_of(scale_bits);
  const int32_t first = codec.first, second = codec.second;
  if (codec.bits == 16) {
    uint16_t* from = scratch.wide;
    memcpy(from, codes, size_t(count) * 2);
    EMIT(float_of(int32_t(uint32_t(from[j]) << 16)))
    return;
  }
  uint8_t* from = scratch.codes;
  unpack_codes(codes, count, codec.bits, from);
  if (codec.kind == grace::FP8) {  // first: number of mantissa bits; second: exponent bias
    const int32_t rest = (127 - second) << 23, shift = 23 - first, normal = 1 << first;
    const float unit = float_of((128 - second - first) << 23);
    EMIT(float_of(((from[j] & 127) < normal ? as_bits(float(from[j] & 127) * unit) : ((from[j] & 127) << shift) + rest) |
                  int32_t(uint32_t(from[j] & 128) << 24)) *
         scale)
  } else if (codec.kind == grace::NATURAL) {  // the scale is the exponent field of code 127
    const int32_t top = scale_bits >= 0 && scale_bits < 255 ? scale_bits : 255, below = top - 127;
    if (top == 255) {
      const float nan = float_of(0x7fc00000);
      EMIT(nan)
      return;
    }
    EMIT(float_of(((from[j] & 127) > 0 && (from[j] & 127) + below > 0 ? ((from[j] & 127) + below) << 23 : 0) |
                  int32_t(uint32_t(from[j] & 128) << 24)))
  } else if (codec.kind == grace::DITHERED) {
    const int32_t sign = codec.bits - 1, low = (1 << sign) - 1, rest = (127 - first) << 23;
    EMIT(float_of(((from[j] & low) > first ? 0x7fc00000 : (from[j] & low) ? ((from[j] & low) << 23) + rest : 0) |
                  int32_t(uint32_t(from[j] >> sign) << 31)) *
         scale)
  } else {
    float* found = scratch.found;
    table.of(from, count, found);
    EMIT(found[j] * scale)
  }
#undef EMIT
}

void codes_sum(const Codec* codec, const uint8_t* const* codes, const int32_t* const* scales, int64_t workers,
               float* out, int64_t begin, int64_t end, int64_t block, bool stream) {
  const Divisor divisor(workers);
  const LookUp table(codec->table, codec->kind == grace::NEAREST ? codec->bits : -1);
  Scratch scratch;
  alignas(64) float sums[SOME];
  int64_t b = begin / block;
  for (int64_t at = begin; at < end; at += block, b++) {  // either `begin` starts a block, or there is one block
    const int64_t stop = least(at + block, end);
    for (int64_t i = at; i < stop; i += SOME) {
      const int64_t count = least(SOME, stop - i);
      for (int64_t w = 0; w < workers; w++) {
        const uint8_t* from = codes[w] + i * codec->bits / 8;
        const int32_t scale = scales ? read(scales[w], b) : 0;
        w ? decode_to<true>(sums, *codec, table, from, scale, count, scratch)
          : decode_to<false>(sums, *codec, table, from, scale, count, scratch);
      }
      int64_t j = 0;
      if (stream)
        for (; j + W <= count; j += W) put<true>(out + i + j, divisor.divided(load(sums + j)));
      else
        for (; j + W <= count; j += W) put<false>(out + i + j, divisor.divided(load(sums + j)));
      if (j < count) store_some(out + i + j, divisor.divided(load_some(sums + j, count - j)), count - j);
    }
  }
  if (stream) fence();
}

// ---- encoding -------------------------------------------------------------------------------------------------------

// Rounds to a power of two and returns its exponent field: 0 for zero and subnormals; at most 254, even for NaN.
INLINE int32_t rounded_field(float x, uint32_t word, bool random) {
  const int32_t bits = as_bits(x) & ABS, mantissa = bits & 0x7fffff;
  const int32_t up = random ? mantissa > int32_t(word >> 9) : mantissa >= 0x400000;
  const int32_t field = (bits >> 23) + up;
  return bits < 0x800000 ? 0 : field < 254 ? field : 254;
}

template <bool RESIDUAL>
INLINE int32_t codes_largest_of(const Codec& codec, const float* x, const float* residual, uint8_t* codes, int64_t n,
                                int64_t position) {
  if (codec.kind != grace::NATURAL) return statistic_of<Largest, RESIDUAL>(x, residual, n);
  Scratch scratch;
  int32_t most = 0, bits = 0;
  for (int64_t i = 0; i < n; i += SOME) {  // scratch.codes holds exponent fields here
    const int64_t count = least(SOME, n - i), all = load_all<RESIDUAL>(scratch.v, x, residual, i, count);
    const float* v = scratch.v;
    uint8_t* fields = scratch.codes;
    if (codec.random) words_as<uint32_t, 0>(codec.key0, codec.key1, position + i, all, scratch.words);
    if (codec.random)
      for (int64_t j = 0; j < all; j++) fields[j] = uint8_t(rounded_field(v[j], scratch.words[j], true));
    else
      for (int64_t j = 0; j < all; j++) fields[j] = uint8_t(rounded_field(v[j], 0, false));
    for (int64_t j = 0; j < all; j++) most = fields[j] > most ? fields[j] : most;
    for (int64_t j = 0; j < all; j++) bits = (as_bits(v[j]) & ABS) > bits ? as_bits(v[j]) & ABS : bits;
    memcpy(codes + i, fields, size_t(count));
  }
  return bits >= 0x7f800000 ? 255 : most;
}

// Returns the scale to send. largest: the statistic of the block (codes_largest).
INLINE int32_t scale_of(const Codec& codec, int32_t largest) {
  if (codec.kind == grace::NATURAL) return largest < 255 && codec.second ? codec.second : largest;
  return as_bits(float_of(largest) * codec.factor);
}

template <bool RESIDUAL, Out OUT>
INLINE void codes_emit_to(const Codec& codec, const float* x, const float* residual, float* out, uint8_t* codes,
                          int32_t scale_bits, int64_t n, int64_t position) {
  Scratch scratch;
  const float* const v = scratch.v;
  uint8_t* const chosen = scratch.codes;
  const float scale = float_of(scale_bits), divisor = not_zero(scale);
  const int32_t first = codec.first, second = codec.second;
  const LookUp table(codec.table, codec.kind == grace::NEAREST ? codec.bits : -1);
  // Prefetch the next block, because the search for its largest magnitude reads it right after this one.
  const int64_t ahead = n > AHEAD && n <= 4 * AHEAD ? n : AHEAD;
  for (int64_t i = 0; i < n; i += SOME) {
    const int64_t count = least(SOME, n - i), all = load_all<RESIDUAL>(scratch.v, x, residual, i, count, ahead);
    uint8_t* const to = codes + i * codec.bits / 8;
    if (codec.random && codec.kind != grace::FP8 && codec.kind != grace::NATURAL)
      words_as<uint32_t, 0>(codec.key0, codec.key1, position + i, all, scratch.words);
    const uint32_t* const words = scratch.words;
    if (codec.kind == grace::BF16) {
      uint16_t* const wide = scratch.wide;
      for (int64_t j = 0; j < all; j++) {
        const int32_t bits = as_bits(v[j]), magnitude = bits & ABS;
        const int32_t step = !codec.random ? 0x7fff + ((magnitude >> 16) & 1)
                                           : (magnitude >= 0x7f7f0000 ? 0 : int32_t(words[j] & 0xffff));
        const int32_t special = magnitude | (magnitude > 0x7f800000 ? 0x400000 : 0);
        const int32_t rounded = magnitude < 0x7f800000 ? magnitude + step : special;
        wide[j] = uint16_t((rounded >> 16) | ((bits >> 16) & 0x8000));
      }
      memcpy(to, wide, size_t(count) * 2);
    } else if (codec.kind == grace::FP8) {
      const int32_t below = 128 - second, exponent = 126 + second + first, top = codec.top;
      uint16_t* const noise = scratch.wide;
      if (codec.random) noise_at(noise, codec.noise, position + i, count);
      for (int64_t j = 0; j < all; j++) {
        const float magnitude = float_of(as_bits(v[j] / divisor) & ABS);
        int32_t doublings = (as_bits(magnitude) >> 23) - below;
        doublings = doublings > 0 ? doublings : 0;
        float steps = magnitude * float_of((exponent - doublings) << 23);
        steps = steps < 64.0f ? steps : 0.0f;  // only infinity and NaN fail this test
        int32_t whole;
        if (codec.random) {
          whole = int32_t(steps);
          const float chance = (float(noise[j]) + 0.5f) * 0x1p-16f;
          whole += (steps - float(whole)) + chance >= 1.0f ? 1 : 0;
        } else {
          whole = as_bits(steps + 0x1.8p23f) - as_bits(0x1.8p23f);  // rounds ties to even
        }
        const int32_t code = whole + (doublings << first);
        chosen[j] = uint8_t((code < top ? code : top) + (v[j] < 0.0f ? 128 : 0));
      }
      memcpy(to, chosen, size_t(count));
    } else if (codec.kind == grace::NATURAL) {
      const int32_t top = codec.second ? codec.second : scale_bits < 255 ? scale_bits : 254;
      memcpy(chosen, to, size_t(count));
      for (int64_t j = 0; j < all; j++) {
        const int32_t code = chosen[j] - top + 127, low = code > 0 ? code : 0, high = low < 127 ? low : 127;
        chosen[j] = uint8_t((chosen[j] ? high : 0) | (v[j] < 0.0f ? 128 : 0));
      }
      memcpy(to, chosen, size_t(count));
    } else if (codec.kind == grace::DITHERED) {  // first: number of levels
      const float lowest = float_of((126 + first) << 23);
      const int32_t sign = 1 << (codec.bits - 1);
      for (int64_t j = 0; j < all; j++) {
        const float share = float_of(as_bits(v[j]) & ABS) / divisor;
        int32_t level = (as_bits(share) >> 23) + (first - 127);
        level = level > 0 ? level : 0;
        const float mantissa = float(as_bits(share) & 0x7fffff) * 0x1p-23f, small = share * lowest;
        const float chance = float(int32_t(words[j] >> 8)) * 0x1p-24f;
        level += chance < (level > 0 ? mantissa : small) ? 1 : 0;
        chosen[j] = uint8_t((level < first ? level : first) + (v[j] < 0.0f ? sign : 0));
      }
      pack_codes(chosen, count, codec.bits, to);
    } else {  // the nearest table entry: its code is the number of midpoints below the element
      const uint32_t* const buckets = codec.buckets;
      uint32_t* const found = scratch.words;
      alignas(64) uint32_t lower[SOME];
      for (int64_t j = 0; j < all; j++) {
        const int32_t bits = as_bits(v[j] / divisor), place = ((bits & ABS) >> 16) - grace::LOWEST;
        const int32_t inside = place < 0 ? 0 : place < grace::BUCKETS ? place : grace::BUCKETS - 1;
        found[j] = uint32_t(inside + (bits < 0 ? grace::BUCKETS : 0));
        lower[j] = uint32_t((bits ^ bits >> 31) & 0xffff);
      }
      _Pragma("GCC unroll 8")
      for (int64_t j = 0; j < all; j++) found[j] = buckets[found[j]];
      for (int64_t j = 0; j < all; j++) chosen[j] = uint8_t((found[j] + lower[j]) >> 16);
      pack_codes(chosen, count, codec.bits, to);
    }
    if constexpr (OUT != NONE) {
      float* const values = scratch.values;
      decode_to<false>(values, codec, table, to, scale_bits, count, scratch);
      int64_t j = 0;
      for (; j + W <= count; j += W) leave<OUT>(x, residual, out, i + j, load(v + j) - load(values + j));
      if (j < count)
        leave_some<OUT>(x, residual, out, i + j, load(v + j) - load_some(values + j, count - j), count - j);
    }
  }
}

int32_t codes_largest(const Codec* codec, const float* x, const float* residual, uint8_t* codes, int64_t n,
                      int64_t position) {
  return residual ? codes_largest_of<true>(*codec, x, residual, codes, n, position)
                  : codes_largest_of<false>(*codec, x, residual, codes, n, position);
}

int32_t codes_scale(const Codec* codec, int32_t largest) { return scale_of(*codec, largest); }

void codes_emit(const Codec* codec, const float* x, const float* residual, float* out, uint8_t* codes, int32_t scale,
                int64_t n, int64_t position) {
  KEPT_FORMS(codes_emit_to, *codec, x, residual, out, codes, scale, n, position);
}

}  // namespace
