// Vectors of sixteen floats, for AVX-512, AVX2, or the compiler's generic vectors (NEON, SSE2).
//
// The width is the same on all instruction sets, so each kernel is written once, and sums have the same order
// everywhere. Everything is in an unnamed namespace, because the linker must not merge code of different instruction
// sets.
//
// F, I: sixteen floats or int32; D: sixteen partial sums in double precision; M: a mask of sixteen elements. NAME_some
// functions load or store the first `count` elements.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(GRACE_AVX512) || defined(GRACE_AVX2)
// GCC before 13 warns about its own _mm512_undefined_ps(), which many intrinsics use (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#define INLINE static inline __attribute__((always_inline))
#define OUTLINE static __attribute__((noinline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#define EACH_OF(N) _Pragma("GCC unroll 16") for (int64_t k = 0; k < N; k++)

namespace {

constexpr int64_t W = 16;
constexpr int32_t ABS = 0x7fffffff;

template <class T>
INLINE T read(const T* p, int64_t i = 0) {
  T value;
  memcpy(&value, reinterpret_cast<const char*>(p) + i * int64_t(sizeof(T)), sizeof(T));
  return value;
}

template <class T>
INLINE void write(T* p, int64_t i, T value) {
  memcpy(reinterpret_cast<char*>(p) + i * int64_t(sizeof(T)), &value, sizeof(T));
}

#if defined(GRACE_AVX512)

constexpr int TILE = 4;            // vectors that are averaged together
constexpr int64_t REGISTERS = 16;  // vectors of sums or factors that fit into registers
struct F { __m512 v; };
struct I { __m512i v; };
struct D { __m512d a, b; };
using M = __mmask16;

INLINE F fill(float x) { return {_mm512_set1_ps(x)}; }
INLINE I fill_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE M first(int64_t count) { return M((1u << count) - 1); }
INLINE F load_some(const float* p, int64_t count) { return {_mm512_maskz_loadu_ps(first(count), p)}; }
INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
INLINE void store_some(float* p, F x, int64_t count) { _mm512_mask_storeu_ps(p, first(count), x.v); }
INLINE void stream(float* p, F x) {
  if ((reinterpret_cast<uintptr_t>(p) & 63) == 0) return _mm512_stream_ps(p, x.v);
  _mm_stream_ps(p, _mm512_castps512_ps128(x.v));
  _mm_stream_ps(p + 4, _mm512_extractf32x4_ps(x.v, 1));
  _mm_stream_ps(p + 8, _mm512_extractf32x4_ps(x.v, 2));
  _mm_stream_ps(p + 12, _mm512_extractf32x4_ps(x.v, 3));
}
INLINE void fence() { _mm_sfence(); }
INLINE F operator+(F x, F y) { return {_mm512_add_ps(x.v, y.v)}; }
INLINE F operator-(F x, F y) { return {_mm512_sub_ps(x.v, y.v)}; }
INLINE F operator*(F x, F y) { return {_mm512_mul_ps(x.v, y.v)}; }
INLINE F operator/(F x, F y) { return {_mm512_div_ps(x.v, y.v)}; }
INLINE M not_below_zero(F x) { return _mm512_cmp_ps_mask(x.v, _mm512_setzero_ps(), _CMP_GE_OQ); }
INLINE M below_zero(F x) { return _mm512_cmp_ps_mask(x.v, _mm512_setzero_ps(), _CMP_LT_OQ); }
INLINE M at_least(I x, I y) { return _mm512_cmpge_epi32_mask(x.v, y.v); }
INLINE uint32_t bits_of(M m) { return m; }
INLINE M mask_of(uint32_t bits) { return M(bits); }
INLINE F pick(M m, F yes, F no) { return {_mm512_mask_blend_ps(m, no.v, yes.v)}; }
INLINE F clear(M m, F x) { return {_mm512_maskz_mov_ps(_knot_mask16(m), x.v)}; }
INLINE I magnitude_bits(F x) { return {_mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(ABS))}; }
INLINE F lower(F x, F y) { return {_mm512_min_ps(x.v, y.v)}; }
INLINE F higher(F x, F y) { return {_mm512_max_ps(x.v, y.v)}; }
INLINE I larger(I x, I y) { return {_mm512_max_epi32(x.v, y.v)}; }
INLINE I smaller(I x, I y) { return {_mm512_min_epi32(x.v, y.v)}; }
INLINE int32_t largest(I x) { return _mm512_reduce_max_epi32(x.v); }
INLINE D zeros() { return {_mm512_setzero_pd(), _mm512_setzero_pd()}; }
INLINE void add(D& sum, F x) {
  sum.a = _mm512_add_pd(sum.a, _mm512_cvtps_pd(_mm512_castps512_ps256(x.v)));
  sum.b = _mm512_add_pd(sum.b, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1)));
}
INLINE void add_magnitude(D& sum, F x) { add(sum, {_mm512_castsi512_ps(magnitude_bits(x).v)}); }
INLINE void add_square(D& sum, F x) {
  const __m512d a = _mm512_cvtps_pd(_mm512_castps512_ps256(x.v)), b = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.v, 1));
  sum.a = _mm512_add_pd(sum.a, _mm512_mul_pd(a, a));
  sum.b = _mm512_add_pd(sum.b, _mm512_mul_pd(b, b));
}
INLINE double total(D sum) {  // adds halves pairwise, in the same order on all instruction sets
  const __m512d h = _mm512_add_pd(sum.a, sum.b);
  const __m256d q = _mm256_add_pd(_mm512_castpd512_pd256(h), _mm512_extractf64x4_pd(h, 1));
  const __m128d e = _mm_add_pd(_mm256_castpd256_pd128(q), _mm256_extractf128_pd(q, 1));
  return _mm_cvtsd_f64(e) + _mm_cvtsd_f64(_mm_unpackhi_pd(e, e));
}
INLINE float total(F x) {  // in the same order as for D
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 e = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(e, _mm_movehdup_ps(e)));
}
// Converts non-negative finite floats to doubles, times 2^-896. This factor makes the bits of the double a shifted copy
// of the float's bits, so a shift replaces the slower conversion. even: elements 2 i. odd: elements 2 i + 1.
INLINE void put_apart(F x, __m512d& even, __m512d& odd) {
  const __m512i bits = _mm512_castps_si512(x.v);
  even = _mm512_castsi512_pd(_mm512_srli_epi64(_mm512_slli_epi64(bits, 32), 3));
  odd = _mm512_castsi512_pd(_mm512_srli_epi64(_mm512_and_si512(bits, _mm512_set1_epi64(INT64_MIN >> 31)), 3));
}
INLINE D in_order(D sum) {
  const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), high = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  return {_mm512_permutex2var_pd(sum.a, low, sum.b), _mm512_permutex2var_pd(sum.a, high, sum.b)};
}
INLINE double total_finite(D sum) { return total(in_order(sum)) * 0x1p896; }
// sum += x * 2^-896 and squares += x * x, with elements in the order of put_apart. total_finite undoes the factor and
// the order, total_squares the order. The products are exact, so fused additions give the same bits.
INLINE void add_finite(D& sum, D& squares, F x) {
  const __m512d unit = _mm512_set1_pd(0x1p896);
  __m512d even, odd;
  put_apart(x, even, odd);
  sum.a = _mm512_add_pd(sum.a, even), sum.b = _mm512_add_pd(sum.b, odd);
  even = _mm512_mul_pd(even, unit), odd = _mm512_mul_pd(odd, unit);
  squares.a = _mm512_fmadd_pd(even, even, squares.a), squares.b = _mm512_fmadd_pd(odd, odd, squares.b);
}
INLINE double total_squares(D squares) { return total(in_order(squares)); }
INLINE I nearest(F x) { return {_mm512_cvt_roundps_epi32(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
INLINE I down(F x) { return {_mm512_cvt_roundps_epi32(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
INLINE F to_float(I x) { return {_mm512_cvtepi32_ps(x.v)}; }
INLINE __m128i to_bytes(I x) { return _mm512_cvtepi32_epi8(x.v); }
INLINE I from_bytes(const uint8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
INLINE I from_octets(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// Loads sixteen codes of 4, 3 or 2 bits. Their higher bits are undefined.
template <int BITS>
INLINE I from_codes(const uint8_t* p) {
  const int32_t* words = reinterpret_cast<const int32_t*>(p);
  __m512i all = _mm512_set1_epi32(read(words));
  if constexpr (BITS == 3) {
    const __m512i shifts = _mm512_setr_epi32(0, 3, 6, 9, 12, 15, 18, 21, 8, 11, 14, 17, 20, 23, 26, 29);
    const int32_t last = read(reinterpret_cast<const int32_t*>(p + 2));
    all = _mm512_srlv_epi32(_mm512_mask_set1_epi32(all, 0xff00, last), shifts);
  } else if constexpr (BITS == 4) {
    const __m512i shifts = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
    all = _mm512_srlv_epi32(_mm512_mask_set1_epi32(all, 0xff00, read(words, 1)), shifts);
  } else {
    const __m512i shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    all = _mm512_srlv_epi32(all, shifts);
  }
  return {all};
}
// Returns table[code] for each code; the lowest four bits of a code are the index.
INLINE F entries(F table, I codes) { return {_mm512_permutexvar_ps(codes.v, table.v)}; }
INLINE M above(F x, F y) { return _mm512_cmp_ps_mask(x.v, y.v, _CMP_GT_OQ); }
INLINE I raised(M m, I x, int32_t by) { return {_mm512_mask_add_epi32(x.v, m, x.v, _mm512_set1_epi32(by))}; }
template <int HALF>
INLINE F swapped(F x) {  // swaps elements i and i ^ HALF
  if constexpr (HALF == 1) return {_mm512_permute_ps(x.v, 0xb1)};
  if constexpr (HALF == 2) return {_mm512_permute_ps(x.v, 0x4e)};
  if constexpr (HALF == 4) return {_mm512_shuffle_f32x4(x.v, x.v, 0xb1)};
  return {_mm512_shuffle_f32x4(x.v, x.v, 0x4e)};
}
INLINE F flipped(F x, const int32_t* words, int shift) {  // negates elements whose word has bit 31 - shift set
  const __m512i signs = _mm512_sll_epi32(_mm512_loadu_si512(words), _mm_cvtsi32_si128(shift));
  const __m512i top = _mm512_set1_epi32(INT32_MIN);
  return {_mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(x.v), signs, top, 0x78))};  // x ^ (s & t)
}
INLINE F uniform(const uint16_t* table, uint16_t offset) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(table));
  const __m256i noise = _mm256_add_epi16(words, _mm256_set1_epi16(int16_t(offset)));
  const __m512 x = _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(noise));
  return {_mm512_fmadd_ps(x, _mm512_set1_ps(0x1p-16f), _mm512_set1_ps(0x1p-17f))};  // exact
}
INLINE F fused(F x, F y, F z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }           // x * y + z
INLINE I operator+(I x, I y) { return {_mm512_add_epi32(x.v, y.v)}; }
INLINE I operator*(I x, I y) { return {_mm512_mullo_epi32(x.v, y.v)}; }
INLINE I operator^(I x, I y) { return {_mm512_xor_si512(x.v, y.v)}; }
template <int BY>
INLINE I folded(I x) { return {_mm512_xor_si512(x.v, _mm512_srli_epi32(x.v, BY))}; }  // x ^ x >> BY
INLINE uint32_t top_bits(I x) { return _mm512_movepi32_mask(x.v); }
INLINE F negated(uint32_t bits, F x) { return {_mm512_mask_xor_ps(x.v, M(bits), x.v, _mm512_set1_ps(-0.0f))}; }
// Writes the elements that the mask selects, and their positions. Returns their number. Both arrays need room for 16.
INLINE int64_t compact(M m, F x, int32_t position, float* values, int32_t* positions) {
  const __m512i count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  _mm512_storeu_ps(values, _mm512_maskz_compress_ps(m, x.v));
  _mm512_storeu_si512(positions, _mm512_maskz_compress_epi32(m, _mm512_add_epi32(count, _mm512_set1_epi32(position))));
  return __builtin_popcount(m);
}

#elif defined(GRACE_AVX2)

constexpr int TILE = 2;
constexpr int64_t REGISTERS = 4;
struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct D { __m256d a, b, c, d; };
struct M { __m256 a, b; };

INLINE F fill(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE I fill_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
INLINE F load_some(const float* p, int64_t count) {
  float all[16] = {};
  memcpy(all, p, size_t(count) * 4);
  return load(all);
}
INLINE void store_some(float* p, F x, int64_t count) {
  float all[16];
  store(all, x);
  memcpy(p, all, size_t(count) * 4);
}
INLINE void stream(float* p, F x) {
  if ((reinterpret_cast<uintptr_t>(p) & 31) == 0) return _mm256_stream_ps(p, x.a), _mm256_stream_ps(p + 8, x.b);
  _mm_stream_ps(p, _mm256_castps256_ps128(x.a));
  _mm_stream_ps(p + 4, _mm256_extractf128_ps(x.a, 1));
  _mm_stream_ps(p + 8, _mm256_castps256_ps128(x.b));
  _mm_stream_ps(p + 12, _mm256_extractf128_ps(x.b, 1));
}
INLINE void fence() { _mm_sfence(); }
INLINE F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE M not_below_zero(F x) {
  const __m256 zero = _mm256_setzero_ps();
  return {_mm256_cmp_ps(x.a, zero, _CMP_GE_OQ), _mm256_cmp_ps(x.b, zero, _CMP_GE_OQ)};
}
INLINE M below_zero(F x) {
  const __m256 zero = _mm256_setzero_ps();
  return {_mm256_cmp_ps(x.a, zero, _CMP_LT_OQ), _mm256_cmp_ps(x.b, zero, _CMP_LT_OQ)};
}
INLINE M at_least(I x, I y) {
  const __m256i ones = _mm256_set1_epi32(-1);
  return {_mm256_castsi256_ps(_mm256_xor_si256(_mm256_cmpgt_epi32(y.a, x.a), ones)),
          _mm256_castsi256_ps(_mm256_xor_si256(_mm256_cmpgt_epi32(y.b, x.b), ones))};
}
INLINE uint32_t bits_of(M m) { return uint32_t(_mm256_movemask_ps(m.a) | (_mm256_movemask_ps(m.b) << 8)); }
INLINE M mask_of(uint32_t bits) {
  const __m256i one = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), two = _mm256_slli_epi32(one, 8);
  const __m256i all = _mm256_set1_epi32(int32_t(bits));
  return {_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, one), one)),
          _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all, two), two))};
}
INLINE F pick(M m, F yes, F no) { return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)}; }
INLINE F clear(M m, F x) { return {_mm256_andnot_ps(m.a, x.a), _mm256_andnot_ps(m.b, x.b)}; }
INLINE I magnitude_bits(F x) {
  const __m256i mask = _mm256_set1_epi32(ABS);
  return {_mm256_and_si256(_mm256_castps_si256(x.a), mask), _mm256_and_si256(_mm256_castps_si256(x.b), mask)};
}
INLINE F lower(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE F higher(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE I larger(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
INLINE I smaller(I x, I y) { return {_mm256_min_epi32(x.a, y.a), _mm256_min_epi32(x.b, y.b)}; }
INLINE int32_t largest(I x) {
  const __m256i h = _mm256_max_epi32(x.a, x.b);
  __m128i q = _mm_max_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
INLINE D zeros() { return {_mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd(), _mm256_setzero_pd()}; }
INLINE void add(D& sum, F x) {
  sum.a = _mm256_add_pd(sum.a, _mm256_cvtps_pd(_mm256_castps256_ps128(x.a)));
  sum.b = _mm256_add_pd(sum.b, _mm256_cvtps_pd(_mm256_extractf128_ps(x.a, 1)));
  sum.c = _mm256_add_pd(sum.c, _mm256_cvtps_pd(_mm256_castps256_ps128(x.b)));
  sum.d = _mm256_add_pd(sum.d, _mm256_cvtps_pd(_mm256_extractf128_ps(x.b, 1)));
}
INLINE void add_magnitude(D& sum, F x) {
  const I m = magnitude_bits(x);
  add(sum, {_mm256_castsi256_ps(m.a), _mm256_castsi256_ps(m.b)});
}
INLINE void add_square(D& sum, F x) {
  const __m256d a = _mm256_cvtps_pd(_mm256_castps256_ps128(x.a)), b = _mm256_cvtps_pd(_mm256_extractf128_ps(x.a, 1));
  const __m256d c = _mm256_cvtps_pd(_mm256_castps256_ps128(x.b)), d = _mm256_cvtps_pd(_mm256_extractf128_ps(x.b, 1));
  sum.a = _mm256_add_pd(sum.a, _mm256_mul_pd(a, a));
  sum.b = _mm256_add_pd(sum.b, _mm256_mul_pd(b, b));
  sum.c = _mm256_add_pd(sum.c, _mm256_mul_pd(c, c));
  sum.d = _mm256_add_pd(sum.d, _mm256_mul_pd(d, d));
}
INLINE double total(D sum) {
  const __m256d q = _mm256_add_pd(_mm256_add_pd(sum.a, sum.c), _mm256_add_pd(sum.b, sum.d));
  const __m128d e = _mm_add_pd(_mm256_castpd256_pd128(q), _mm256_extractf128_pd(q, 1));
  return _mm_cvtsd_f64(e) + _mm_cvtsd_f64(_mm_unpackhi_pd(e, e));
}
INLINE float total(F x) {
  const __m256 h = _mm256_add_ps(x.a, x.b);
  const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  const __m128 e = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(e, _mm_movehdup_ps(e)));
}
INLINE I nearest(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE I down(F x) { return {_mm256_cvtps_epi32(_mm256_floor_ps(x.a)), _mm256_cvtps_epi32(_mm256_floor_ps(x.b))}; }
INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE __m128i to_bytes(I x) {  // the lowest byte of each element
  const __m256i low = _mm256_set1_epi32(0xff);
  const __m256i pairs = _mm256_packs_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
  const __m256i order = _mm256_permute4x64_epi64(pairs, 0xd8);
  return _mm_packus_epi16(_mm256_castsi256_si128(order), _mm256_extracti128_si256(order, 1));
}
INLINE I from_bytes(const uint8_t* p) {
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi8_epi32(all), _mm256_cvtepi8_epi32(_mm_srli_si128(all, 8))};
}
INLINE I from_octets(const uint8_t* p) {
  const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(all), _mm256_cvtepu8_epi32(_mm_srli_si128(all, 8))};
}
template <int BITS>
INLINE I from_codes(const uint8_t* p) {
  if constexpr (BITS == 4) {
    const uint64_t word = read(reinterpret_cast<const uint64_t*>(p));
    const __m256i shifts = _mm256_setr_epi32(28, 24, 20, 16, 12, 8, 4, 0);
    return {_mm256_srai_epi32(_mm256_sllv_epi32(_mm256_set1_epi32(int32_t(word)), shifts), 28),
            _mm256_srai_epi32(_mm256_sllv_epi32(_mm256_set1_epi32(int32_t(word >> 32)), shifts), 28)};
  } else if constexpr (BITS == 3) {
    const int32_t first = read(reinterpret_cast<const int32_t*>(p)), last = read(reinterpret_cast<const int32_t*>(p + 2));
    const __m256i low = _mm256_setr_epi32(29, 26, 23, 20, 17, 14, 11, 8);
    const __m256i high = _mm256_setr_epi32(21, 18, 15, 12, 9, 6, 3, 0);
    return {_mm256_srai_epi32(_mm256_sllv_epi32(_mm256_set1_epi32(first), low), 29),
            _mm256_srai_epi32(_mm256_sllv_epi32(_mm256_set1_epi32(last), high), 29)};
  } else {
    const __m256i word = _mm256_set1_epi32(read(reinterpret_cast<const int32_t*>(p)));
    const __m256i low = _mm256_setr_epi32(30, 28, 26, 24, 22, 20, 18, 16);
    const __m256i high = _mm256_setr_epi32(14, 12, 10, 8, 6, 4, 2, 0);
    return {_mm256_srai_epi32(_mm256_sllv_epi32(word, low), 30), _mm256_srai_epi32(_mm256_sllv_epi32(word, high), 30)};
  }
}
INLINE F entries(F table, I codes) {
  const auto half = [&](__m256i each) __attribute__((always_inline)) {
    const __m256 low = _mm256_permutevar8x32_ps(table.a, each), high = _mm256_permutevar8x32_ps(table.b, each);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(each, 28)));
  };
  return {half(codes.a), half(codes.b)};
}
INLINE M above(F x, F y) { return {_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ)}; }
INLINE I raised(M m, I x, int32_t by) {
  const __m256i all = _mm256_set1_epi32(by);
  return {_mm256_add_epi32(x.a, _mm256_and_si256(_mm256_castps_si256(m.a), all)),
          _mm256_add_epi32(x.b, _mm256_and_si256(_mm256_castps_si256(m.b), all))};
}
template <int HALF>
INLINE F swapped(F x) {
  if constexpr (HALF == 1) return {_mm256_permute_ps(x.a, 0xb1), _mm256_permute_ps(x.b, 0xb1)};
  if constexpr (HALF == 2) return {_mm256_permute_ps(x.a, 0x4e), _mm256_permute_ps(x.b, 0x4e)};
  if constexpr (HALF == 4) return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
  return {x.b, x.a};
}
INLINE F flipped(F x, const int32_t* words, int shift) {
  const __m256i top = _mm256_set1_epi32(INT32_MIN);
  const auto half = [&](__m256 each, const int32_t* p) __attribute__((always_inline)) {
    const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i signs = _mm256_and_si256(_mm256_sll_epi32(all, _mm_cvtsi32_si128(shift)), top);
    return _mm256_xor_ps(each, _mm256_castsi256_ps(signs));
  };
  return {half(x.a, words), half(x.b, words + 8)};
}
INLINE F uniform(const uint16_t* table, uint16_t offset) {
  const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(table));
  const __m256i noise = _mm256_add_epi16(words, _mm256_set1_epi16(int16_t(offset)));
  const __m256 a = _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(noise)));
  const __m256 b = _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(noise, 1)));
  const __m256 step = _mm256_set1_ps(0x1p-16f), half = _mm256_set1_ps(0x1p-17f);
  return {_mm256_fmadd_ps(a, step, half), _mm256_fmadd_ps(b, step, half)};  // exact
}
INLINE F fused(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
INLINE I operator+(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE I operator*(I x, I y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
INLINE I operator^(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int BY>
INLINE I folded(I x) { return x ^ I{_mm256_srli_epi32(x.a, BY), _mm256_srli_epi32(x.b, BY)}; }
INLINE uint32_t top_bits(I x) { return bits_of({_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}); }
INLINE F negated(uint32_t bits, F x) {
  const __m256i all = _mm256_set1_epi32(int32_t(bits)), top = _mm256_set1_epi32(INT32_MIN);
  const auto half = [&](__m256 each, __m256i shifts) __attribute__((always_inline)) {
    return _mm256_xor_ps(each, _mm256_castsi256_ps(_mm256_and_si256(_mm256_sllv_epi32(all, shifts), top)));
  };
  return {half(x.a, _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24)),
          half(x.b, _mm256_setr_epi32(23, 22, 21, 20, 19, 18, 17, 16))};
}

#else  // the compiler's vectors: SSE2 on x86-64, NEON on AArch64

constexpr int TILE = 1;
constexpr int64_t REGISTERS = 4;
typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef uint32_t u4 __attribute__((vector_size(16)));
typedef double d4 __attribute__((vector_size(32)));
struct F { f4 v[4]; };
struct I { i4 v[4]; };
struct D { double v[16]; };
using M = I;

#define EACH for (int i = 0; i < 4; i++)
INLINE F fill(float x) { F r; EACH r.v[i] = f4{x, x, x, x}; return r; }
INLINE I fill_int(int32_t x) { I r; EACH r.v[i] = i4{x, x, x, x}; return r; }
INLINE F load(const float* p) { F r; memcpy(&r, p, 64); return r; }
INLINE void store(float* p, F x) { memcpy(p, &x, 64); }
INLINE F load_some(const float* p, int64_t count) {
  float all[16] = {};
  memcpy(all, p, size_t(count) * 4);
  return load(all);
}
INLINE void store_some(float* p, F x, int64_t count) { memcpy(p, &x, size_t(count) * 4); }
INLINE void stream(float* p, F x) { store(p, x); }
INLINE void fence() {}
INLINE F operator+(F x, F y) { EACH x.v[i] += y.v[i]; return x; }
INLINE F operator-(F x, F y) { EACH x.v[i] -= y.v[i]; return x; }
INLINE F operator*(F x, F y) { EACH x.v[i] *= y.v[i]; return x; }
INLINE F operator/(F x, F y) { EACH x.v[i] /= y.v[i]; return x; }
INLINE M not_below_zero(F x) { M r; EACH r.v[i] = (i4)(x.v[i] >= f4{}); return r; }
INLINE M below_zero(F x) { M r; EACH r.v[i] = (i4)(x.v[i] < f4{}); return r; }
INLINE M at_least(I x, I y) { M r; EACH r.v[i] = (i4)(x.v[i] >= y.v[i]); return r; }
INLINE uint32_t bits_of(M m) {
  i4 sum = {};
  EACH sum |= m.v[i] & (i4{1, 2, 4, 8} << (4 * i));
  return uint32_t(sum[0] | sum[1] | sum[2] | sum[3]);
}
INLINE M mask_of(uint32_t bits) {
  M r;
  const int32_t b = int32_t(bits);
  EACH {
    const i4 one = i4{1, 2, 4, 8} << (4 * i);
    r.v[i] = (i4)((i4{b, b, b, b} & one) == one);
  }
  return r;
}
INLINE F pick(M m, F yes, F no) {
  EACH yes.v[i] = (f4)((m.v[i] & (i4)yes.v[i]) | (~m.v[i] & (i4)no.v[i]));
  return yes;
}
INLINE F clear(M m, F x) { EACH x.v[i] = (f4)(~m.v[i] & (i4)x.v[i]); return x; }
INLINE I magnitude_bits(F x) { I r; EACH r.v[i] = (i4)x.v[i] & ABS; return r; }
INLINE F lower(F x, F y) { EACH x.v[i] = x.v[i] < y.v[i] ? x.v[i] : y.v[i]; return x; }
INLINE F higher(F x, F y) { EACH x.v[i] = x.v[i] > y.v[i] ? x.v[i] : y.v[i]; return x; }
INLINE I larger(I x, I y) { EACH { const i4 m = x.v[i] > y.v[i]; x.v[i] = (m & x.v[i]) | (~m & y.v[i]); } return x; }
INLINE I smaller(I x, I y) { EACH { const i4 m = x.v[i] < y.v[i]; x.v[i] = (m & x.v[i]) | (~m & y.v[i]); } return x; }
INLINE int32_t largest(I x) {
  int32_t r = INT32_MIN;
  EACH for (int j = 0; j < 4; j++) r = x.v[i][j] > r ? x.v[i][j] : r;
  return r;
}
INLINE D zeros() { return {}; }
INLINE void add(D& sum, F x) {
  float m[16];
  memcpy(m, &x, 64);
  for (int i = 0; i < 16; i++) sum.v[i] += double(m[i]);
}
INLINE void add_magnitude(D& sum, F x) {
  EACH x.v[i] = (f4)((i4)x.v[i] & ABS);
  add(sum, x);
}
INLINE void add_square(D& sum, F x) {
  float m[16];
  memcpy(m, &x, 64);
  for (int i = 0; i < 16; i++) sum.v[i] += double(m[i]) * double(m[i]);
}
INLINE double total(D sum) {
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) sum.v[i] += sum.v[i + width];
  return sum.v[0];
}
INLINE F round_to_float(F x) {  // for |x| < 2^22; NaN and infinities are unchanged
  const float big = 0x1.8p23f;
  EACH x.v[i] = (x.v[i] + big) - big;
  return x;
}
INLINE I to_int(F x) { I r; EACH r.v[i] = __builtin_convertvector(x.v[i], i4); return r; }
INLINE float total(F x) {
  const f4 q = (x.v[0] + x.v[2]) + (x.v[1] + x.v[3]);
  return (q[0] + q[2]) + (q[1] + q[3]);
}
INLINE I nearest(F x) { return to_int(round_to_float(x)); }
INLINE F to_float(I x) { F r; EACH r.v[i] = __builtin_convertvector(x.v[i], f4); return r; }
INLINE I down(F x) {
  I whole = to_int(x);
  const F r = to_float(whole);
  EACH whole.v[i] += (i4)(r.v[i] > x.v[i]);  // a true comparison is -1
  return whole;
}
INLINE I from_bytes(const uint8_t* p) {
  I r;
  for (int j = 0; j < 16; j++) reinterpret_cast<int32_t*>(&r)[j] = int8_t(p[j]);
  return r;
}
INLINE I from_octets(const uint8_t* p) {
  I r;
  for (int j = 0; j < 16; j++) reinterpret_cast<int32_t*>(&r)[j] = p[j];
  return r;
}
template <int BITS>
INLINE I from_codes(const uint8_t* p) {
  uint64_t word = 0;
  memcpy(&word, p, 2 * BITS);
  I r;
  EACH {
    const int32_t four = int32_t(word >> (4 * i * BITS));
    r.v[i] = (i4{four, four >> BITS, four >> 2 * BITS, four >> 3 * BITS} << (32 - BITS)) >> (32 - BITS);
  }
  return r;
}
INLINE F entries(F table, I codes) {
  float all[16], found[16];
  int32_t places[16];
  memcpy(all, &table, 64), memcpy(places, &codes, 64);
  for (int j = 0; j < 16; j++) found[j] = all[places[j] & 15];
  return load(found);
}
INLINE M above(F x, F y) { M r; EACH r.v[i] = (i4)(x.v[i] > y.v[i]); return r; }
INLINE I raised(M m, I x, int32_t by) { EACH x.v[i] += m.v[i] & by; return x; }
template <int HALF>
INLINE F swapped(F x) {
  if constexpr (HALF == 1) EACH x.v[i] = f4{x.v[i][1], x.v[i][0], x.v[i][3], x.v[i][2]};
  if constexpr (HALF == 2) EACH x.v[i] = f4{x.v[i][2], x.v[i][3], x.v[i][0], x.v[i][1]};
  if constexpr (HALF == 4) return {{x.v[1], x.v[0], x.v[3], x.v[2]}};
  if constexpr (HALF == 8) return {{x.v[2], x.v[3], x.v[0], x.v[1]}};
  return x;
}
INLINE F flipped(F x, const int32_t* words, int shift) {
  I all;
  memcpy(&all, words, 64);
  EACH x.v[i] = (f4)((i4)x.v[i] ^ ((all.v[i] << shift) & INT32_MIN));
  return x;
}
INLINE F uniform(const uint16_t* table, uint16_t offset) {
  uint16_t words[16];
  I noise;
  memcpy(words, table, 32);
  for (int j = 0; j < 16; j++) reinterpret_cast<int32_t*>(&noise)[j] = uint16_t(words[j] + offset);
  return (to_float(noise) + fill(0.5f)) * fill(0x1p-16f);
}
INLINE I operator+(I x, I y) { EACH x.v[i] = (i4)((u4)x.v[i] + (u4)y.v[i]); return x; }
INLINE I operator*(I x, I y) { EACH x.v[i] = (i4)((u4)x.v[i] * (u4)y.v[i]); return x; }
INLINE I operator^(I x, I y) { EACH x.v[i] ^= y.v[i]; return x; }
template <int BY>
INLINE I folded(I x) { EACH x.v[i] ^= (i4)((u4)x.v[i] >> BY); return x; }
INLINE uint32_t top_bits(I x) { EACH x.v[i] >>= 31; return bits_of(x); }
INLINE F negated(uint32_t bits, F x) {
  const M set = mask_of(bits);  // a mask, since SSE2 cannot shift each element by a different distance
  EACH x.v[i] = (f4)((i4)x.v[i] ^ (set.v[i] & INT32_MIN));
  return x;
}
#undef EACH

#endif

#if defined(GRACE_AVX512) || defined(GRACE_AVX2)
template <int BITS>
INLINE void to_codes(uint8_t* p, I x) {
  __m128i bytes = to_bytes(x);
  if constexpr (BITS == 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
  } else if constexpr (BITS == 4) {
    bytes = _mm_and_si128(bytes, _mm_set1_epi8(15));
    const __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x1001));  // low + 16 * high
    write(reinterpret_cast<int64_t*>(p), 0, int64_t(_mm_cvtsi128_si64(_mm_packus_epi16(pairs, pairs))));
  } else if constexpr (BITS == 3) {
    bytes = _mm_and_si128(bytes, _mm_set1_epi8(7));
    const __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi16(0x0801));
    const __m128i fours = _mm_madd_epi16(pairs, _mm_set1_epi32(0x00400001));
    const __m128i eights = _mm_or_si128(fours, _mm_srli_epi64(fours, 20));  // the lowest 24 of 64 bits
    const uint64_t low = uint64_t(_mm_cvtsi128_si64(eights)) & 0xffffff;
    const uint64_t all = low | uint64_t(_mm_cvtsi128_si64(_mm_unpackhi_epi64(eights, eights))) << 24;
    write(reinterpret_cast<uint32_t*>(p), 0, uint32_t(all));
    write(reinterpret_cast<uint16_t*>(p + 4), 0, uint16_t(all >> 32));
  } else {
    bytes = _mm_and_si128(bytes, _mm_set1_epi8(3));
    const __m128i pairs = _mm_maddubs_epi16(bytes, _mm_set1_epi32(0x40100401));
    const __m128i fours = _mm_madd_epi16(pairs, _mm_set1_epi16(1));
    const __m128i low = _mm_packs_epi32(fours, fours);
    write(reinterpret_cast<int32_t*>(p), 0, _mm_cvtsi128_si32(_mm_packus_epi16(low, low)));
  }
}
#else
template <int BITS>
INLINE void to_codes(uint8_t* p, I x) {
  int32_t codes[16];
  memcpy(codes, &x, 64);
  for (int j = 0; j < 16; j += 8) {
    uint64_t eight = 0;
    for (int i = 0; i < 8; i++) eight |= uint64_t(codes[j + i] & ((1 << BITS) - 1)) << (BITS * i);
    memcpy(p + j / 8 * BITS, &eight, BITS);
  }
}
#endif

#if !defined(GRACE_AVX512)
// As for AVX-512, but with the plain conversion of floats to doubles, which is as fast here.
INLINE void add_finite(D& sum, D& squares, F x) { add(sum, x), add_square(squares, x); }
INLINE double total_finite(D sum) { return total(sum); }
INLINE double total_squares(D squares) { return total(squares); }

INLINE int64_t compact(M m, F x, int32_t position, float* values, int32_t* positions) {
  uint32_t bits = bits_of(m);
  if (__builtin_expect(!bits, 1)) return 0;
  float all[16];
  store(all, x);
  int64_t count = 0;
  for (; bits; bits &= bits - 1, count++) {
    const int j = __builtin_ctz(bits);
    write(values, count, all[j]);
    write(positions, count, position + j);
  }
  return count;
}
#endif

// Decodes the codes of a block with a given scale.
template <int BITS>
struct Scaled {
  static constexpr int TOP = (1 << (BITS - 1)) - 1;
#if defined(GRACE_AVX512)
  F step;  // the value of one step; if BITS < 8, the values of all codes, repeated to fill 16 entries
  INLINE_MEMBER explicit Scaled(float scale) : step(fill(scale / float(TOP))) {
    if constexpr (BITS < 8) {
      float codes[16];
      for (int i = 0; i < 16; i++) codes[i] = float(int32_t(uint32_t(i) << (32 - BITS)) >> (32 - BITS));
      step = load(codes) * step;
    }
  }
  INLINE_MEMBER F at(const uint8_t* p) const {
    if constexpr (BITS < 8) return entries(step, from_codes<BITS>(p));
    return to_float(from_bytes(p)) * step;
  }
#else
  F step;
  INLINE_MEMBER explicit Scaled(float scale) : step(fill(scale / float(TOP))) {}
  INLINE_MEMBER F at(const uint8_t* p) const {
    if constexpr (BITS < 8) return to_float(from_codes<BITS>(p)) * step;
    return to_float(from_bytes(p)) * step;
  }
#endif
};

// Divides many numbers by the same number, rounded like `/`.
struct Divisor {
  F by, inverse;
  bool power;  // a power of two, for which multiplication by the inverse is exact
  INLINE_MEMBER explicit Divisor(int64_t n)
      : by(fill(float(n))), inverse(fill(1.0f / float(n))), power((n & (n - 1)) == 0 && n < (1 << 24)) {}
  INLINE_MEMBER F divided(F x) const { return power ? x * inverse : x / by; }
};

INLINE F magnitude(F x) {
  const I bits = magnitude_bits(x);
  memcpy(&x, &bits, sizeof x);
  return x;
}

template <bool STREAM>
INLINE void put(float* p, F x) {
  if constexpr (STREAM)
    stream(p, x);
  else
    store(p, x);
}

}  // namespace
