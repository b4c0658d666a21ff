// The interface between kernels.cc and loops.cc: a table of functions, which loops.cc fills once per instruction set.
#pragma once

#include <cstdint>

#define API extern "C" __attribute__((visibility("default")))

namespace grace {

// Noise for stochastic rounding. If `table` is null, rounding is to nearest, with ties to even.
struct Noise {
  const uint16_t* table;    // [65536]
  const uint16_t* offsets;  // one per segment of 65536 positions, beginning with segment `origin`
  int64_t origin;           // start / 65536
  int64_t start;            // the position of element 0
};

// The progress of `Loops::select`.
struct Found {
  int64_t read;   // elements read from x
  int64_t count;  // elements written to values and positions
};

// How a loop writes the new residual. NONE: not at all. KEPT: to out. STREAMED: to out, with streaming stores. SWAPPED:
// to out, which aliases residual, while x receives the old residual.
enum Out { NONE, KEPT, STREAMED, SWAPPED };

// qsgd: codes of 1 .. 8 bits hold the sign and a level in 0 .. `levels`, stochastically rounded with noise. terngrad
// (levels == 0): codes of 2 bits stand for -1, 0 and 1, drawn with the random words of key0 and key1.
struct Qsgd {
  int bits, levels;
  Noise noise;
  uint32_t key0, key1;
};

// Statistics of onebit: the number of elements below zero, their sum, and the sum of the other elements.
struct Halves {
  int64_t count;
  double below, rest;
};

// Kinds of codes. `grace.kernels.Codes` describes them and these fields of Codec: first, second, top, factor, table.
enum Kind : int32_t { BF16, FP8, NATURAL, DITHERED, NEAREST };
constexpr int32_t LOWEST = (127 - 24) << 7, BUCKETS = (127 << 7) - LOWEST + 1;  // upper 16 bits of floats 2^-24 .. 1

struct Codec {
  int32_t kind, bits, first, second, top, random;
  float factor;            // scale = largest magnitude * factor
  uint32_t key0, key1;     // keys of the random words
  const float* table;      // [2^bits]: the values of codes
  // [2 * BUCKETS]: an entry per bucket of positive floats, then of negative ones. A bucket holds the floats with equal
  // upper 16 bits. The upper 16 bits of an entry count the midpoints (between neighbouring table entries) below the
  // bucket. The encoder adds the lower 16 bits of a float, inverted if it is negative, to the entry. This carries into
  // the count if the float exceeds the midpoint inside the bucket.
  const uint32_t* buckets;
  Noise noise;
};

// A random rotation. width: elements per block on the wire. start: position of element 0 in the stream of random words.
struct Rotation {
  int64_t width, start;
  uint32_t key0, key1;
};

// eden: codes of `bits` bits. levels[2^bits]: the values of codes, ascending. middles[2^bits - 1]: the midpoints
// between them, or null for decoding. Rotation `stream` takes its signs from bit 31 - stream of the random words. A
// scale is the sum of |rotated element * level| / divisor; if divisor == 0, it is the unbiased scale.
struct Eden {
  int bits, stream;
  float divisor;
  const float *levels, *middles;
};

// thc: codes 0 .. `top` stand for equal steps from -cut to cut. A code is int32 if `wide`, else a byte. factor: when
// encoding, the number of steps per unit; when decoding, the size of one step.
struct Thc {
  int top, wide;
  float cut, factor;
  Noise noise;
};

// inceptionn: sends each element in 0, 8, 16 or 32 bits, with tag 0, 1, 2 or 3. one, two, three: the bits of the
// smallest magnitudes with tags 1, 2 and 3. steps: 7-bit magnitude = magnitude * steps.
struct Inceptionn {
  int32_t one, two, three;
  float steps;
};

// inceptionn: pointers to the next numbers of 32, 16 and 8 bits to decode.
struct Streams {
  const float* three;
  const uint8_t *two, *one;
};

// threelc: the next byte to decode, and the number of zeros of the previous run that are still to be written.
struct Runs {
  const uint8_t* next;
  int64_t zeros;
};

struct Excess {
  int64_t count;
  double sum, squares;
};

// Tables of the orthonormal cosine transform of size = 2^k * o elements, where o is odd. odd: the o x o matrix of the
// last stage, then its transpose. halves[count]: the symmetric matrices of the other stages, of sizes o, 2 o .. size /
// 2, one after the other. matrix: the whole transform, with rows padded to whole vectors.
struct Cosines {
  int64_t size, count;
  const float *odd, *halves, *matrix;
};

// A chunk of rows x columns elements, or, if `down` is null, `rows` chunks of one row each. down, across: the
// transforms along columns and along rows. At the edge of a matrix, only the first `height` rows exist, with `width`
// elements each and `last` elements in the last row; missing elements count as zeros. stride: distance between rows.
// next: distance to the next tile, or 0 if there is none.
struct Tile {
  const Cosines *down, *across;
  int64_t rows, columns, stride, height, width, last, next;
};

// The nonzero coefficients of a tile, in row order.
struct Terms {
  int64_t count;
  const int32_t *rows, *columns;
  const float* values;
};

// Loops that serve one method each (methods-inl.h, cosines-inl.h). The conventions of `Loops` apply.
struct MethodLoops {
  // sketch. order_keys: keys[n] = integers that compare like the floats x[n]. order_bins: for each key, add 2^40 + its
  // lower 16 bits to bins[(key >> 16) + 32768]; bins has 65536 entries, n < 2^24.
  void (*order_keys)(const float* x, int64_t n, int32_t* keys);
  void (*order_bins)(const float* x, int64_t n, uint64_t* bins);
  // sketch. Looks up codes: place = places[(key >> 16) + 32768], code = place & 255. Also writes the elements with
  // place >= 256 to values and positions, and returns their number. Both arrays need room for 16 elements more.
  int64_t (*order_codes)(const float* x, int64_t n, const uint16_t* places, int bits, uint8_t* codes, float* values,
                         int32_t* positions);
  // sketch. Encode: code = the number of bounds below the element's key. bounds[512] ascend; at most 2 * step - 1 are
  // used. Adds the elements of each code to sums[code], and their number to members[code].
  void (*sketch_emit)(const float* x, int64_t n, const int32_t* bounds, int step, int bits, uint8_t* codes, double* sums,
                      int64_t* members);
  // sketch. Average. tables[workers, 256]: the value of each code.
  void (*sketch_sum)(const uint8_t* const* codes, const float* tables, int bits, int64_t workers, float* out,
                     int64_t begin, int64_t end, bool stream);
  // adaq. out = v = x + residual. counts[0] += the number of elements v > 0, counts[1] += the number of elements v < 0.
  // Returns the bits of the largest magnitude.
  int32_t (*adaq_count)(const float* x, const float* residual, float* out, int64_t n, int64_t* counts);
  // inceptionn. Count: counts[3] = the numbers of elements that are sent in 32, 16 and 8 bits.
  void (*inceptionn_count)(const Inceptionn* how, const float* x, int64_t n, int64_t* counts);
  void (*inceptionn_emit)(const Inceptionn* how, const float* x, int64_t n, uint8_t* packed, float* three, uint8_t* two,
                          uint8_t* one);
  // inceptionn. Count packed tags: counts[3] += the numbers of elements that are sent in 32, 16 and 8 bits.
  void (*tags_count)(const uint8_t* packed, int64_t count, int64_t* counts);
  void (*inceptionn_sum)(const Inceptionn* how, const uint8_t* const* packed, Streams* from, int64_t workers, float* out,
                         int64_t begin, int64_t end, bool stream);
  // sidco. Returns the number of magnitudes above a bound, the sum of their excesses, and the sum of the squared
  // excesses.
  Excess (*excess)(const float* x, int64_t n, float bound);
  // demo. Transforms a tile of x + residual. Returns its coefficients, float32[rows, columns], which lie inside `room`.
  // room has space for four copies of the tile, with both sides padded to multiples of 16. The last bits of the
  // coefficients depend on the instruction set.
  const float* (*demo_of)(const Tile* tile, const float* x, const float* residual, float* room);
  // demo, for a tile. demo_left: out = x - decode(terms); if x is null, out = sum - decode(terms), where demo_of has
  // left sum = x + residual in `room`. demo_values: out = decode(terms), or its signs if `sign`.
  void (*demo_left)(const Tile* tile, const Terms* terms, const float* x, float* out, float* room);
  void (*demo_values)(const Tile* tile, const Terms* terms, float* out, float* room, bool sign, bool stream);
  // groups_largest: most[g] = the largest key at the positions congruent to g modulo `groups`, a multiple of 64.
  // bound_of: returns a bound such that exactly k of n keys are >= the bound; if ties prevent that, the k-th largest
  // key. n: a multiple of 16.
  void (*groups_largest)(const float* x, const float* residual, int64_t n, int64_t groups, int32_t* most);
  int32_t (*bound_of)(const int32_t* keys, int64_t n, int64_t k);
  // shared_int. Encode a block to integers, int32 if `wide`, else bytes. Decode: out = code / steps * scale; if x is
  // not null, out = x - code / steps * scale.
  void (*shared_int_emit)(const float* x, int64_t n, float scale, float top, const Noise* noise, int64_t first,
                          uint8_t* codes, bool wide);
  void (*shared_int_values)(const float* x, const uint8_t* codes, int64_t n, float scale, int64_t steps, float* out,
                            bool wide, bool stream);
  // grace.patch. Compare n <= 65536 words of `size` bytes: write the places of those that differ, their new values, and
  // steps = fresh - base. Returns their number.
  int64_t (*patch_diff)(const uint8_t* fresh, const uint8_t* base, int64_t n, int64_t size, uint16_t* places,
                        uint8_t* values, uint8_t* steps);
};

// Conventions. Pointers to floats need no alignment. residual may be null; otherwise it is added to x. A range of
// elements begins at a whole byte of the packed codes. stream: use streaming stores for out; since they are weakly
// ordered, the loop ends with a fence. NAME_blocks encodes many small blocks. NAME_emit encodes part of a large block,
// whose scale the caller has computed. NAME_sum averages the payloads of all workers for elements begin .. end.
struct Loops {
  const char* name;
  double (*efsignsgd_total)(const float* x, const float* residual, int64_t n);
  void (*efsignsgd_emit)(const float* x, const float* residual, float* out, uint8_t* bits, float scale, int64_t n,
                         Out form);
  void (*efsignsgd_blocks)(const float* x, const float* residual, float* out, uint8_t* bits, float* scales, int64_t n,
                           int64_t block, Out form);
  void (*efsignsgd_sum)(const uint8_t* const* bits, const float* const* scales, int64_t workers, float* out, int64_t begin,
                        int64_t end, int64_t block, bool stream);
  int32_t (*largest_magnitude)(const float* x, const float* residual, int64_t n);
  void (*blockint_emit)(const float* x, const float* residual, float* out, uint8_t* codes, float scale, int64_t n, int bits,
                        const Noise* noise, int64_t first, Out form);
  void (*blockint_blocks)(const float* x, const float* residual, float* out, uint8_t* codes, float* scales, int64_t n,
                          int64_t block, int bits, const Noise* noise, int64_t first, Out form);
  void (*blockint_sum)(const uint8_t* const* codes, const float* const* scales, int64_t workers, float* out, int64_t begin,
                       int64_t end, int64_t block, int bits, bool stream);
  // Select elements with key >= bound: write them to values, and first + index to positions. out, if written, receives
  // x + residual with zeros at these positions. key = min(bits of the magnitude, cap). Stops when values has room for
  // fewer than 16 elements.
  Found (*select)(const float* x, const float* residual, float* out, int64_t n, int32_t bound, int32_t cap, float* values,
                  int32_t* positions, int64_t capacity, int32_t first, Out form);
  void (*divide)(const float* x, float* out, int64_t n, int64_t divisor, bool stream);
  void (*words)(uint32_t key0, uint32_t key1, int64_t start, int64_t n, int32_t* out);
  // out = the inverted upper 31 bits of the random words, so that the smallest word gives the largest number.
  void (*inverse)(uint32_t key0, uint32_t key1, int64_t start, int64_t n, int32_t* out);
  void (*noise)(uint32_t key0, uint32_t key1, int64_t n, uint16_t* out);
  // out = x - p[rows, r] q[r, b], or p q if x is null. out may alias x.
  void (*lowrank_product)(const float* x, const float* p, const float* q, float* out, int64_t rows, int64_t b, int64_t r);
  // rest = x - p[rows, r] q[r, b], then x = p q. The bits equal those of two calls of lowrank_product.
  void (*lowrank_part)(float* x, const float* p, const float* q, float* rest, int64_t rows, int64_t b, int64_t r,
                       bool stream);
  // p[rows, r] = m[rows, b] q^T, with q[r, b]. If residual is not null, m += residual first.
  void (*lowrank_left)(float* m, const float* residual, const float* q, float* p, int64_t rows, int64_t b, int64_t r);
  // q[r, b] = p^T m, with p[rows, r] and m[rows, b], for columns begin .. end.
  void (*lowrank_right)(const float* m, const float* p, float* q, int64_t rows, int64_t b, int64_t r, int64_t begin,
                        int64_t end);
  // Returns the sum of ((x + residual) / largest)^2.
  double (*squares)(const float* x, const float* residual, int64_t n, float largest);
  void (*qsgd_emit)(const float* x, const float* residual, float* out, uint8_t* codes, float scale, int64_t n,
                    const Qsgd* how, int64_t first, Out form);
  void (*qsgd_blocks)(const float* x, const float* residual, float* out, uint8_t* codes, float* scales, int64_t n,
                      int64_t block, const Qsgd* how, int64_t first, Out form);
  void (*qsgd_sum)(const uint8_t* const* codes, const float* const* scales, int64_t workers, float* out,
                   int64_t begin, int64_t end, int64_t block, const Qsgd* how, bool stream);
  void (*signsgd_encode)(const float* x, uint8_t* bits, uint8_t* flags, int64_t n);
  void (*signsgd_sum)(const uint8_t* const* bits, const uint8_t* const* flags, int64_t workers, float* out, int64_t begin,
                      int64_t end, bool stream);
  Halves (*onebit_halves)(const float* x, const float* residual, int64_t n);
  void (*onebit_emit)(const float* x, const float* residual, float* out, uint8_t* bits, float below, float rest,
                      int64_t n, Out form);
  void (*onebit_sum)(const uint8_t* const* bits, const float* const* means, int64_t workers, float* out, int64_t begin,
                     int64_t end, int64_t block, bool stream);
  void (*threelc_emit)(const float* x, const float* residual, float* out, uint8_t* bytes, float scale, int64_t n);
  // from[workers]: where to read each worker's next byte; the loop advances it. runs: whether bytes from 243 on stand
  // for runs of zeros.
  void (*threelc_sum)(Runs* from, const float* const* scales, int64_t workers, float* out, int64_t begin, int64_t end,
                      int64_t block, bool runs, bool stream);
  // codes_largest: returns the statistic of a block, or of a part of it: the bits of the largest magnitude. NATURAL has
  // the largest exponent field after rounding, or 255 if an element is not finite; all fields are also written to
  // codes, where codes_emit reads them. codes_scale: returns a block's scale. largest: the largest statistic of its
  // parts. position: the position of x[0] in the stream of random words.
  int32_t (*codes_largest)(const Codec* codec, const float* x, const float* residual, uint8_t* codes, int64_t n,
                           int64_t position);
  int32_t (*codes_scale)(const Codec* codec, int32_t largest);
  void (*codes_emit)(const Codec* codec, const float* x, const float* residual, float* out, uint8_t* codes,
                     int32_t scale, int64_t n, int64_t position);
  void (*codes_sum)(const Codec* codec, const uint8_t* const* codes, const int32_t* const* scales, int64_t workers,
                    float* out, int64_t begin, int64_t end, int64_t block, bool stream);
  // Encode and average rotated blocks. codes cover m whole blocks: uint8[bits * width * m / 8] for eden; one byte, or
  // one int32 if `wide`, per element for thc. room: scratch of 5 floats per element of a block, at least 80 floats.
  // first: the offset of x[0] from element 0 of the rotation.
  void (*eden_blocks)(const Rotation* rotation, const Eden* how, const float* x, const float* residual, float* out,
                      uint8_t* codes, float* scales, int64_t n, int64_t first, float* room, Out form);
  void (*eden_sum)(const Rotation* rotation, const Eden* how, const uint8_t* const* codes,
                   const float* const* scales, const uint8_t* const* streams, int64_t workers, float* out,
                   int64_t begin, int64_t end, float* room, bool stream);
  void (*thc_blocks)(const Rotation* rotation, const Thc* how, const float* x, const float* norms, uint8_t* codes,
                     int64_t n, int64_t first, float* room);
  // Decode: out = the values of codes, or of sums of codes. If x is not null, out = x - these values.
  void (*thc_values)(const Rotation* rotation, const Thc* how, const float* x, const uint8_t* codes, const float* norms,
                     float* out, int64_t n, int64_t first, float* room, bool stream);
  const MethodLoops* methods;
};

}  // namespace grace
