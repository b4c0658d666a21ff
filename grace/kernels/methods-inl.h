// Loops that serve one method each: sketch, adaq, inceptionn, sidco and shared_int.
//
// As in floats-inl.h, the compiler vectorises plain loops over small arrays.
#pragma once

#include <cstdint>
#include <cstring>

#include "common-inl.h"
#include "floats-inl.h"
#include "kernels.h"
#include "levels-inl.h"
#include "vectors-inl.h"

namespace {

// ---- equally populated buckets: sketch ------------------------------------------------------------------------------

// Returns the key of a float. Keys are integers that compare like the floats. -0 equals 0, and NaN is the largest.
INLINE int32_t ordered(float x) {
  const int32_t bits = as_bits(x), magnitude = bits & ABS;
  const int32_t key = bits < 0 ? -magnitude : magnitude;
  return magnitude > 0x7f800000 ? ABS : key;
}

// v = x and keys = the keys of x, padded with zeros to a whole vector.
INLINE void ordered_some(const float* x, int64_t count, float* v, int32_t* keys) {
  const int64_t all = load_all<false>(v, x, nullptr, 0, count);
  for (int64_t j = 0; j < all; j++) keys[j] = ordered(v[j]);
}

INLINE uint32_t bin_of(int32_t key) { return uint32_t((key >> 16) + 32768); }

void order_keys(const float* x, int64_t n, int32_t* keys) {
  for (int64_t i = 0; i < n; i++) write(keys, i, ordered(read(x, i)));
}

void order_bins(const float* x, int64_t n, uint64_t* bins) {
  alignas(64) float v[SOME];
  alignas(64) int32_t keys[SOME];
  alignas(64) uint32_t where[SOME];
  for (int64_t i = 0; i < n; i += SOME) {
    const int64_t count = least(SOME, n - i);
    ordered_some(x + i, count, v, keys);
    for (int64_t j = 0; j < SOME; j++) where[j] = bin_of(keys[j]);
    _Pragma("GCC unroll 8")
    for (int64_t j = 0; j < count; j++) bins[where[j]] += (uint64_t{1} << 40) + (keys[j] & 0xffff);
  }
}

int64_t order_codes(const float* x, int64_t n, const uint16_t* places, int bits, uint8_t* codes, float* values,
                    int32_t* positions) {
  alignas(64) float v[SOME];
  alignas(64) int32_t keys[SOME], found[SOME];
  alignas(64) uint32_t where[SOME];
  alignas(64) uint8_t chosen[SOME];
  const I mixed = fill_int(256);
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i += SOME) {
    const int64_t count = least(SOME, n - i);
    ordered_some(x + i, count, v, keys);
    for (int64_t j = 0; j < SOME; j++) where[j] = bin_of(keys[j]);
    _Pragma("GCC unroll 8")
    for (int64_t j = 0; j < count; j++) found[j] = places[where[j]];
    for (int64_t j = count; j < SOME; j++) found[j] = 0;
    for (int64_t j = 0; j < SOME; j++) chosen[j] = uint8_t(found[j]);
    for (int64_t j = 0; j < count; j += W)
      kept += compact(at_least(read(reinterpret_cast<const I*>(found), j / W), mixed), load(v + j), int32_t(i + j),
                      values + kept, positions + kept);
    pack_codes(chosen, count, bits, codes + i / 8 * bits);
  }
  return kept;
}

void sketch_emit(const float* x, int64_t n, const int32_t* bounds, int step, int bits, uint8_t* codes, double* sums,
                 int64_t* members) {
  alignas(64) float v[SOME];
  alignas(64) int32_t keys[SOME], places[SOME];
  alignas(64) uint8_t chosen[SOME];
  for (int64_t i = 0; i < n; i += SOME) {
    const int64_t count = least(SOME, n - i);
    ordered_some(x + i, count, v, keys);
    for (int64_t j = 0; j < SOME; j++) places[j] = 0;
    for (int s = step; s; s >>= 1)  // a branch-free binary search
      for (int64_t j = 0; j < SOME; j++) places[j] += keys[j] > bounds[places[j] + s - 1] ? s : 0;
    for (int64_t j = 0; j < SOME; j++) chosen[j] = uint8_t(places[j]);
    for (int64_t j = 0; j < count; j++) sums[places[j]] += double(v[j]), members[places[j]]++;
    pack_codes(chosen, count, bits, codes + i / 8 * bits);
  }
}

void sketch_sum(const uint8_t* const* codes, const float* tables, int bits, int64_t workers, float* out, int64_t begin,
                int64_t end, bool stream) {
  uint8_t all[CHUNK];
  float found[CHUNK];
  mean_of_chunks(workers, out, begin, end, end - begin, CHUNK, stream,
                 [&](int64_t w, int64_t, int64_t i, int64_t count, float* sum) __attribute__((always_inline)) {
                   unpack_codes(codes[w] + i / 8 * bits, count, bits, all);
                   LookUp(tables + 256 * w, bits).of(all, count, w ? found : sum);
                   for (int64_t j = 0; w && j < count; j++) sum[j] += found[j];
                 });
}

// ---- signs: adaq ----------------------------------------------------------------------------------------------------

template <bool RESIDUAL, Out OUT>
INLINE int32_t adaq_count_to(const float* x, const float* residual, float* out, int64_t n, int64_t* counts) {
  const F zero = fill(0);
  I most = fill_int(0);
  int64_t above_it = 0, below_it = 0, i = 0;
  const auto look = [&](F v) __attribute__((always_inline)) {
    above_it += __builtin_popcount(bits_of(above(v, zero)));
    below_it += __builtin_popcount(bits_of(below_zero(v)));
    most = larger(most, magnitude_bits(v));
  };
  for (; i + W <= n; i += W) {
    prefetch<RESIDUAL>(x, residual, i + AHEAD);
    const F v = value<RESIDUAL>(x, residual, i);
    look(v);
    leave<OUT>(x, residual, out, i, v);
  }
  if (i < n) {
    const F v = value_some<RESIDUAL>(x, residual, i, n - i);
    look(v);
    leave_some<OUT>(x, residual, out, i, v, n - i);
  }
  counts[0] += above_it, counts[1] += below_it;
  return largest(most);
}

int32_t adaq_count(const float* x, const float* residual, float* out, int64_t n, int64_t* counts) {
  return KEPT_FORMS(adaq_count_to, x, residual, out, n, counts);
}

// ---- numbers of 32, 16, 8 or 0 bits: inceptionn ---------------------------------------------------------------------

using grace::Inceptionn;

void inceptionn_count(const Inceptionn* how, const float* x, int64_t n, int64_t* counts) {
  const I one = fill_int(how->one), two = fill_int(how->two), three = fill_int(how->three);
  int64_t reached[3] = {};
  for (int64_t i = 0; i < n; i += W) {
    const I m = magnitude_bits(i + W <= n ? load(x + i) : load_some(x + i, n - i));
    reached[0] += __builtin_popcount(bits_of(at_least(m, one)));
    reached[1] += __builtin_popcount(bits_of(at_least(m, two)));
    reached[2] += __builtin_popcount(bits_of(at_least(m, three)));
  }
  counts[0] = reached[2], counts[1] = reached[1] - reached[2], counts[2] = reached[0] - reached[1];
}

constexpr int64_t ROOM = SOME + W;  // SOME elements and padding

template <class T>
INLINE T* behind(T* p, int64_t count) {  // p + count, where p need not be aligned
  return reinterpret_cast<T*>(uintptr_t(p) + uintptr_t(count) * sizeof(T));
}

// The signed numbers of up to SOME elements, by tag. counts[tag]: how many numbers have this tag (1, 2 or 3).
struct Parts {
  alignas(64) float three[ROOM];
  alignas(64) uint16_t two[ROOM];
  alignas(64) uint8_t one[ROOM];
  int64_t counts[4];
};

#if defined(GRACE_AVX512)
INLINE void inceptionn_parts(const Inceptionn& how, const float* x, int64_t count, uint8_t* packed, Parts& parts) {
  const I bounds[3] = {fill_int(how.one), fill_int(how.two), fill_int(how.three)};
  const F wide = fill(0x1p15f), narrow = fill(how.steps);
  int64_t three = 0, two = 0, one = 0;
  for (int64_t j = 0; j < count; j += W) {
    __builtin_prefetch(x + j + AHEAD, 0, 2);
    const F v = j + W <= count ? load(x + j) : load_some(x + j, count - j);
    const I m = magnitude_bits(v);
    const auto code = [&](F factor, int shift, __m512i sign) __attribute__((always_inline)) {
      const __m512i whole = _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(m.v), factor.v));
      const __m512i signs = _mm512_srli_epi32(_mm512_castps_si512(v.v), shift);
      return _mm512_ternarylogic_epi32(whole, signs, sign, 0xf8);  // whole | (signs & sign)
    };
    const uint32_t some = bits_of(at_least(m, bounds[0])), more = bits_of(at_least(m, bounds[1]));
    const __m512i all = _mm512_maskz_compress_epi32(M(some & ~more), code(narrow, 24, _mm512_set1_epi32(128)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(parts.one + one), _mm512_cvtepi32_epi8(all));
    one += __builtin_popcount(some & ~more);
    uint32_t low = some & ~more;
    if (more) {
      const uint32_t large = bits_of(at_least(m, bounds[2]));
      const __m512i pairs = _mm512_maskz_compress_epi32(M(more & ~large), code(wide, 16, _mm512_set1_epi32(32768)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(parts.two + two), _mm512_cvtepi32_epi16(pairs));
      store(parts.three + three, {_mm512_maskz_compress_ps(M(large), v.v)});
      two += __builtin_popcount(more & ~large), three += __builtin_popcount(large);
      low |= large;
    }
    const uint32_t tags = _pdep_u32(low, 0x55555555) | _pdep_u32(more, 0xaaaaaaaa);
    memcpy(packed + j / 4, &tags, j + W <= count ? sizeof tags : size_t(count - j + 3) / 4);
  }
  parts.counts[1] = one, parts.counts[2] = two, parts.counts[3] = three;
}
#else
INLINE void inceptionn_parts(const Inceptionn& how, const float* x, int64_t count, uint8_t* packed, Parts& parts) {
  alignas(64) float v[SOME];
  alignas(64) uint32_t words[SOME], found[4][ROOM];
  alignas(64) uint8_t tags[SOME];
  const int64_t all = load_all<false>(v, x, nullptr, 0, count);
  for (int64_t j = 0; j < all; j++) {
    const int32_t m = as_bits(v[j]) & ABS;
    tags[j] = uint8_t((m >= how.one) + (m >= how.two) + (m >= how.three));
  }
  for (int64_t j = 0; j < all; j++) {
    const int32_t bits = as_bits(v[j]), m = bits & ABS, below = v[j] < 0.0f;
    const float small = float_of(m < how.three ? m : 0), tiny = float_of(m < how.two ? m : 0);
    const int32_t wide = int32_t(small * 0x1p15f) + (below << 15), narrow = int32_t(tiny * how.steps) + (below << 7);
    const int32_t large = -(m >= how.three), more = -(m >= how.two);  // branch-free, so that the loop vectorises
    words[j] = uint32_t((bits & large) | (wide & more & ~large) | (narrow & ~more));
  }
  uint64_t next = 0;  // for each tag, the number of elements so far, in 16 bits
  for (int64_t j = 0; j < all; j++) {
    const int shift = 16 * tags[j];
    found[tags[j]][next >> shift & 0xffff] = words[j];
    next += uint64_t{1} << shift;
  }
  const int64_t one = next >> 16 & 0xffff, two = next >> 32 & 0xffff, three = int64_t(next >> 48);
  memcpy(parts.three, found[3], size_t(three) * 4);
  for (int64_t j = 0; j < two; j++) parts.two[j] = uint16_t(found[2][j]);
  for (int64_t j = 0; j < one; j++) parts.one[j] = uint8_t(found[1][j]);
  parts.counts[1] = one, parts.counts[2] = two, parts.counts[3] = three;
  pack_codes(tags, count, 2, packed);
}
#endif

void inceptionn_emit(const Inceptionn* how, const float* x, int64_t n, uint8_t* packed, float* three, uint8_t* two,
                     uint8_t* one) {
  Parts parts;
  for (int64_t i = 0; i < n; i += SOME) {
    inceptionn_parts(*how, x + i, least(SOME, n - i), packed + i / 4, parts);
    const int64_t* counts = parts.counts;
    // An empty array may be null, which memcpy does not allow.
    if (counts[3]) memcpy(three, parts.three, size_t(counts[3]) * 4), three = behind(three, counts[3]);
    if (counts[2]) memcpy(two, parts.two, size_t(counts[2]) * 2), two += 2 * counts[2];
    if (counts[1]) memcpy(one, parts.one, size_t(counts[1])), one += counts[1];
  }
}

// counts[3] += the numbers of tags 3, 2 and 1 among `count` packed tags.
void tags_count(const uint8_t* packed, int64_t count, int64_t* counts) {
  int64_t lows = 0, highs = 0, both = 0;  // tags with the lower bit set, with the upper one, with both
  const auto add = [&](uint64_t word) __attribute__((always_inline)) {
    const uint64_t odd = 0x5555555555555555;
    lows += __builtin_popcountll(word & odd), highs += __builtin_popcountll(word & ~odd);
    both += __builtin_popcountll(word & word >> 1 & odd);
  };
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) add(read(reinterpret_cast<const uint64_t*>(packed + i / 4)));
  if (i < count) {
    uint64_t word = 0;
    memcpy(&word, packed + i / 4, size_t(count - i + 3) / 4);
    add(word & ((uint64_t{1} << 2 * (count - i)) - 1));
  }
  counts[0] += both, counts[1] += highs - both, counts[2] += lows - both;
}

// Decode: sum = the values of `count` elements. With ADD: sum += these values. Advances `from`.
#if defined(GRACE_AVX512)
template <bool ADD>
INLINE void inceptionn_add(const Inceptionn& how, grace::Streams& from, const uint8_t* packed, int64_t count, float* sum) {
  const float* three = from.three;
  const uint8_t *two = from.two, *one = from.one;
  const auto number = [](__m512i codes, int top, float unit) __attribute__((always_inline)) {
    const __m512i sign = _mm512_set1_epi32(1 << top), signs = _mm512_slli_epi32(codes, 31 - top);
    const __m512 some = _mm512_cvtepi32_ps(_mm512_andnot_si512(sign, codes));
    const __m512i bits = _mm512_castps_si512(_mm512_mul_ps(some, _mm512_set1_ps(unit)));
    const __m512i all = _mm512_ternarylogic_epi32(bits, signs, _mm512_set1_epi32(INT32_MIN), 0xf8);  // adds the sign bit
    return _mm512_castsi512_ps(all);
  };
  const auto lanes = [](int many) __attribute__((always_inline)) { return _bzhi_u32(0xffff, uint32_t(many)); };
  const float unit = 1.0f / how.steps;
  for (int64_t j = 0; j < count; j += W) {
    uint32_t word = 0;
    if (j + W <= count)
      word = read(reinterpret_cast<const uint32_t*>(packed + j / 4));
    else
      memcpy(&word, packed + j / 4, size_t(count - j + 3) / 4), word &= (1u << 2 * (count - j)) - 1;
    const uint32_t low = _pext_u32(word, 0x55555555), high = _pext_u32(word, 0xaaaaaaaa), ones = low & ~high;
    // Loads are masked, so that nothing beyond the arrays is read.
    const int many = __builtin_popcount(ones);
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(M(lanes(many)), one));
    F all = {_mm512_maskz_expand_ps(M(ones), number(bytes, 7, unit))};
    one += many;
    if (high) {
      const uint32_t threes = low & high, twos = high & ~low;
      const int large = __builtin_popcount(threes), some = __builtin_popcount(twos);
      const __m512i pairs = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(M(lanes(some)), two));
      all.v = _mm512_mask_expand_ps(all.v, M(twos), number(pairs, 15, 0x1p-15f));
      all.v = _mm512_mask_expand_ps(all.v, M(threes), load_some(three, large).v);
      two += 2 * some, three = behind(three, large);
    }
    store(sum + j, ADD ? load(sum + j) + all : all);
  }
  from = {three, two, one};
}
#else
template <bool ADD>
INLINE void inceptionn_add(const Inceptionn& how, grace::Streams& from, const uint8_t* packed, int64_t count, float* sum) {
  alignas(64) float parts[4][ROOM];
  int64_t counts[3] = {};
  tags_count(packed, count, counts);
  memset(parts[0], 0, sizeof parts[0]);
  memcpy(parts[3], from.three, size_t(counts[0]) * 4), from.three = behind(from.three, counts[0]);
  const float unit = 1.0f / how.steps;
  for (int64_t j = 0; j < counts[1]; j++) {
    const int32_t code = read(reinterpret_cast<const uint16_t*>(from.two), j);
    parts[2][j] = float_of(as_bits(float(code & 0x7fff) * 0x1p-15f) | (code & 0x8000) << 16);
  }
  for (int64_t j = 0; j < counts[2]; j++) {
    const int32_t code = from.one[j];
    parts[1][j] = float_of(as_bits(float(code & 0x7f) * unit) | (code & 0x80) << 24);
  }
  from.two += 2 * counts[1], from.one += counts[2];
  alignas(64) uint8_t tags[SOME];
  unpack_codes(packed, count, 2, tags);
  uint64_t next = 0;  // for each tag, the number of elements so far, in 16 bits
  for (int64_t j = 0; j < count; j++) {
    const int shift = 16 * tags[j];
    const float value = parts[tags[j]][next >> shift & 0xffff];
    sum[j] = ADD ? sum[j] + value : value;
    next += uint64_t{1} << shift;
  }
}
#endif

void inceptionn_sum(const Inceptionn* how, const uint8_t* const* packed, grace::Streams* from, int64_t workers, float* out,
                    int64_t begin, int64_t end, bool stream) {
  mean_of_chunks(workers, out, begin, end, end - begin, SOME, stream,
                 [&](int64_t w, int64_t, int64_t i, int64_t count, float* sum) __attribute__((always_inline)) {
                   w ? inceptionn_add<true>(*how, from[w], packed[w] + i / 4, count, sum)
                     : inceptionn_add<false>(*how, from[w], packed[w] + i / 4, count, sum);
                 });
}

// ---- tails: sidco ---------------------------------------------------------------------------------------------------

grace::Excess excess(const float* x, int64_t n, float bound) {
  const F zero = fill(0), bounds = fill(bound);
  D sum = zeros(), squares = zeros();
  int64_t count = 0, i = 0;
  const auto add = [&](F v) __attribute__((always_inline)) {
    const F over = higher(magnitude(v) - bounds, zero);
    count += __builtin_popcount(bits_of(above(over, zero)));
    add_finite(sum, squares, over);
  };
  for (; i + W <= n; i += W) add(load(x + i));
  if (i < n) add(load_some(x + i, n - i));
  return {count, total_finite(sum), total_squares(squares)};
}

// ---- integers summed on the wire: shared_int ------------------------------------------------------------------------

// Encodes a part of one block. first: the position of x[0] in the tensor.
template <bool WIDE>
INLINE void shared_int_emit_as(const float* x, int64_t n, float scale, float top, const Noise& noise, int64_t first,
                               uint8_t* codes) {
  constexpr int64_t BYTES = WIDE ? 4 : 1;
  const F divisor = fill(not_zero(scale)), tops = fill(top), one = fill(1);
  alignas(64) uint16_t table[SOME] = {};
  alignas(64) uint8_t found[SOME * BYTES];
  for (int64_t i = 0; i < n; i += SOME) {
    const int64_t count = least(SOME, n - i);
    noise_at(table, noise, noise.start + first + i, count);
    for (int64_t j = 0; j < count; j += W) {
      const F v = j + W <= count ? load(x + i + j) : load_some(x + i + j, count - j);
      const F steps = v / divisor * tops;
      const I lower = down(steps);
      const I code = raised(not_below_zero((steps - to_float(lower)) + uniform(table + j, 0) - one), lower, 1);
      if constexpr (WIDE)
        write(reinterpret_cast<I*>(found), j / W, code);
      else
        to_codes<8>(found + j, code);
    }
    memcpy(codes + i * BYTES, found, size_t(count * BYTES));
  }
}

void shared_int_emit(const float* x, int64_t n, float scale, float top, const Noise* noise, int64_t first, uint8_t* codes,
                     bool wide) {
  wide ? shared_int_emit_as<true>(x, n, scale, top, *noise, first, codes)
       : shared_int_emit_as<false>(x, n, scale, top, *noise, first, codes);
}

template <bool WIDE, bool TAKEN, bool STREAM>
INLINE void shared_int_values_as(const float* x, const uint8_t* codes, int64_t n, float scale, int64_t steps, float* out) {
  const Divisor divisor(steps);
  const F scales = fill(scale);
  const auto value = [&](const uint8_t* from) __attribute__((always_inline)) {
    const I code = WIDE ? read(reinterpret_cast<const I*>(from)) : from_bytes(from);
    return divisor.divided(to_float(code)) * scales;
  };
  constexpr int64_t BYTES = WIDE ? 4 : 1;
  int64_t i = 0;
  for (; i + W <= n; i += W) {
    const F v = value(codes + i * BYTES);
    put<STREAM>(out + i, TAKEN ? load(x + i) - v : v);
  }
  if (const int64_t size = n - i; size > 0) {
    uint8_t some[W * BYTES] = {};
    memcpy(some, codes + i * BYTES, size_t(size * BYTES));
    const F v = value(some);
    store_some(out + i, TAKEN ? load_some(x + i, size) - v : v, size);
  }
  if (STREAM) fence();
}

void shared_int_values(const float* x, const uint8_t* codes, int64_t n, float scale, int64_t steps, float* out, bool wide,
                       bool stream) {
#define AS(WIDE)                                                                     \
  x        ? shared_int_values_as<WIDE, true, false>(x, codes, n, scale, steps, out) \
  : stream ? shared_int_values_as<WIDE, false, true>(x, codes, n, scale, steps, out) \
           : shared_int_values_as<WIDE, false, false>(x, codes, n, scale, steps, out)
  wide ? (AS(true)) : (AS(false));
#undef AS
}

}  // namespace
