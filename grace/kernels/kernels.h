// The loops compiled for each instruction set (loops.cc), and the function table through which kernels.cc calls them.
#pragma once

#include <cstdint>

#define API extern "C" __attribute__((visibility("default")))

namespace grace {

// Noise for stochastic rounding; table == nullptr: round to nearest, ties to even.
struct Noise {
  const uint16_t* table;    // [65536]
  const uint16_t* offsets;  // one per 65536 positions, the first for the segment `origin`
  int64_t origin;           // start / 65536
  int64_t start;            // the position of element 0
};

// Progress of a pass that compacts large elements.
struct Found {
  int64_t read;   // elements read
  int64_t count;  // elements written to values and positions
};

// The new residual: not written; stored to `out`; stored there with streaming stores; stored in place of the old residual,
// which is `out` and is moved to x.
enum Out { NONE, KEPT, STREAMED, SWAPPED };

// Codes of 1 .. 8 bits for the sign and level / levels, rounded stochastically. levels == 0: codes of 2 bits for -1, 0
// and 1, drawn with a hash of the keys and the position.
struct Levels {
  int bits, levels;
  Noise noise;
  uint32_t key0, key1;
};

// Count and sum of the elements below zero, and the sum of the others.
struct Halves {
  int64_t count;
  double below, rest;
};

// Minifloats, as in `grace.kernels.Codes`.
enum Kind : int32_t { BF16, FP8, NATURAL, DITHERED, NEAREST };
constexpr int32_t LOWEST = (127 - 24) << 7, BUCKETS = (127 << 7) - LOWEST + 1;  // upper halves of magnitudes

struct Codec {
  int32_t kind, bits, first, second, top, random;
  float factor;            // scale / largest magnitude
  uint32_t key0, key1;     // of the random words
  const float* table;      // [2^bits]: the values of codes
  // [2 * BUCKETS], the second half for negative elements. Upper 16 bits: number of midpoints between table entries below
  // the bucket. Lower 16 bits: added to the lower half of the float (inverted if negative), carry if one more is below.
  const uint32_t* buckets;
  Noise noise;
};

// Randomly rotated blocks: elements per block on the wire, and the position of element 0 in the random words of the keys.
struct Rotation {
  int64_t width, start;
  uint32_t key0, key1;
};

// Codes for the quantisation levels of a normal distribution, ascending, and their midpoints. Bit 31 - `stream` of a random
// word is a sign. `divisor`: the scale is the sum of magnitudes divided by it; or 0.
struct Normal {
  int bits, stream;
  float divisor;
  const float *levels, *middles;
};

// Codes 0 .. `top` for equal steps from -cut to cut, of one byte, or four if `wide`. `factor`: steps per unit when encoding,
// the size of a step of the sums when decoding. `own`: the size of a step of a worker's own codes.
struct Steps {
  int top, wide;
  float cut, factor, own;
  Noise noise;
};

// Numbers of 32, 16, 8 or 0 bits: bits of the smallest magnitudes with 8, 16 and 32 bits, and the factor of 7-bit
// magnitudes.
struct Tagged {
  int32_t one, two, three;
  float steps;
};

// A count sketch: size of the groups hashed together and number of columns (both powers of two), and words per row.
struct Groups {
  int64_t size, width, count;
};

// Read positions of the numbers of 32, 16 and 8 bits.
struct Streams {
  const float* three;
  const uint8_t *two, *one;
};

// The next bytes, of five trits each, and the zeros that remain of a run before them.
struct Runs {
  const uint8_t* next;
  int64_t zeros;
};

struct Chances {
  int64_t count;
  double sum;
};

// Bits of the largest and of the smallest non-zero magnitude.
struct Range {
  int32_t most, least;
};

// Divisor of magnitudes for their probabilities, and the magnitude from which probabilities are 1.
struct Unit {
  float largest, unit;
  bool near;  // Quotients<true> is valid (vectors-inl.h)
};

struct Excess {
  int64_t count;
  double sum, squares;
};

// Tables of the orthonormal cosine transform of `size` = 2^k * odd numbers. `odd`: the used part of the matrix for the odd
// factor, and its transpose. `halves`, `count` elements: consecutive symmetric matrices of sizes odd, 2 odd .. size / 2.
// `matrix`: the whole transform, with rows padded to whole vectors.
struct Cosines {
  int64_t size, count;
  const float *odd, *halves, *matrix;
};

// A chunk, or, if `down` is null, several chunks of one row each. The first `height` rows exist, with `width` elements each
// and `last` in the last one; all others are zeros. `stride`: distance of rows. `next`: distance of the next tile.
struct Tile {
  const Cosines *down, *across;
  int64_t rows, columns, stride, height, width, last, next;
};

// Non-zero coefficients, row by row.
struct Terms {
  int64_t count;
  const int32_t *rows, *columns;
  const float* values;
};

// Loops of single methods (methods-inl.h), with the conventions of `Loops`.
struct MethodLoops {
  // keys: integers in the order of the floats. bins[65536], by the upper halves of keys: 2^40 times their number plus the
  // sum of their lower halves; for fewer than 2^24 elements.
  void (*order_keys)(const float* x, int64_t n, int32_t* keys);
  void (*order_bins)(const float* x, int64_t n, uint64_t* bins);
  // Codes by the upper halves of keys. Elements with place = code + 256 go to values and positions, which need room for 16
  // more. Returns their number.
  int64_t (*order_codes)(const float* x, int64_t n, const uint16_t* places, int bits, uint8_t* codes, float* values,
                         int32_t* positions);
  // Codes: the number of ascending bounds[512] below each element, up to 2 step - 1. Also the sum and the number of elements
  // of each code.
  void (*quantile_emit)(const float* x, int64_t n, const int32_t* bounds, int step, int bits, uint8_t* codes, double* sums,
                        int64_t* members);
  // tables[workers, 256]: the values of codes.
  void (*quantile_sum)(const uint8_t* const* codes, const float* tables, int bits, int64_t workers, float* out,
                       int64_t begin, int64_t end, bool stream);
  // out = x + residual. counts[2] += numbers of elements above and below zero. Returns the bits of the largest magnitude.
  int32_t (*signs_count)(const float* x, const float* residual, float* out, int64_t n, int64_t* counts, Out form);
  // table[width] += signed x. words[size + groups]: for each place in a group, its top bit is a sign; for each group, a sign
  // and the column of its first element.
  void (*hashed_add)(const float* x, int64_t begin, int64_t end, const Groups* how, const int32_t* words, double* table);
  // The median over the rows of table[rows, width]; `finite`: of the table; words[rows, count]; scratch[rows, 512].
  void (*hashed_estimate)(const float* table, int64_t rows, const Groups* how, const int32_t* words, int64_t begin,
                          int64_t end, bool finite, float* scratch, float* out);
  void (*tagged_count)(const Tagged* how, const float* x, int64_t n, int64_t* counts);  // 32, 16 and 8 bits
  void (*tagged_emit)(const Tagged* how, const float* x, int64_t n, uint8_t* packed, float* three, uint8_t* two,
                      uint8_t* one);
  void (*tags_count)(const uint8_t* packed, int64_t count, int64_t* counts);  // likewise, added to these
  void (*tagged_sum)(const Tagged* how, const uint8_t* const* packed, Streams* from, int64_t workers, float* out,
                     int64_t begin, int64_t end, bool stream);
  // out = x + residual. For each bin: the number of sent elements, and their places with signs. total += bin maxima.
  int64_t (*bins_emit)(const float* x, const float* residual, float* out, int64_t n, int64_t size, uint8_t* counts,
                       uint8_t* places, double* total);
  Range (*range)(const float* x, int64_t n);
  // unit == 0: the sum of |x| / largest. Otherwise the number of these that reach the unit, and the sum of others / unit.
  Chances (*chances_sum)(const float* x, int64_t n, Unit unit);
  // Elements sent always (certain, values), and by chance (drawn): positions (first + index; -1 - position if negative).
  // kept[2]: their numbers. Arrays need room for n + 16. If `largest` or `unit` is NaN, only non-finite elements are sent.
  void (*chances_emit)(const float* x, int64_t n, Unit unit, uint32_t key0, uint32_t key1, int64_t start, int32_t first,
                       int32_t* certain, float* values, int32_t* drawn, int64_t* kept);
  // Magnitudes above a bound: their number, and the sums of the excesses and of their squares.
  Excess (*excess)(const float* x, int64_t n, float bound);
  Excess (*accumulate)(float* x, float* last, float beta, float gamma, int64_t n);  // as in `Loops`; returns excess(last, n, 0)
  // The coefficients of a tile of x + residual, float32[rows, columns], in `room`, which holds 4 floats per element of the
  // tile with sides padded to multiples of 16. The last bits depend on the instruction set.
  const float* (*cosines_of)(const Tile* tile, const float* x, const float* residual, float* room);
  // out = a tile of x minus the terms; with a residual, x + residual minus the terms, where `room` must still hold the sum
  // from cosines_of.
  void (*cosines_left)(const Tile* tile, const Terms* terms, const float* x, const float* residual, float* out, float* room,
                       Out form);
  void (*cosines_values)(const Tile* tile, const Terms* terms, float* out, float* room, bool sign, bool stream);
  // groups_largest: the largest key of each of `groups` groups, a multiple of 64. bound_of: a bound that exactly k of n keys
  // reach, or the k-th largest key if ties prevent that; n is a multiple of 16.
  void (*groups_largest)(const float* x, const float* residual, int64_t n, int64_t groups, int32_t* most);
  int32_t (*bound_of)(const int32_t* keys, int64_t n, int64_t k);
  // Integer codes of a block, bytes or int32 if `wide`, and their values code * scale / steps. out = values, or x - values
  // if x is not null.
  void (*shared_emit)(const float* x, int64_t n, float scale, float top, const Noise* noise, int64_t first, uint8_t* codes,
                      bool wide);
  void (*shared_values)(const float* x, const uint8_t* codes, int64_t n, float scale, int64_t steps, float* out, bool wide,
                        bool stream);
  // sums[rows, many] of rows of `size` elements, the last one shorter, with signs in the top bits of words[many, width].
  // width: `size` padded to whole vectors.
  void (*signed_sums)(const float* x, int64_t n, int64_t size, const int32_t* words, int64_t width, int64_t many,
                      float* sums);
};

// x, residual, out: float32; residual may be null. `stream`: use streaming stores. Element ranges and packed pointers start
// at whole bytes. No alignment is assumed. Streaming stores are weakly ordered, so every loop that uses them ends with a
// fence.
struct Loops {
  const char* name;
  double (*signs_total)(const float* x, const float* residual, int64_t n);
  void (*signs_emit)(const float* x, const float* residual, float* out, uint8_t* bits, float scale, int64_t n,
                     Out form);
  void (*signs_blocks)(const float* x, const float* residual, float* out, uint8_t* bits, float* scales, int64_t n,
                       int64_t block, Out form);
  void (*signs_sum)(const uint8_t* const* bits, const float* const* scales, int64_t workers, float* out, int64_t begin,
                    int64_t end, int64_t block, bool stream);
  int32_t (*ints_largest)(const float* x, const float* residual, int64_t n);
  void (*ints_emit)(const float* x, const float* residual, float* out, uint8_t* codes, float scale, int64_t n, int bits,
                    const Noise* noise, int64_t first, Out form);
  void (*ints_blocks)(const float* x, const float* residual, float* out, uint8_t* codes, float* scales, int64_t n,
                      int64_t block, int bits, const Noise* noise, int64_t first, Out form);
  void (*ints_sum)(const uint8_t* const* codes, const float* const* scales, int64_t workers, float* out, int64_t begin,
                   int64_t end, int64_t block, int bits, bool stream);
  // Writes elements with key >= bound to values and positions (first + index), and a zero in their place in out (may be
  // null). The key is the bits of the magnitude, at most `cap`. Stops when fewer than 16 places are free.
  Found (*select)(const float* x, const float* residual, float* out, int64_t n, int32_t bound, int32_t cap, float* values,
                  int32_t* positions, int64_t capacity, int32_t first, Out form);
  void (*accumulate)(float* x, float* last, float beta, float gamma, int64_t n);  // last = beta last + gamma x; x = last
  void (*divide)(const float* x, float* out, int64_t n, int64_t divisor, bool stream);
  void (*words)(uint32_t key0, uint32_t key1, int64_t start, int64_t n, int32_t* out);
  // The inverted upper 31 bits of the words: the smallest word gives the largest.
  void (*inverse)(uint32_t key0, uint32_t key1, int64_t start, int64_t n, int32_t* out);
  void (*noise)(uint32_t key0, uint32_t key1, int64_t n, uint16_t* out);
  // out = x - p[rows, r] q[r, b], or p q if x is null; out may be x.
  void (*product)(const float* x, const float* p, const float* q, float* out, int64_t rows, int64_t b, int64_t r);
  // rest = x - taken_p[rows, r] taken_q[r, b], then x = p q; same result as two calls of product.
  void (*part)(float* x, const float* p, const float* q, const float* taken_p, const float* taken_q, float* rest,
               int64_t rows, int64_t b, int64_t r, bool stream);
  // p[rows, r] = m[rows, b] times the transpose of q[r, b]; before, m += residual, if not null.
  void (*left)(float* m, const float* residual, const float* q, float* p, int64_t rows, int64_t b, int64_t r);
  // Columns begin .. end of q[r, b] = the transpose of p[rows, r] times m[rows, b]; before, m += residual in these columns,
  // if not null.
  void (*right)(float* m, const float* residual, const float* p, float* q, int64_t rows, int64_t b, int64_t r,
                int64_t begin, int64_t end);
  // The sum of (x / largest)^2.
  double (*squares)(const float* x, const float* residual, int64_t n, float largest);
  void (*levels_emit)(const float* x, const float* residual, float* out, uint8_t* codes, float scale, int64_t n,
                      const Levels* how, int64_t first, Out form);
  void (*levels_blocks)(const float* x, const float* residual, float* out, uint8_t* codes, float* scales, int64_t n,
                        int64_t block, const Levels* how, int64_t first, Out form);
  void (*levels_sum)(const uint8_t* const* codes, const float* const* scales, int64_t workers, float* out,
                     int64_t begin, int64_t end, int64_t block, const Levels* how, bool stream);
  void (*votes_encode)(const float* x, uint8_t* bits, uint8_t* flags, int64_t n);
  void (*votes_sum)(const uint8_t* const* bits, const uint8_t* const* flags, int64_t workers, float* out, int64_t begin,
                    int64_t end, bool stream);
  Halves (*halves)(const float* x, const float* residual, int64_t n);
  void (*halves_emit)(const float* x, const float* residual, float* out, uint8_t* bits, float below, float rest,
                      int64_t n, Out form);
  void (*halves_sum)(const uint8_t* const* bits, const float* const* means, int64_t workers, float* out, int64_t begin,
                     int64_t end, int64_t block, bool stream);
  void (*trits_emit)(const float* x, const float* residual, float* out, uint8_t* bytes, float scale, int64_t n,
                     Out form);
  // Advances `from` of each worker.
  void (*trits_sum)(Runs* from, const float* const* scales, int64_t workers, float* out, int64_t begin, int64_t end,
                    int64_t block, bool runs, bool stream);
  // u_out = momentum * u + g, v_out = v + u_out; nesterov: u_out = momentum * (u + g), v_out = v + (u_out + g).
  // last = v, if not null. `stream` applies to u_out.
  void (*correct)(const float* g, const float* u, const float* v, float* u_out, float* v_out, float* last,
                  float momentum, bool nesterov, int64_t n, bool stream);
  // codes_largest: a block's statistic; codes_scale converts it, or the maximum of several, to the sent scale. `position`:
  // of x[0].
  int32_t (*codes_largest)(const Codec* codec, const float* x, const float* residual, uint8_t* codes, int64_t n,
                           int64_t position);
  int32_t (*codes_scale)(const Codec* codec, int32_t largest);
  void (*codes_emit)(const Codec* codec, const float* x, const float* residual, float* out, uint8_t* codes,
                     int32_t scale, int64_t n, int64_t position, Out form);
  void (*codes_sum)(const Codec* codec, const uint8_t* const* codes, const int32_t* const* scales, int64_t workers,
                    float* out, int64_t begin, int64_t end, int64_t block, bool stream);
  // The codes of m whole blocks: uint8[bits * width * m / 8], or one byte or int32 per element. `room`: 5 floats per element
  // of a block, at least 80. `first`: offset of x[0] from the rotation's start.
  void (*normal_blocks)(const Rotation* rotation, const Normal* how, const float* x, const float* residual, float* out,
                        uint8_t* codes, float* scales, int64_t n, int64_t first, float* room, Out form);
  void (*normal_sum)(const Rotation* rotation, const Normal* how, const uint8_t* const* codes,
                     const float* const* scales, const uint8_t* const* streams, int64_t workers, float* out,
                     int64_t begin, int64_t end, float* room, bool stream);
  void (*steps_blocks)(const Rotation* rotation, const Steps* how, const float* x, const float* norms, uint8_t* codes,
                       int64_t n, int64_t first, float* room);
  // rest = x - decoded `own`, then mean = decoded sums; mean may be x, and either may be null.
  void (*steps_values)(const Rotation* rotation, const Steps* how, const uint8_t* sums, const uint8_t* own,
                       const float* norms, const float* x, float* mean, float* rest, int64_t n, int64_t first,
                       float* room, bool stream);
  const MethodLoops* methods;
};

}  // namespace grace
