// Randomly rotated blocks, as in grace/ops/hadamard.py, and their codes: eden and thc.
//
// A rotation flips signs at random, then applies a Hadamard transform. Additions have the same order as in hadamard.py,
// so all bits agree.
#pragma once

#include <cstdint>
#include <cstring>

#include "common-inl.h"
#include "floats-inl.h"
#include "kernels.h"
#include "vectors-inl.h"

namespace {

using grace::Eden;
using grace::Rotation;
using grace::Thc;

// Scratch for a block. width: the number of elements of each array: that of the block on the wire, but at least W.
struct Block {
  int64_t width;
  float *v, *rotated;
  int32_t* words;
  uint8_t* codes;  // bytes or int32
  uint16_t* noise;
  Block(const Rotation& rotation, float* room)
      : width(rotation.width < W ? W : rotation.width), v(room), rotated(room + width),
        words(reinterpret_cast<int32_t*>(room + 2 * width)), codes(reinterpret_cast<uint8_t*>(room + 3 * width)),
        noise(reinterpret_cast<uint16_t*>(room + 4 * width)) {}
  // words = the random words of `width` elements from `position` on.
  void draw(const Rotation& rotation, int64_t position) const {
    words_as<int32_t, 0>(rotation.key0, rotation.key1, rotation.start + position, width, words);
  }
  // words = only the top bit of each of these words, sixteen bits per uint16.
  void draw_signs(const Rotation& rotation, int64_t position) const {
    top_bits_of_words(rotation.key0, rotation.key1, rotation.start + position, width, reinterpret_cast<uint16_t*>(words));
  }
  INLINE_MEMBER F signed_(int64_t j, F x) const {
    // unsigned, so that the division is a shift
    return negated(read(reinterpret_cast<const uint16_t*>(words), int64_t(uint64_t(j) / W)), x);
  }
  // Returns x + residual, padded with zeros.
  template <bool RESIDUAL>
  INLINE_MEMBER const float* values(const float* x, const float* residual, int64_t count) const {
    if (!RESIDUAL && count == width) return x;
    for (int64_t j = load_all<RESIDUAL>(v, x, residual, 0, count); j < width; j += W) store(v + j, fill(0));
    return v;
  }
};

// ---- the transform --------------------------------------------------------------------------------------------------

struct Alternating {
  alignas(64) float of[4][W];
  constexpr Alternating() : of() {
    for (int k = 0; k < 4; k++)
      for (int i = 0; i < W; i++) of[k][i] = i >> k & 1 ? -1.0f : 1.0f;
  }
};
constexpr Alternating ALTERNATING;

// A butterfly: replaces elements i and i ^ HALF of a vector by their sum, at the lower index, and their difference.
template <int HALF>
INLINE F within(F x) {
  constexpr int k = HALF == 1 ? 0 : HALF == 2 ? 1 : HALF == 4 ? 2 : 3;
  return accumulated(x, load(ALTERNATING.of[k]), swapped<HALF>(x));
}

// Computes all butterflies between N vectors: first those of vectors i and i ^ 1, then of i and i ^ 2, and so on.
template <int64_t N, int64_t HALF = 1>
INLINE void between(F* v) {
  if constexpr (HALF < N) {
    EACH_OF(N)
      if (!(k & HALF)) {
        const F a = v[k], b = v[k + HALF];
        v[k] = a + b, v[k + HALF] = a - b;
      }
    between<N, 2 * HALF>(v);
  }
}

// Computes the stages of the transform inside N consecutive vectors, which get(place) returns. whole: whether a block
// has at least W elements.
template <int64_t N, class Get>
INLINE void near_sums(float* out, int64_t width, bool whole, const Get& get) {
  for (int64_t i = 0; i < width; i += N * W) {
    F v[N];
    EACH_OF(N) {
      v[k] = within<4>(within<2>(within<1>(get(i + k * W))));
      if (whole) v[k] = within<8>(v[k]);
    }
    between<N>(v);
    EACH_OF(N) store(out + i + k * W, v[k]);
  }
}

// Computes the stages across N vectors that are `half` elements apart.
template <int64_t N>
INLINE void far_sums(float* x, int64_t width, int64_t half) {
  for (int64_t i = 0; i < width; i += N * half)
    for (int64_t j = i; j < i + half; j += W) {
      F v[N];
      EACH_OF(N) v[k] = load(x + j + k * half);
      between<N>(v);
      EACH_OF(N) store(x + j + k * half, v[k]);
    }
}

OUTLINE void far_sums_from(float* x, int64_t width, int64_t half) {
  for (; half * REGISTERS <= width; half *= REGISTERS) far_sums<REGISTERS>(x, width, half);
  for (; half * 4 <= width; half *= 4) far_sums<4>(x, width, half);
  for (; half < width; half *= 2) far_sums<2>(x, width, half);
}

// block.rotated = the transform of the vectors that get(place) returns.
template <class Get>
INLINE void transform(const Block& block, const Rotation& rotation, const Get& get) {
  if (block.width == 4 * W) return near_sums<4>(block.rotated, 4 * W, true, get);
  const bool many = block.width >= REGISTERS * W;
  if (many)
    near_sums<REGISTERS>(block.rotated, block.width, true, get);
  else
    near_sums<1>(block.rotated, block.width, rotation.width >= W, get);
  far_sums_from(block.rotated, block.width, many ? REGISTERS * W : W);
}

// ---- levels of a normal distribution: eden --------------------------------------------------------------------------

template <int BITS>
struct Quantiser {
  F levels;             // the values of codes, repeated to fill sixteen entries
  F low, high;          // the first two levels
  F middle, tables[3];  // for a binary search: the midpoint of its first step, then those of each further step
  INLINE_MEMBER explicit Quantiser(const Eden& how) {
    float all[2 * W] = {};
    for (int i = 0; i < W; i++) all[i] = read(how.levels, i & ((1 << BITS) - 1));
    levels = load(all), low = fill(all[0]), high = fill(all[1]);
    if (how.middles) memcpy(all, how.middles, ((1 << BITS) - 1) * sizeof(float));  // null when decoding
    middle = fill(all[(1 << (BITS - 1)) - 1]);
    for (int k = 0; k < BITS - 1; k++) tables[k] = load(all + (1 << k) - 1);
  }
  // Encode: writes sixteen codes, and returns their levels. divisor: the standard deviation of the elements.
  INLINE_MEMBER F encode(F x, F divisor, uint8_t* codes) const {
    if constexpr (BITS == 1) {
      const M m = not_below_zero(x);
      write(reinterpret_cast<uint16_t*>(codes), 0, uint16_t(bits_of(m)));
      return pick(m, high, low);
    } else {
      const F normal = x / divisor;
      I code = raised(above(normal, middle), fill_int(0), 1 << (BITS - 1));  // code = the number of midpoints below
      for (int k = BITS - 2; k >= 0; k--) code = raised(above(normal, entries(tables[k], code)), code, 1 << k);
      to_codes<BITS>(codes, code);
      return entries(levels, code);
    }
  }
  INLINE_MEMBER F decode(const uint8_t* codes) const {
    if constexpr (BITS == 1)
      return pick(mask_of(read(reinterpret_cast<const uint16_t*>(codes))), high, low);
    else
      return entries(levels, from_codes<BITS>(codes));
  }
};

// block.rotated = the rotation of v / largest. Returns the sum of squares of v / largest. Prefetches `next` and `other`
// meanwhile.
OUTLINE double rotate(const Block& block, const Rotation& rotation, const float* v, float largest, int stream,
                      const float* next, const float* other) {
  const F divisor = fill(not_zero(largest));
  D squares = zeros();
  transform(block, rotation, [&](int64_t j) __attribute__((always_inline)) {
    prefetch<true>(next, other, j);
    const F share = load(v + j) / divisor;
    add_magnitude(squares, share * share);
    return flipped(share, block.words + j, stream);
  });
  return total(squares);
}

OUTLINE void rotate_again(const Block& block, const Rotation& rotation) {
  transform(block, rotation, [&](int64_t j) __attribute__((always_inline)) { return load(block.rotated + j); });
}

// Writes the codes of block.rotated, then block.rotated = their levels. Returns the sum of |rotated element * level|.
template <int BITS>
INLINE double eden_codes(const Block& block, const Quantiser<BITS>& quantiser, float root, int64_t width,
                         uint8_t* codes) {
  uint8_t* const to = width < W ? block.codes : codes;
  const F divisor = fill(root);
  D overlap = zeros();
  for (int64_t j = 0; j < block.width; j += W) {
    const F x = load(block.rotated + j), level = quantiser.encode(x, divisor, to + j / 8 * BITS);
    add_magnitude(overlap, x * level);
    store(block.rotated + j, level);
  }
  if (width < W) memcpy(codes, to, size_t(width / 8 * BITS));
  return total(overlap);
}

template <int BITS, bool RESIDUAL, Out OUT>
OUTLINE void eden_blocks_of(const Rotation& rotation, const Eden& how, const float* x, const float* residual,
                            float* out, uint8_t* codes, float* scales, int64_t n, int64_t first, float* room) {
  const Block block(rotation, room);
  const Quantiser<BITS> quantiser(how);
  const int64_t width = rotation.width, ahead = width < AHEAD ? AHEAD : width;
  const float root = __builtin_sqrtf(float(width));
  for (int64_t at = 0, b = 0; at < n; at += width, b++) {
    const int64_t size = least(width, n - at);
    const float* v = block.values<RESIDUAL>(x + at, RESIDUAL ? residual + at : nullptr, size);
    const float largest = as_float(statistic_of<Largest, false>(v, nullptr, block.width));
    block.draw(rotation, first + at);
    const float* next = x + at + ahead;
    const float* other = RESIDUAL ? residual + at + ahead : next;
    const float square = float(rotate(block, rotation, v, largest, how.stream, next, other));
    const float overlap = float(
        eden_codes(block, quantiser, not_zero(__builtin_sqrtf(square)), width, codes + at / 8 * BITS));
    const float share = how.divisor ? overlap / how.divisor : square / (square == 0.0f ? 1.0f : overlap) * root;
    const float scale = share * largest;
    write(scales, b, scale);
    if constexpr (OUT != NONE) {
      rotate_again(block, rotation);
      const F step = fill(scale / root);
      const auto left = [&](int64_t j) __attribute__((always_inline)) {
        return load(v + j) - flipped(load(block.rotated + j), block.words + j, how.stream) * step;
      };
      int64_t j = 0;
      for (; j + W <= size; j += W) leave<OUT>(x, residual, out, at + j, left(j));
      if (j < size) leave_some<OUT>(x, residual, out, at + j, left(j), size - j);
    }
  }
}

template <bool RESIDUAL, Out OUT, class... Arguments>
INLINE void eden_blocks_to(const Rotation& rotation, const Eden& how, Arguments... arguments) {
  how.bits == 1   ? eden_blocks_of<1, RESIDUAL, OUT>(rotation, how, arguments...)
  : how.bits == 2 ? eden_blocks_of<2, RESIDUAL, OUT>(rotation, how, arguments...)
  : how.bits == 3 ? eden_blocks_of<3, RESIDUAL, OUT>(rotation, how, arguments...)
                  : eden_blocks_of<4, RESIDUAL, OUT>(rotation, how, arguments...);
}

void eden_blocks(const Rotation* rotation, const Eden* how, const float* x, const float* residual, float* out,
                 uint8_t* codes, float* scales, int64_t n, int64_t first, float* room, Out form) {
  FORMS(eden_blocks_to, *rotation, *how, x, residual, out, codes, scales, n, first, room);
  if (form == STREAMED) fence();
}

template <int BITS, bool STREAM>
OUTLINE void eden_sum_of(const Rotation& rotation, const Eden& how, const uint8_t* const* codes,
                         const float* const* scales, const uint8_t* const* streams, int64_t workers, float* out,
                         int64_t begin, int64_t end, float* room) {
  const Block block(rotation, room);
  const Quantiser<BITS> quantiser(how);
  const int64_t width = rotation.width;
  const float root = __builtin_sqrtf(float(width));
  const Divisor divisor(workers);
  for (int64_t at = begin, b = begin / width; at < end; at += width, b++) {
    const int64_t size = least(width, end - at);
    block.draw(rotation, at);
    for (int64_t w = 0; w < workers; w++) {
      const uint8_t* from = codes[w] + at / 8 * BITS;
      if (width < W) from = block.codes, memcpy(block.codes, codes[w] + at / 8 * BITS, size_t(width / 8 * BITS));
      transform(block, rotation, [&](int64_t j) __attribute__((always_inline)) {
        return quantiser.decode(from + j / 8 * BITS);
      });
      const F step = fill(read(scales[w], b) / root);
      const int shift = streams[w][b] & 31;
      const auto sum = [&](int64_t j) __attribute__((always_inline)) {
        const F value = flipped(load(block.rotated + j), block.words + j, shift) * step;
        return w ? load(block.v + j) + value : value;
      };
      if (w + 1 < workers) {
        for (int64_t j = 0; j < block.width; j += W) store(block.v + j, sum(j));
        continue;
      }
      int64_t j = 0;
      for (; j + W <= size; j += W) put<STREAM>(out + at + j, divisor.divided(sum(j)));
      if (j < size) store_some(out + at + j, divisor.divided(sum(j)), size - j);
    }
  }
  if (STREAM) fence();
}

template <bool STREAM, class... Arguments>
INLINE void eden_sum_to(const Rotation& rotation, const Eden& how, Arguments... arguments) {
  how.bits == 1   ? eden_sum_of<1, STREAM>(rotation, how, arguments...)
  : how.bits == 2 ? eden_sum_of<2, STREAM>(rotation, how, arguments...)
  : how.bits == 3 ? eden_sum_of<3, STREAM>(rotation, how, arguments...)
                  : eden_sum_of<4, STREAM>(rotation, how, arguments...);
}

void eden_sum(const Rotation* rotation, const Eden* how, const uint8_t* const* codes, const float* const* scales,
              const uint8_t* const* streams, int64_t workers, float* out, int64_t begin, int64_t end, float* room,
              bool stream) {
  stream ? eden_sum_to<true>(*rotation, *how, codes, scales, streams, workers, out, begin, end, room)
         : eden_sum_to<false>(*rotation, *how, codes, scales, streams, workers, out, begin, end, room);
}

// ---- equal steps summed on the wire: thc ----------------------------------------------------------------------------

void thc_blocks(const Rotation* rotation, const Thc* how, const float* x, const float* norms, uint8_t* codes,
                int64_t n, int64_t first, float* room) {
  const Block block(*rotation, room);
  const int64_t width = rotation->width, ahead = width < AHEAD ? AHEAD : width;
  const F high = fill(how->cut), low = fill(-how->cut), factor = fill(how->factor), below_one = fill(0x1.fffffep-1f);
  const I top = fill_int(how->top);
  const bool wide = how->wide;
  const int64_t bytes = wide ? 4 : 1;
  for (int64_t at = 0, b = 0; at < n; at += width, b++) {
    const float* v = block.values<false>(x + at, nullptr, least(width, n - at));
    block.draw_signs(*rotation, first + at);
    noise_at(block.noise, how->noise, how->noise.start + first + at, block.width);
    const F divisor = fill(not_zero(read(norms, b)));
    transform(block, *rotation, [&](int64_t j) __attribute__((always_inline)) {
      prefetch<false>(x, nullptr, at + ahead + j);
      return block.signed_(j, load(v + j) / divisor);
    });
    uint8_t* const to = width < W ? block.codes : codes + at * bytes;
    for (int64_t j = 0; j < block.width; j += W) {
      const F normal = higher(low, lower(high, load(block.rotated + j)));  // NaN passes only with this order of operands
      const F steps = (normal + high) * factor;
      const I whole = down(steps);
      const M m = above((steps - to_float(whole)) + uniform(block.noise + j, 0), below_one);
      const I code = smaller(raised(m, whole, 1), top);
      if (wide)
        write(reinterpret_cast<I*>(to), j / W, code);
      else
        to_codes<8>(to + j, code);
    }
    if (width < W) memcpy(codes + at * bytes, to, size_t(width * bytes));
  }
}

// block.rotated = the transform of the values of a block's codes, or of sums of codes. how.factor: the size of a step.
OUTLINE void thc_transform(const Block& block, const Rotation& rotation, const Thc& how, const uint8_t* codes) {
  const F factor = fill(how.factor), cut = fill(how.cut);
  const uint8_t* from = codes;
  if (rotation.width < W) from = block.codes, memcpy(block.codes, codes, size_t(rotation.width * (how.wide ? 4 : 1)));
  if (how.wide)
    transform(block, rotation, [&](int64_t j) __attribute__((always_inline)) {
      return to_float(read(reinterpret_cast<const I*>(from), j / W)) * factor - cut;
    });
  else
    transform(block, rotation, [&](int64_t j) __attribute__((always_inline)) {
      return to_float(from_octets(from + j)) * factor - cut;
    });
}

template <bool STREAM>
INLINE void thc_values_to(const Rotation& rotation, const Thc& how, const float* x, const uint8_t* codes,
                          const float* norms, float* out, int64_t n, int64_t first, float* room) {
  const Block block(rotation, room);
  const int64_t width = rotation.width, bytes = how.wide ? 4 : 1;
  const F inverse = fill(1.0f / float(width));
  for (int64_t at = 0, b = 0; at < n; at += width, b++) {
    const int64_t size = least(width, n - at);
    const F norm = fill(read(norms, b));
    const auto value = [&](int64_t j) __attribute__((always_inline)) {
      return block.signed_(j, load(block.rotated + j)) * inverse * norm;
    };
    block.draw_signs(rotation, first + at);
    thc_transform(block, rotation, how, codes + at * bytes);
    int64_t j = 0;
    for (; j + W <= size; j += W) put<STREAM>(out + at + j, x ? load(x + at + j) - value(j) : value(j));
    if (j < size) store_some(out + at + j, x ? load_some(x + at + j, size - j) - value(j) : value(j), size - j);
  }
  if (STREAM) fence();
}

void thc_values(const Rotation* rotation, const Thc* how, const float* x, const uint8_t* codes, const float* norms,
                float* out, int64_t n, int64_t first, float* room, bool stream) {
  stream ? thc_values_to<true>(*rotation, *how, x, codes, norms, out, n, first, room)
         : thc_values_to<false>(*rotation, *how, x, codes, norms, out, n, first, room);
}

}  // namespace
