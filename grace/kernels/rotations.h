// Blocks that are rotated at random, as in grace/hadamard.py, and codes of a few bits for what that gives.
//
// Sums of two have the order that they have there, so that all bits agree. Included by loops.cc.
#pragma once

using grace::Normal;
using grace::Rotation;
using grace::Steps;

// What a block is worked on in: arrays of as many elements as it has on the wire, but at least W.
struct Block {
  int64_t width;
  float *v, *rotated;
  int32_t* words;
  uint8_t* codes;
  Block(const Rotation& rotation, float* room)
      : width(rotation.width < W ? W : rotation.width), v(room), rotated(room + width),
        words(reinterpret_cast<int32_t*>(room + 2 * width)), codes(reinterpret_cast<uint8_t*>(room + 3 * width)) {}
  // The random words from an element on.
  void draw(const Rotation& rotation, int64_t position) const {
    words_as<int32_t, 0>(rotation.key0, rotation.key1, rotation.start + position, width, words);
  }
  // v = x + residual, filled up with zeros.
  template <bool RESIDUAL>
  INLINE_MEMBER void load_block(const float* x, const float* residual, int64_t count) const {
    for (int64_t j = load_all<RESIDUAL>(v, x, residual, 0, count); j < width; j += W) store(v + j, fill(0));
  }
};

// ---- the transform ---------------------------------------------------------------------------------------------------

struct Alternating {
  alignas(64) float of[4][W];
  constexpr Alternating() : of() {
    for (int k = 0; k < 4; k++)
      for (int i = 0; i < W; i++) of[k][i] = i >> k & 1 ? -1.0f : 1.0f;
  }
};
constexpr Alternating ALTERNATING;

// Sums and differences of the elements i and i ^ HALF of a vector, those of the first ones in order.
template <int HALF>
INLINE F within(F x) {
  constexpr int k = HALF == 1 ? 0 : HALF == 2 ? 1 : HALF == 4 ? 2 : 3;
  return accumulated(x, load(ALTERNATING.of[k]), swapped<HALF>(x));
}

// And of vectors.
template <int64_t N, int64_t HALF = 1>
INLINE void between(F* v) {
  if constexpr (HALF < N) {
    for (int64_t i = 0; i < N; i++)
      if (!(i & HALF)) {
        const F a = v[i], b = v[i + HALF];
        v[i] = a + b, v[i + HALF] = a - b;
      }
    between<N, 2 * HALF>(v);
  }
}

// N vectors after the other, which get(place) gives.
template <int64_t N, class Get>
INLINE void near_sums(float* out, int64_t width, bool whole, const Get& get) {
  for (int64_t i = 0; i < width; i += N * W) {
    F v[N];
    for (int64_t k = 0; k < N; k++) {
      v[k] = within<4>(within<2>(within<1>(get(i + k * W))));
      if (whole) v[k] = within<8>(v[k]);
    }
    between<N>(v);
    for (int64_t k = 0; k < N; k++) store(out + i + k * W, v[k]);
  }
}

// N vectors that are `half` apart.
template <int64_t N>
INLINE void far_sums(float* x, int64_t width, int64_t half) {
  for (int64_t i = 0; i < width; i += N * half)
    for (int64_t j = i; j < i + half; j += W) {
      F v[N];
      for (int64_t k = 0; k < N; k++) v[k] = load(x + j + k * half);
      between<N>(v);
      for (int64_t k = 0; k < N; k++) store(x + j + k * half, v[k]);
    }
}

OUTLINE void far_sums_from(float* x, int64_t width, int64_t half) {
  for (; half * REGISTERS <= width; half *= REGISTERS) far_sums<REGISTERS>(x, width, half);
  for (; half * 4 <= width; half *= 4) far_sums<4>(x, width, half);
  for (; half < width; half *= 2) far_sums<2>(x, width, half);
}

// The transform of the vectors that get(place) gives.
template <class Get>
INLINE void transform(const Block& block, const Rotation& rotation, const Get& get) {
  if (block.width >= REGISTERS * W) {
    near_sums<REGISTERS>(block.rotated, block.width, true, get);
    far_sums_from(block.rotated, block.width, REGISTERS * W);
  } else {
    near_sums<1>(block.rotated, block.width, rotation.width >= W, get);
    far_sums_from(block.rotated, block.width, W);
  }
}

// ---- levels of a normal distribution, as in grace/compressors/eden.py ------------------------------------------------

// How many of the middles are below each: `tables` has what is looked up for each step of a search in halves.
template <int BITS>
struct Middles {
  F first, tables[3];
  INLINE_MEMBER explicit Middles(const float* middles) {
    float all[2 * W] = {};
    memcpy(all, middles, ((1 << BITS) - 1) * sizeof(float));
    first = fill(all[(1 << (BITS - 1)) - 1]);
    for (int k = 0; k < BITS - 1; k++) tables[k] = load(all + (1 << k) - 1);
  }
  INLINE_MEMBER I below(F x) const {
    I found = raised(above(x, first), fill_int(0), 1 << (BITS - 1));
    for (int k = BITS - 2; k >= 0; k--) found = raised(above(x, entries(tables[k], found)), found, 1 << k);
    return found;
  }
};

// What codes stand for, over again where they are few.
template <int BITS>
INLINE F levels_of(const float* levels) {
  float all[W];
  for (int i = 0; i < W; i++) all[i] = read(levels, i & ((1 << BITS) - 1));
  return load(all);
}

// What one bit stands for is looked up nowhere, and three are a byte each.
template <int BITS>
INLINE F level_at(F levels, F low, F high, const uint8_t* codes, int64_t j) {
  if constexpr (BITS == 1) return pick(mask_of(read(reinterpret_cast<const uint16_t*>(codes + j / 8))), high, low);
  if constexpr (BITS == 3) return entries(levels, from_bytes(codes + j));
  if constexpr (BITS == 2 || BITS == 4) return entries(levels, from_codes<BITS>(codes + j * BITS / 8));
}

// Codes of what is rotated to the wire; chosen: their levels take its place. Returns the sum of |rotated * level|.
template <int BITS, bool CHOSEN>
INLINE double normal_codes(const Block& block, const Normal& how, float root, int64_t width, uint8_t* codes) {
  const F divisor = fill(root), levels = levels_of<BITS>(how.levels);
  const F low = fill(read(how.levels, 0)), high = fill(read(how.levels, 1));
  const Middles<BITS> middles(how.middles);
  D overlap = zeros();
  for (int64_t j = 0; j < block.width; j += W) {
    const F x = load(block.rotated + j);
    F level;
    if constexpr (BITS == 1) {
      const M m = not_below_zero(x);
      write(reinterpret_cast<uint16_t*>(block.codes), j / W, uint16_t(bits_of(m)));
      level = pick(m, high, low);
    } else {
      const I code = middles.below(x / divisor);
      to_codes<BITS == 3 ? 8 : BITS>(block.codes + j * (BITS == 3 ? 8 : BITS) / 8, code);
      level = entries(levels, code);
    }
    add_magnitude(overlap, x * level);
    if (CHOSEN) store(block.rotated + j, level);
  }
  if constexpr (BITS == 3)
    for (int64_t j = 0; j < width; j += CHUNK)
      pack_codes(block.codes + j, least(CHUNK, width - j), BITS, codes + j * BITS / 8);
  else
    memcpy(codes, block.codes, size_t(width * BITS / 8));
  return total(overlap);
}

template <bool RESIDUAL, Out OUT, int BITS>
OUTLINE void normal_blocks_as(const Rotation& rotation, const Normal& how, const float* x, const float* residual,
                              float* out, uint8_t* codes, float* scales, int64_t n, int64_t first, float* room) {
  const Block block(rotation, room);
  const int64_t width = rotation.width, ahead = distance(width);
  const float root = __builtin_sqrtf(float(width));
  for (int64_t at = 0, b = 0; at < n; at += width, b++) {
    const int64_t size = least(width, n - at);
    block.load_block<RESIDUAL>(x + at, RESIDUAL ? residual + at : nullptr, size);
    block.draw(rotation, first + at);
    const float largest = as_float(ints_largest_of<false>(block.v, nullptr, block.width));
    const F divisor = fill(not_zero(largest));
    D squares = zeros();
    transform(block, rotation, [&](int64_t j) __attribute__((always_inline)) {
      prefetch<RESIDUAL>(x, residual, at + ahead + j);
      const F share = load(block.v + j) / divisor;
      add_magnitude(squares, share * share);
      return flipped(share, block.words + j, how.stream);
    });
    const float square = float(total(squares));
    const float overlap = float(normal_codes<BITS, OUT != NONE>(block, how, not_zero(__builtin_sqrtf(square)), width,
                                                                codes + at / 8 * BITS));
    const float share = how.divisor ? overlap / how.divisor : square / (square == 0.0f ? 1.0f : overlap) * root;
    const float scale = share * largest;
    write(scales, b, scale);
    if constexpr (OUT != NONE) {
      transform(block, rotation, [&](int64_t j) __attribute__((always_inline)) { return load(block.rotated + j); });
      const F step = fill(scale / root);
      const auto left = [&](int64_t j) __attribute__((always_inline)) {
        return load(block.v + j) - flipped(load(block.rotated + j), block.words + j, how.stream) * step;
      };
      int64_t j = 0;
      for (; j + W <= size; j += W) leave<OUT>(x, residual, out, at + j, left(j));
      if (j < size) leave_some<OUT>(x, residual, out, at + j, left(j), size - j);
    }
  }
}

template <bool RESIDUAL, Out OUT>
INLINE void normal_blocks_to(const Rotation& rotation, const Normal& how, const float* x, const float* residual,
                             float* out, uint8_t* codes, float* scales, int64_t n, int64_t first, float* room) {
#define AS(BITS) normal_blocks_as<RESIDUAL, OUT, BITS>(rotation, how, x, residual, out, codes, scales, n, first, room)
  how.bits == 1 ? AS(1) : how.bits == 2 ? AS(2) : how.bits == 3 ? AS(3) : AS(4);
#undef AS
}

void normal_blocks(const Rotation* rotation, const Normal* how, const float* x, const float* residual, float* out,
                   uint8_t* codes, float* scales, int64_t n, int64_t first, float* room, Out form) {
  FORMS(normal_blocks_to, *rotation, *how, x, residual, out, codes, scales, n, first, room);
  if (form == STREAMED) fence();
}

template <int BITS, bool STREAM>
OUTLINE void normal_sum_as(const Rotation& rotation, const Normal& how, const uint8_t* const* codes,
                           const float* const* scales, const uint8_t* const* streams, int64_t workers, float* out,
                           int64_t begin, int64_t end, float* room) {
  const Block block(rotation, room);
  const int64_t width = rotation.width;
  const float root = __builtin_sqrtf(float(width));
  const F levels = levels_of<BITS>(how.levels), low = fill(read(how.levels, 0)), high = fill(read(how.levels, 1));
  const Divisor divisor(workers);
  for (int64_t at = begin, b = begin / width; at < end; at += width, b++) {
    const int64_t size = least(width, end - at);
    block.draw(rotation, at);
    for (int64_t w = 0; w < workers; w++) {
      const uint8_t* from = codes[w] + at / 8 * BITS;
      if constexpr (BITS == 3)
        for (int64_t j = 0; j < width; j += CHUNK)
          unpack_codes(from + j / 8 * BITS, least(CHUNK, width - j), BITS, block.codes + j);
      else
        memcpy(block.codes, from, size_t(width / 8 * BITS));
      transform(block, rotation, [&](int64_t j) __attribute__((always_inline)) {
        return level_at<BITS>(levels, low, high, block.codes, j);
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

void normal_sum(const Rotation* rotation, const Normal* how, const uint8_t* const* codes, const float* const* scales,
                const uint8_t* const* streams, int64_t workers, float* out, int64_t begin, int64_t end, float* room,
                bool stream) {
#define AS(BITS)                                                                                               \
  (stream ? normal_sum_as<BITS, true>(*rotation, *how, codes, scales, streams, workers, out, begin, end, room) \
          : normal_sum_as<BITS, false>(*rotation, *how, codes, scales, streams, workers, out, begin, end, room))
  how->bits == 1 ? AS(1) : how->bits == 2 ? AS(2) : how->bits == 3 ? AS(3) : AS(4);
#undef AS
}

// ---- equal steps that are summed, as in grace/compressors/thc.py -----------------------------------------------------

template <class T>
INLINE I steps_at(const T* p, int64_t j) {
  if constexpr (sizeof(T) == 1) return from_octets(p + j);
  return read(reinterpret_cast<const I*>(p), j / W);
}

template <class T>
OUTLINE void steps_blocks_as(const Rotation& rotation, const Steps& how, const float* x, const float* norms, T* codes,
                             int64_t n, int64_t first, float* room) {
  const Block block(rotation, room);
  const int64_t width = rotation.width, ahead = distance(width);
  const F high = fill(how.cut), low = fill(-how.cut), factor = fill(how.factor), one = fill(1);
  const I top = fill_int(how.top);
  uint16_t* const noise = reinterpret_cast<uint16_t*>(block.words);
  T* const found = reinterpret_cast<T*>(block.codes);
  for (int64_t at = 0, b = 0; at < n; at += width, b++) {
    block.load_block<false>(x + at, nullptr, least(width, n - at));
    block.draw(rotation, first + at);
    const F divisor = fill(not_zero(read(norms, b)));
    transform(block, rotation, [&](int64_t j) __attribute__((always_inline)) {
      prefetch<false>(x, nullptr, at + ahead + j);
      return flipped(load(block.v + j) / divisor, block.words + j, 0);
    });
    noise_at(noise, how.noise, how.noise.start + first + at, block.width);  // the words have been used
    for (int64_t j = 0; j < block.width; j += W) {
      F v = load(block.rotated + j);
      v = pick(above(v, high), high, v);
      v = (pick(above(low, v), low, v) + high) * factor;
      const I lower = down(v);
      const M m = not_below_zero((v - to_float(lower)) + uniform(noise + j, 0) - one);
      const I code = smaller(raised(m, lower, 1), top);
      if constexpr (sizeof(T) == 1)
        to_codes<8>(reinterpret_cast<uint8_t*>(found + j), code);
      else
        write(reinterpret_cast<I*>(found), j / W, code);
    }
    memcpy(reinterpret_cast<char*>(codes) + at * int64_t(sizeof(T)), found, size_t(width) * sizeof(T));
  }
}

void steps_blocks(const Rotation* rotation, const Steps* how, const float* x, const float* norms, uint8_t* codes,
                  int64_t n, int64_t first, float* room) {
  how->wide ? steps_blocks_as(*rotation, *how, x, norms, reinterpret_cast<int32_t*>(codes), n, first, room)
            : steps_blocks_as(*rotation, *how, x, norms, codes, n, first, room);
}

// rest = x - what `own` stands for, and then mean = what the sums do; either may be absent. STREAM: of the first of them.
template <bool STREAM, class T>
OUTLINE void steps_values_as(const Rotation& rotation, const Steps& how, const T* sums, const T* own, const float* norms,
                             const float* x, float* mean, float* rest, int64_t n, int64_t first, float* room) {
  const Block block(rotation, room);
  const int64_t width = rotation.width;
  const F cut = fill(how.cut), inverse = fill(1.0f / float(width));
  const T* const all = reinterpret_cast<const T*>(block.codes);
  for (int64_t at = 0, b = 0; at < n; at += width, b++) {
    const int64_t size = least(width, n - at);
    const F norm = fill(read(norms, b));
    block.draw(rotation, first + at);
    const auto decode = [&](const T* codes, float each) __attribute__((always_inline)) {
      const F factor = fill(each);
      memcpy(block.codes, reinterpret_cast<const char*>(codes) + at * int64_t(sizeof(T)), size_t(width) * sizeof(T));
      transform(block, rotation, [&](int64_t j) __attribute__((always_inline)) {
        return to_float(steps_at(all, j)) * factor - cut;
      });
    };
    const auto value = [&](int64_t j) __attribute__((always_inline)) {
      return flipped(load(block.rotated + j), block.words + j, 0) * inverse * norm;
    };
    int64_t j = 0;
    if (own) {
      decode(own, how.own);
      for (; j + W <= size; j += W) put<STREAM>(rest + at + j, load(x + at + j) - value(j));
      if (j < size) store_some(rest + at + j, load_some(x + at + j, size - j) - value(j), size - j);
    }
    if (sums) {
      decode(sums, how.factor);
      for (j = 0; j + W <= size; j += W) own ? store(mean + at + j, value(j)) : put<STREAM>(mean + at + j, value(j));
      if (j < size) store_some(mean + at + j, value(j), size - j);
    }
  }
  if (STREAM) fence();
}

void steps_values(const Rotation* rotation, const Steps* how, const uint8_t* sums, const uint8_t* own,
                  const float* norms, const float* x, float* mean, float* rest, int64_t n, int64_t first, float* room,
                  bool stream) {
  const auto values = [&](auto all, auto alone) {
    stream ? steps_values_as<true>(*rotation, *how, all, alone, norms, x, mean, rest, n, first, room)
           : steps_values_as<false>(*rotation, *how, all, alone, norms, x, mean, rest, n, first, room);
  };
  how->wide ? values(reinterpret_cast<const int32_t*>(sums), reinterpret_cast<const int32_t*>(own))
            : values(sums, own);
}
