// The loops that are compiled once per instruction set (loops.cc), and the table through which kernels.cc calls them.
#pragma once

#include <cstdint>

#define API extern "C" __attribute__((visibility("default")))

namespace grace {

// Where the noise of stochastic rounding comes from; table == nullptr: round to nearest, halves to even.
struct Noise {
  const uint16_t* table;    // [65536]
  const uint16_t* offsets;  // one per 65536 positions, the first for the segment `origin`
  int64_t origin;           // start / 65536
  int64_t start;            // the position of element 0
};

// The finished part of a pass that compacts what is large.
struct Found {
  int64_t read;   // elements looked at
  int64_t count;  // of these written to values and positions
};

// What becomes of what the payload does not carry: it is not asked for; it goes to `out`; it goes there past the caches;
// it goes to the residual's own memory, which is `out`, and what was there goes to x.
enum Out { NONE, KEPT, STREAMED, SWAPPED };

// Codes of 1 .. 8 bits that stand for sign and level / levels, rounded up or down by noise; without levels those of 2 bits
// for -1, 0 and 1, drawn by numbers that are a hash of the keys and the position.
struct Levels {
  int bits, levels;
  Noise noise;
  uint32_t key0, key1;
};

// Of the elements below zero how many they are and their sum, and the sum of the others.
struct Halves {
  int64_t count;
  double below, rest;
};

// Floats of few bits, as `grace.kernels.Codes` has them.
enum Kind : int32_t { BF16, FP8, NATURAL, DITHERED, NEAREST };
constexpr int32_t LOWEST = (127 - 24) << 7, BUCKETS = (127 << 7) - LOWEST + 1;  // of the upper halves of magnitudes

struct Codec {
  int32_t kind, bits, first, second, top, random;
  float factor;            // the scale is the largest magnitude times that
  uint32_t key0, key1;     // of random words
  const float* table;      // [2^bits]: what codes stand for
  // [2 * BUCKETS], the latter half of negative ones: 65536 times how many middles between the table's entries are below the
  // bucket, and what makes the lower half of a float, of a negative one upside down, overflow where one more is.
  const uint32_t* buckets;
  Noise noise;
};

// Blocks that are rotated at random: their elements on the wire, and where in which random words element 0 is.
struct Rotation {
  int64_t width, start;
  uint32_t key0, key1;
};

// Codes for the levels of a normal distribution, ascending, with the middles between them. Bit 31 - `stream` of a random
// word is a sign; `divisor`: what a scale is the sum of magnitudes over, or 0.
struct Normal {
  int bits, stream;
  float divisor;
  const float *levels, *middles;
};

// Codes 0 .. `top` for equal steps from -cut to cut, a byte each or, where they are `wide`, four. `factor`: steps in 1, or
// what a step of the sums is; `own`: what one of a worker's own codes is.
struct Steps {
  int top, wide;
  float cut, factor, own;
  Noise noise;
};

// Numbers of 32, 16, 8 or 0 bits: the bits of the smallest magnitudes that have 8, 16 and 32 of them, and what 7 bits are
// multiplied with.
struct Tagged {
  int32_t one, two, three;
  float steps;
};

// Of a count sketch: neighbours that are hashed together, columns, both powers of two, and words of each row.
struct Groups {
  int64_t size, width, count;
};

// Where the next numbers of 32, 16 and 8 bits lie.
struct Streams {
  const float* three;
  const uint8_t *two, *one;
};

// The next bytes of five trits each, and how many elements of a run of zeros come before them.
struct Runs {
  const uint8_t* next;
  int64_t zeros;
};

struct Chances {
  int64_t count;
  double sum;
};

// The bits of magnitudes: of the largest, and of the smallest that is not 0.
struct Range {
  int32_t most, least;
};

// What probabilities are relative to, and from where on they are 1.
struct Unit {
  float largest, unit;
  bool near;  // Quotients<true> may be worked out (vectors-inl.h)
};

struct Excess {
  int64_t count;
  double sum, squares;
};

// The orthonormal cosine transform of `size` = 2^k * odd numbers. `odd`: of the matrix of `odd` numbers the first part
// that counts, and its transpose; `halves`, `count` elements: of sizes odd, 2 odd .. size / 2, square matrices one after
// the other, which are symmetric; `matrix`: all of it, rows of whole vectors.
struct Cosines {
  int64_t size, count;
  const float *odd, *halves, *matrix;
};

// A chunk; or, where `down` is null, several that have one row each, one below the other. Of its rows the first `height`
// are there, and of each of these `width` elements, of the last one `last`; the others are zeros. They are `stride` apart.
// `next`: how far away the next one is.
struct Tile {
  const Cosines *down, *across;
  int64_t rows, columns, stride, height, width, last, next;
};

// Coefficients that are not zero, row by row.
struct Terms {
  int64_t count;
  const int32_t *rows, *columns;
  const float* values;
};

// Loops of single methods (methods-inl.h), as of `Loops`.
struct MethodLoops {
  // Integers that compare as the floats do; and for each upper half of these 2^40 for each that has it, and the sum of
  // their lower halves, to bins[65536]. Of fewer than 2^24 elements.
  void (*order_keys)(const float* x, int64_t n, int32_t* keys);
  void (*order_bins)(const float* x, int64_t n, uint64_t* bins);
  // Codes by the upper halves; elements whose place is 256 more than a code, to values and positions, where 16 more are
  // spent. Returns how many these are.
  int64_t (*order_codes)(const float* x, int64_t n, const uint16_t* places, int bits, uint8_t* codes, float* values,
                         int32_t* positions);
  // How many of the ascending bounds are below each element, up to 2 step - 1, as codes; and what has each code: sums, and
  // how many. bounds[512].
  void (*quantile_emit)(const float* x, int64_t n, const int32_t* bounds, int step, int bits, uint8_t* codes, double* sums,
                        int64_t* members);
  // tables[workers, 256]: what codes stand for.
  void (*quantile_sum)(const uint8_t* const* codes, const float* tables, int bits, int64_t workers, float* out,
                       int64_t begin, int64_t end, bool stream);
  // out = x + residual. counts[2] += how many of these are above zero, and below; the largest magnitude's bits.
  int32_t (*signs_count)(const float* x, const float* residual, float* out, int64_t n, int64_t* counts, Out form);
  // table[width] += x, by words[size + groups]: those of places in a group, whose top bits are signs, and those of groups,
  // which tell the first one's column as well.
  void (*hashed_add)(const float* x, int64_t begin, int64_t end, const Groups* how, const int32_t* words, double* table);
  // The median over the rows of table[rows, width], whether that is finite; words[rows, count]; scratch[rows, 512].
  void (*hashed_estimate)(const float* table, int64_t rows, const Groups* how, const int32_t* words, int64_t begin,
                          int64_t end, bool finite, float* scratch, float* out);
  void (*tagged_count)(const Tagged* how, const float* x, int64_t n, int64_t* counts);  // of 32, 16 and 8 bits
  void (*tagged_emit)(const Tagged* how, const float* x, int64_t n, uint8_t* packed, float* three, uint8_t* two,
                      uint8_t* one);
  void (*tags_count)(const uint8_t* packed, int64_t count, int64_t* counts);  // likewise, added to these
  void (*tagged_sum)(const Tagged* how, const uint8_t* const* packed, Streams* from, int64_t workers, float* out,
                     int64_t begin, int64_t end, bool stream);
  // out = x + residual. What a bin sends: how many, and their places with the sign. total += the largest of each bin.
  int64_t (*bins_emit)(const float* x, const float* residual, float* out, int64_t n, int64_t size, uint8_t* counts,
                       uint8_t* places, double* total);
  Range (*range)(const float* x, int64_t n);
  // The sum of |x| / largest, where the unit is 0. Else how many of these reach it, and the sum of the others over it.
  Chances (*chances_sum)(const float* x, int64_t n, Unit unit);
  // What is always sent, and what is sent by chance: positions (first + index; -1 - position of what is negative), values,
  // and to kept[2] how many; room for 16 more than n. NaN as `largest` or `unit`: what is not finite is all that is sent.
  void (*chances_emit)(const float* x, int64_t n, Unit unit, uint32_t key0, uint32_t key1, int64_t start, int32_t first,
                       int32_t* certain, float* values, int32_t* drawn, int64_t* kept);
  // By how much magnitudes exceed a bound: how many do, the sum of it, and of its squares.
  Excess (*excess)(const float* x, int64_t n, float bound);
  Excess (*accumulate)(float* x, float* last, float beta, float gamma, int64_t n);  // as of `Loops`, and excess(last, n, 0)
  // The coefficients of a tile of x + residual, float32[rows, columns], in the room: memory for 4 floats for each element
  // of the tile, its sides filled up to multiples of 16. The last bits depend on the instruction set.
  const float* (*cosines_of)(const Tile* tile, const float* x, const float* residual, float* room);
  // out = what the terms do not carry of a tile of x; or, where there is a residual, of x + residual, which must still lie
  // in the room, as of cosines_of.
  void (*cosines_left)(const Tile* tile, const Terms* terms, const float* x, const float* residual, float* out, float* room,
                       Out form);
  void (*cosines_values)(const Tile* tile, const Terms* terms, float* out, float* room, bool sign, bool stream);
  // The largest key of each of `groups` groups of elements, a multiple of 64, and a bound that k of n keys reach, or the
  // k-th largest of them; n: a multiple of 16.
  void (*groups_largest)(const float* x, const float* residual, int64_t n, int64_t groups, int32_t* most);
  int32_t (*bound_of)(const int32_t* keys, int64_t n, int64_t k);
  // Integers of a block, bytes or int32 where they are `wide`, and what they stand for: `steps` of them are the scale. out =
  // that, or x less that where x is not null.
  void (*shared_emit)(const float* x, int64_t n, float scale, float top, const Noise* noise, int64_t first, uint8_t* codes,
                      bool wide);
  void (*shared_values)(const float* x, const uint8_t* codes, int64_t n, float scale, int64_t steps, float* out, bool wide,
                        bool stream);
  // sums[rows, many]: of rows of `size` elements, the last one shorter; the top bits of words[many, width] are the signs.
  // width: `size` filled up to whole vectors.
  void (*signed_sums)(const float* x, int64_t n, int64_t size, const int32_t* words, int64_t width, int64_t many,
                      float* sums);
};

// x, residual, out: float32; residual may be null. `stream`: write past the caches. Ranges of elements and pointers to
// packed bytes begin at whole bytes. No alignment is assumed. Non-temporal stores are weakly ordered: a fence ends every
// loop that made some.
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
  // Elements whose key, the bits of their magnitude as an integer but at most `cap`, reaches `bound`: to values and
  // positions (first + index), and a zero in their place in out (may be null). Stops when fewer than 16 places are free.
  Found (*select)(const float* x, const float* residual, float* out, int64_t n, int32_t bound, int32_t cap, float* values,
                  int32_t* positions, int64_t capacity, int32_t first, Out form);
  void (*accumulate)(float* x, float* last, float beta, float gamma, int64_t n);  // last = beta last + gamma x; x = last
  void (*divide)(const float* x, float* out, int64_t n, int64_t divisor, bool stream);
  void (*words)(uint32_t key0, uint32_t key1, int64_t start, int64_t n, int32_t* out);
  // The upper 31 bits of the words, upside down: the smallest word is the largest of these.
  void (*inverse)(uint32_t key0, uint32_t key1, int64_t start, int64_t n, int32_t* out);
  void (*noise)(uint32_t key0, uint32_t key1, int64_t n, uint16_t* out);
  // out = x - p[rows, r] q[r, b], or p q where x is null; out may be x.
  void (*product)(const float* x, const float* p, const float* q, float* out, int64_t rows, int64_t b, int64_t r);
  // rest = x - taken_p[rows, r] taken_q[r, b], and x becomes p q: what two calls of product give.
  void (*part)(float* x, const float* p, const float* q, const float* taken_p, const float* taken_q, float* rest,
               int64_t rows, int64_t b, int64_t r, bool stream);
  // p[rows, r] = m[rows, b] times the transpose of q[r, b]; m becomes m + residual first, unless that is null.
  void (*left)(float* m, const float* residual, const float* q, float* p, int64_t rows, int64_t b, int64_t r);
  // Columns begin .. end of q[r, b] = the transpose of p[rows, r] times m[rows, b]; m becomes m + residual there first,
  // unless that is null.
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
  // `from`, of each worker, moves on.
  void (*trits_sum)(Runs* from, const float* const* scales, int64_t workers, float* out, int64_t begin, int64_t end,
                    int64_t block, bool runs, bool stream);
  // u_out = momentum * u + g, v_out = v + u_out; nesterov: u_out = momentum * (u + g), v_out = v + (u_out + g). last,
  // if not null, takes v. stream: of u_out.
  void (*correct)(const float* g, const float* u, const float* v, float* u_out, float* v_out, float* last,
                  float momentum, bool nesterov, int64_t n, bool stream);
  // The statistic of a block; codes_scale makes of it, or of the largest of several, what is sent. `position`: of x[0].
  int32_t (*codes_largest)(const Codec* codec, const float* x, const float* residual, uint8_t* codes, int64_t n,
                           int64_t position);
  int32_t (*codes_scale)(const Codec* codec, int32_t largest);
  void (*codes_emit)(const Codec* codec, const float* x, const float* residual, float* out, uint8_t* codes,
                     int32_t scale, int64_t n, int64_t position, Out form);
  void (*codes_sum)(const Codec* codec, const uint8_t* const* codes, const int32_t* const* scales, int64_t workers,
                    float* out, int64_t begin, int64_t end, int64_t block, bool stream);
  // The codes of whole blocks, m of them: uint8[bits * width * m / 8], or a byte or int32 for each element. `room`: for 5
  // floats for each element of a block, or at least 80. `first`: the place of x[0] behind the rotation's start.
  void (*normal_blocks)(const Rotation* rotation, const Normal* how, const float* x, const float* residual, float* out,
                        uint8_t* codes, float* scales, int64_t n, int64_t first, float* room, Out form);
  void (*normal_sum)(const Rotation* rotation, const Normal* how, const uint8_t* const* codes,
                     const float* const* scales, const uint8_t* const* streams, int64_t workers, float* out,
                     int64_t begin, int64_t end, float* room, bool stream);
  void (*steps_blocks)(const Rotation* rotation, const Steps* how, const float* x, const float* norms, uint8_t* codes,
                       int64_t n, int64_t first, float* room);
  // rest = x - what `own` stands for, and then mean, which may be x, = what the sums do; either may be null.
  void (*steps_values)(const Rotation* rotation, const Steps* how, const uint8_t* sums, const uint8_t* own,
                       const float* norms, const float* x, float* mean, float* rest, int64_t n, int64_t first,
                       float* room, bool stream);
  const MethodLoops* methods;
};

}  // namespace grace
