// The C interface of the kernels, written by `python -m grace.kernels.schema` from schema.py.
//
// Addresses are raw: arrays are contiguous and of the sizes given, aligned or not, and do not change meanwhile; only
// payloads that come from the network are checked. n: elements, 0 too; block: how many share a scale, a multiple of 8,
// or 0 for all; m: number of blocks. residual is added to x, if given: v is their sum. out takes what the payload does
// not carry of v, if given, and may be x or residual. With swap it must be the residual, if there is one, and x takes
// what that held. Work on more than 262,144 elements is split over threads, whose number changes no result.
#pragma once

#include <cstdint>

namespace grace {
struct Loops;
struct Codec;
}  // namespace grace

extern "C" {
// Whether this machine has an instruction set: "avx512", "avx2", "neon" or "scalar".
int64_t grace_supports(const char* isa);
// The loops of an instruction set: each has a library of its own, which exports nothing else.
const grace::Loops* grace_loops();
const char* grace_name(const grace::Loops* loops);
// For tests: from how many elements on results are written past the caches. Returns what it was.
int64_t grace_stream_from(int64_t n);

// Signs, v >= 0, and mean magnitudes: grace.compressors.efsignsgd. bits: uint8[packed(1, n)]; scales: float32[blocks(n,
// block)].
void grace_signs_encode(const grace::Loops* loops, const float* x, const float* residual, float* out, uint8_t* bits,
                        float* scales, int64_t n, int64_t block, int64_t threads, int64_t swap);

// out, float[n]: the mean of what workers sent, as signs_encode makes it.
void grace_signs_mean(const grace::Loops* loops, const uint8_t* const bits[], const float* const scales[],
                      int64_t workers, float* out, int64_t n, int64_t block, int64_t threads);

// Signs, v < 0, and the means of the negative and of the other elements: grace.compressors.onebit. bits:
// uint8[packed(1, n)]; means: float32[2 * blocks(n, block)].
void grace_halves_encode(const grace::Loops* loops, const float* x, const float* residual, float* out, uint8_t* bits,
                         float* means, int64_t n, int64_t block, int64_t threads, int64_t swap);

// out, float[n]: the mean of what workers sent, as halves_encode makes it.
void grace_halves_mean(const grace::Loops* loops, const uint8_t* const bits[], const float* const means[],
                       int64_t workers, float* out, int64_t n, int64_t block, int64_t threads);

// Integers of 8, 4 or 2 bits relative to each block's largest magnitude: grace.compressors.blockint. Rounds to nearest
// without a table, uint16[65536]; with it floor(steps + u), u = (noise + 0.5) / 65536, noise = (table[p % 65536] +
// offsets[p / 65536 - start / 65536]) % 65536 for the element at p = start + j. codes: uint8[packed(bits, n)]; scales:
// float32[blocks(n, block)].
void grace_ints_encode(const grace::Loops* loops, const float* x, const float* residual, float* out, uint8_t* codes,
                       float* scales, int64_t n, int64_t block, int64_t bits, const uint16_t* table,
                       const uint16_t* offsets, int64_t start, int64_t threads, int64_t swap);

// out, float[n]: the mean of what workers sent, as ints_encode makes it.
void grace_ints_mean(const grace::Loops* loops, const uint8_t* const codes[], const float* const scales[],
                     int64_t workers, float* out, int64_t n, int64_t block, int64_t bits, int64_t threads);

// Levels 0 .. `levels` relative to each block's norm, the sign in the top one of 1 .. 8 bits: grace.compressors.qsgd.
// Noise as of ints_encode. levels = 0, of 2 bits: ternary numbers relative to the largest magnitude, drawn by uniform
// numbers of the keys from `start` on, without a table: grace.compressors.terngrad. codes: uint8[packed(bits, n)];
// scales: float32[blocks(n, block)].
void grace_levels_encode(const grace::Loops* loops, const float* x, const float* residual, float* out, uint8_t* codes,
                         float* scales, int64_t n, int64_t block, int64_t bits, int64_t levels, const uint16_t* table,
                         const uint16_t* offsets, int64_t start, int64_t key0, int64_t key1, int64_t threads,
                         int64_t swap);

// out, float[n]: the mean of what workers sent, as levels_encode makes it.
void grace_levels_mean(const grace::Loops* loops, const uint8_t* const codes[], const float* const scales[],
                       int64_t workers, float* out, int64_t n, int64_t block, int64_t bits, int64_t levels,
                       int64_t threads);

// Signs, x >= 0, and flags of blocks that hold NaN or infinity: grace.compressors.signsgd. The mean is a vote. bits:
// uint8[packed(1, n)]; flags: uint8[blocks(n, 8192)].
void grace_votes_encode(const grace::Loops* loops, const float* x, uint8_t* bits, uint8_t* flags, int64_t n,
                        int64_t threads);

// out, float[n]: the mean of what workers sent, as votes_encode makes it.
void grace_votes_mean(const grace::Loops* loops, const uint8_t* const bits[], const uint8_t* const flags[],
                      int64_t workers, float* out, int64_t n, int64_t threads);

// Ternary numbers, five in a byte: grace.compressors.threelc. Returns how many bytes are sent, the first ones. block: a
// multiple of 40, or 0; runs: runs of zeros are written shortly. bytes: uint8[blocks(n, 5)]; scales: float32[blocks(n,
// block)].
int64_t grace_trits_encode(const grace::Loops* loops, const float* x, const float* residual, float* out, uint8_t* bytes,
                           float* scales, int64_t n, int64_t block, float sparsity, int64_t runs, int64_t threads,
                           int64_t swap);

// out, float[n]: the mean of what workers sent, as trits_encode makes it. -1, or the first worker whose payload is
// wrong.
int64_t grace_trits_mean(const grace::Loops* loops, const uint8_t* const bytes[], const float* const scales[],
                         const int64_t counts[], int64_t workers, float* out, int64_t n, int64_t block, int64_t runs,
                         int64_t threads);

// Floats of few bits, as grace::Codec says: grace.kernels.Codes. start: the position of x[0] among random words. Scales
// are float32 but for "natural", and absent for "bfloat16". codes: uint8[packed(8, n)]; scales: int32[blocks(n,
// block)].
void grace_codes_encode(const grace::Loops* loops, const grace::Codec* codec, const float* x, const float* residual,
                        float* out, uint8_t* codes, int32_t* scales, int64_t n, int64_t block, int64_t start,
                        int64_t threads, int64_t swap);

// out, float[n]: the mean of what workers sent, as codes_encode makes it.
void grace_codes_mean(const grace::Loops* loops, const grace::Codec* codec, const uint8_t* const codes[],
                      const int32_t* const scales[], int64_t workers, float* out, int64_t n, int64_t block,
                      int64_t threads);

// Buckets of equal population, q <= min(n, 256), and their means: grace.compressors.sketch. 0, or -2: no memory. In the
// mean of workers a code from q on is NaN. codes: uint8[packed(bits, n)]; means: float32[q].
int64_t grace_quantiles_encode(const grace::Loops* loops, const float* x, uint8_t* codes, float* means, int64_t n,
                               int64_t q, int64_t bits, int64_t threads);

// out, float[n]: the mean of what workers sent, as quantiles_encode makes it.
void grace_quantiles_mean(const grace::Loops* loops, const uint8_t* const codes[], const float* const means[],
                          int64_t workers, float* out, int64_t n, int64_t q, int64_t bits, int64_t threads);

// Blocks rotated at random and rounded to 2^bits levels: grace.compressors.eden. width: elements of a block, a power of
// two, at least 8; the last is filled up with zeros. Scales are sums of magnitudes over `divisor`, or, where that is 0,
// those without bias. Random words are those of the keys from `start` on. codes: uint8[packed(bits, blocks(n, width) *
// width)]; scales: float32[blocks(n, width)]; streams: uint8[blocks(n, width)].
void grace_normal_encode(const grace::Loops* loops, const float* x, const float* residual, float* out, uint8_t* codes,
                         float* scales, uint8_t* streams, int64_t n, int64_t width, int64_t bits, const float levels[],
                         const float middles[], float divisor, int64_t stream, int64_t key0, int64_t key1,
                         int64_t start, int64_t threads, int64_t swap);

// out, float[n]: the mean of what workers sent, as normal_encode makes it.
void grace_normal_mean(const grace::Loops* loops, const uint8_t* const codes[], const float* const scales[],
                       const uint8_t* const streams[], int64_t workers, float* out, int64_t n, int64_t width,
                       int64_t bits, const float levels[], int64_t key0, int64_t key1, int64_t start, int64_t threads);

// norms, float[m]: the norms of blocks, as grace.ops.blocks.norms; block is not 0.
void grace_norms(const grace::Loops* loops, const float* x, float* norms, int64_t n, int64_t block, int64_t threads);

// Blocks rotated as in normal_encode and rounded at random to steps 0 .. top: grace.compressors.thc. codes: uint8[width
// * m], int32 where they are wide; factor: steps in 1; noise as of ints_encode.
void grace_steps_encode(const grace::Loops* loops, const float* x, const float* norms, uint8_t* codes, int64_t n,
                        int64_t width, int64_t top, int64_t wide, float cut, float factor, const uint16_t* table,
                        const uint16_t* offsets, int64_t key0, int64_t key1, int64_t start, int64_t threads);

// rest = x - what `own` stands for, if it is given, then mean = what `sums` stand for, if they are. One of the codes is
// `factor`, or `own_factor`. rest and mean may be x, but not both.
void grace_steps_values(const grace::Loops* loops, const uint8_t* sums, const uint8_t* own, const float* norms,
                        const float* x, float* mean, float* rest, int64_t n, int64_t width, int64_t wide, float cut,
                        float factor, float own_factor, int64_t key0, int64_t key1, int64_t start, int64_t threads);

// The k <= n elements of largest magnitude, positions ascending: those of xp.topk(xp.abs(v), k). 0, or -2: no memory.
int64_t grace_topk_encode(const grace::Loops* loops, const float* x, const float* residual, float* out, float* values,
                          int32_t* positions, int64_t n, int64_t k, int64_t threads, int64_t swap);

// positions, int32[m, k]: of each row of x[m, n] the k <= n elements of largest magnitude, ascending. 0, or -2.
int64_t grace_topk_rows(const grace::Loops* loops, const float* x, int64_t m, int64_t n, int64_t k, int32_t* positions,
                        int64_t threads);

// How many elements have a magnitude of at least `bound`, or are not finite; these, to values and positions, ascending.
// Above `capacity` these hold nothing of use, and out, where given, holds all of v: call again with out as x, no
// residual, and more room. (Without out: the same again.)
int64_t grace_threshold_encode(const grace::Loops* loops, const float* x, const float* residual, float* out,
                               float bound, float* values, int32_t* positions, int64_t capacity, int64_t n,
                               int64_t threads);

// How many elements have a magnitude that is not at or below `bound`; so NaN too. Else as threshold_encode.
int64_t grace_beyond(const grace::Loops* loops, const float* x, float bound, float* values, int32_t* positions,
                     int64_t capacity, int64_t n, int64_t threads);

// last[n] becomes beta * last + gamma * x, and x what last was: one pass, after which the last state is still there.
// found[3], or null: `excess` of last, and 0. 0, or -2: no memory, and nothing was written.
int64_t grace_accumulate(const grace::Loops* loops, float* x, float* last, float beta, float gamma, double* found,
                         int64_t n, int64_t threads);

// found[3]: how many magnitudes exceed a bound, by how much in all, and the sum of those squares. 0, or -2.
int64_t grace_excess(const grace::Loops* loops, const float* x, float bound, double* found, int64_t n, int64_t threads);

// positions, int32[k]: those of the k <= n <= 2^31 smallest of n words, ascending. 0, or -2: no memory.
int64_t grace_smallest_words(const grace::Loops* loops, int64_t key0, int64_t key1, int64_t start, int64_t n, int64_t k,
                             int32_t* positions, int64_t threads);

// The elements that grace.compressors.selectors.Sampled chooses: how many, to values and positions; -2: no memory; -3 -
// count: these need room for so many. The sample's threshold is the rank-th largest magnitude of `sample` elements, at
// words from `start` on, without their signs, modulo n; candidates are it times factors[many], many <= 255, ascending;
// miss[many] is added to a candidate's distance from k. With `first` not all candidates are looked at first, but those
// from one on that about three times as many exceed: mostly one of these is chosen.
int64_t grace_sampled(const grace::Loops* loops, const float* x, int64_t n, int64_t key0, int64_t key1, int64_t start,
                      int64_t sample, int64_t rank, const float* factors, const float* miss, int64_t many,
                      int64_t first, int64_t k, int64_t most, float* values, int32_t* positions, int64_t capacity,
                      int64_t threads);

// grace.memories.dgc: u_out = momentum * u + x, v_out = v + u_out; with nesterov u_out = momentum * (u + x), v_out = v
// + (u_out + x). last, if given, takes v. Results may be what they are made from.
void grace_correct(const grace::Loops* loops, const float* x, const float* u, const float* v, float* u_out,
                   float* v_out, float* last, float momentum, int64_t nesterov, int64_t n, int64_t threads);

// out, float[n]: the mean of vectors with values at positions and zeros elsewhere. -1, or the first whose positions are
// not within 0 .. n-1 and ascending: out is then unfinished. -2: no memory.
int64_t grace_sparse_mean(const grace::Loops* loops, const float* const values[], const int32_t* const positions[],
                          const int64_t counts[], int64_t workers, float* out, int64_t n, int64_t threads);

// As sparse_mean, of workers that send `each` vectors, which are summed. Vectors that `pairs` marks (null: none) have
// only two values: a position p below 0 means position -1 - p with the second value.
int64_t grace_sparse_means(const grace::Loops* loops, const float* const values[], const int32_t* const positions[],
                           const int64_t counts[], const uint8_t* pairs, int64_t vectors, int64_t each, float* out,
                           int64_t n, int64_t threads);

// The k <= n largest magnitudes of the sum of sparse vectors with `count` values each: sums float[k], positions chosen
// int32[k], ascending. Returns -1, or the first vector whose positions are wrong; -2: no memory.
int64_t grace_largest_sums(const grace::Loops* loops, const float* const values[], const int32_t* const positions[],
                           int64_t vectors, int64_t count, float* sums, int32_t* chosen, int64_t n, int64_t k);

// Ascending positions in Elias's and Fano's code: the `lower` bits of positions[k] in planes of up to a byte each,
// those above as gaps, one after each mark, in upper[(marks + 7) / 8]. Returns for how many there was room: k, if all
// is well.
int64_t grace_positions_write(const grace::Loops* loops, const int32_t* positions, int64_t k, int64_t lower,
                              uint8_t* const planes[], uint8_t* upper, int64_t marks);

// The inverse of positions_write. Returns the number of marks; all positions are written only if it is k.
int64_t grace_positions_read(const grace::Loops* loops, const uint8_t* const planes[], const uint8_t* upper,
                             int64_t marks, int64_t k, int64_t lower, int32_t* positions);

// The k largest of each chunk in two bits each: grace.compressors.chunktopk. chunk: a power of two; k: a multiple of 8;
// high: absent for chunks of up to 256. 0, or -2: no memory. low: uint8[chosen(n, chunk, k)]; high:
// uint8[packed(above(chunk), chosen(n, chunk, k))]; codes: uint8[packed(2, chosen(n, chunk, k))]; magnitudes: float32[2
// * blocks(n, chunk)].
int64_t grace_chunks_encode(const grace::Loops* loops, const float* x, const float* residual, float* out, uint8_t* low,
                            uint8_t* high, uint8_t* codes, float* magnitudes, int64_t n, int64_t chunk, int64_t k,
                            int64_t threads, int64_t swap);

// The inverse of chunks_encode: values[K] and their positions[K]. 1 if a position is outside its chunk.
int64_t grace_chunks_values(const grace::Loops* loops, const uint8_t* low, const uint8_t* high, const uint8_t* codes,
                            const float* magnitudes, int64_t n, int64_t chunk, int64_t k, float* values,
                            int32_t* positions);

// The k largest coefficients of chunks' cosine transforms, and lower bytes of their places and what is above: absent
// for chunks of at most 256 of their up to 65536 elements: grace.compressors.demo. x, residual, out: float[a, b]. Last
// bits depend on the instruction set, but not those of means. 0, or -2: no memory. A mean with senders divides each
// coefficient by the number of workers that sent it, one with sign has the signs of all that; where a payload is wrong,
// out is as it was. values: float32[blocks(a, rows) * blocks(b, columns) * k]; low: uint8[blocks(a, rows) * blocks(b,
// columns) * k]; high: uint8[packed(above(rows * columns), blocks(a, rows) * blocks(b, columns) * k)].
int64_t grace_cosines_encode(const grace::Loops* loops, const float* x, const float* residual, float* out,
                             float* values, uint8_t* low, uint8_t* high, int64_t a, int64_t b, int64_t rows,
                             int64_t columns, int64_t k, int64_t threads, int64_t swap);

// out, float[n]: the mean of what workers sent, as cosines_encode makes it. -1, or the first worker whose payload is
// wrong.
int64_t grace_cosines_mean(const grace::Loops* loops, const float* const values[], const uint8_t* const low[],
                           const uint8_t* const high[], int64_t workers, float* out, int64_t a, int64_t b, int64_t rows,
                           int64_t columns, int64_t k, int64_t senders, int64_t sign, int64_t threads);

// out, which may be x: x minus one worker's payload. -1, or 0 if its positions do not ascend in their chunks; -2: no
// memory.
int64_t grace_cosines_left(const grace::Loops* loops, const float* x, const float* values, const uint8_t* low,
                           const uint8_t* high, float* out, int64_t a, int64_t b, int64_t rows, int64_t columns,
                           int64_t k, int64_t threads);

// Whether all elements of all vectors are finite.
int64_t grace_finite(const grace::Loops* loops, const float* const vectors[], const int64_t counts[], int64_t many);

// Announces that this thread now writes results of n elements in total; 0: each call writes results of its own. If the
// total exceeds the caches, results are written past them. Returns the former n.
int64_t grace_gathered(const grace::Loops* loops, int64_t n);

// Random words, as grace.backends.random.Random.words.
void grace_words(const grace::Loops* loops, int64_t key0, int64_t key1, int64_t start, int64_t n, int32_t* out,
                 int64_t threads);

// The upper halves of the words 0 .. n-1.
void grace_noise_table(const grace::Loops* loops, int64_t key0, int64_t key1, int64_t n, uint16_t* out,
                       int64_t threads);

// out[a, b] = x - p[a, r] q[r, b], or without x the product.
void grace_product(const grace::Loops* loops, const float* x, const float* p, const float* q, float* out, int64_t a,
                   int64_t b, int64_t r, int64_t threads);

// rest = x - taken_p taken_q, and x becomes p q.
void grace_part(const grace::Loops* loops, float* x, const float* p, const float* q, const float* taken_p,
                const float* taken_q, float* rest, int64_t a, int64_t b, int64_t r, int64_t threads);

// p[a, r] = m[a, b] times the transpose of q[r, b]; m becomes m + residual first, where that is given.
void grace_left(const grace::Loops* loops, float* m, const float* residual, const float* q, float* p, int64_t a,
                int64_t b, int64_t r, int64_t threads);

// q[r, b] = the transpose of p[a, r] times m[a, b]; m becomes m + residual first, where that is given.
void grace_right(const grace::Loops* loops, float* m, const float* residual, const float* p, float* q, int64_t a,
                 int64_t b, int64_t r, int64_t threads);

// signs[3]: the number of elements of v above zero, the number below zero, and the bits of the largest magnitude. out
// becomes v. 0, or -2: no memory, and nothing was written.
int64_t grace_signs_count(const grace::Loops* loops, const float* x, const float* residual, float* out, int64_t* signs,
                          int64_t n, int64_t threads, int64_t swap);

// How many elements grace.compressors.adaq sends, by signs[3] of signs_count: positions with a sign, and means[2]; -2:
// no memory. A result above `capacity` is the capacity needed. left, null or x, becomes x without these.
int64_t grace_largest_of_signs(const grace::Loops* loops, const float* x, const int64_t* signs, double ratio,
                               float* means, int32_t* sent, float* left, int64_t capacity, int64_t n);

// table, float[rows, width]: sums of elements with random signs: grace.compressors.sketch_sgd. words, int32[rows, group
// + ceil(n / group)]: of places in a group and of groups. group: up to 512, and width: powers of two, group <= width.
// 0, or -2: no memory.
int64_t grace_count_sketch(const grace::Loops* loops, const float* x, const int32_t* words, float* table, int64_t n,
                           int64_t rows, int64_t group, int64_t width, int64_t threads);

// out, float[n]: for each element the median of its estimates from the rows of a table. 0, or -2.
int64_t grace_count_sketch_estimate(const grace::Loops* loops, const float* table, const int32_t* words, float* out,
                                    int64_t n, int64_t rows, int64_t group, int64_t width, int64_t threads);

// starts, int64[ceil(n / 65536) + 1, 3]: how many numbers of 32, 16 and 8 bits come before each piece of 65536
// elements, and in all: grace.compressors.inceptionn. lowest, middle: exponents of the smallest that have 8 and 16
// bits, -14 .. 0.
void grace_tagged_count(const grace::Loops* loops, const float* x, int64_t* starts, int64_t n, int64_t lowest,
                        int64_t middle, int64_t threads);

// Tags and numbers; the last row of starts has the count of each kind.
void grace_tagged_encode(const grace::Loops* loops, const float* x, const int64_t* starts, uint8_t* tags, float* three,
                         uint8_t* two, uint8_t* one, int64_t n, int64_t lowest, int64_t middle, int64_t threads);

// counts, int64[workers, 3]: the numbers of each kind that workers sent. -1, or the first worker whose tags differ.
int64_t grace_tagged_mean(const grace::Loops* loops, const uint8_t* const tags[], const float* const three[],
                          const uint8_t* const two[], const uint8_t* const one[], const int64_t counts[],
                          int64_t workers, float* out, int64_t n, int64_t lowest, int64_t middle, int64_t threads);

// How many places grace.compressors.adacomp sends of bins of `size` elements. out, float[n], becomes v less what is
// sent; counts: uint8[bins]; places: uint8[n], of which the first are sent; scale[1].
int64_t grace_bins_encode(const grace::Loops* loops, const float* x, const float* residual, float* out, uint8_t* counts,
                          uint8_t* places, float* scale, int64_t n, int64_t size, int64_t threads);

// The mean of payloads; -1, or the first worker whose counts and places do not fit: out is then unfinished.
int64_t grace_bins_mean(const grace::Loops* loops, const uint8_t* const counts[], const uint8_t* const places[],
                        const float* const scales[], const int64_t sizes[], int64_t workers, float* out, int64_t n,
                        int64_t size, int64_t threads);

// How many elements grace.compressors.wangni sends always, and how many by chance, to kept[2]: positions and values of
// the former, of the others positions with a sign and magnitude[1]. Above the capacity of either nothing else is of
// use. 0, or -2: no memory.
int64_t grace_chances_encode(const grace::Loops* loops, const float* x, double wanted, int64_t iterations, int64_t key0,
                             int64_t key1, int64_t start, int32_t* certain, float* values, int32_t* drawn,
                             float* magnitude, int64_t capacity, int64_t* kept, int64_t n, int64_t threads);

// codes, int8[n], or int32[n] where they are wide: x / scale * top, by noise: grace.compressors.shared_int.
void grace_shared_encode(const grace::Loops* loops, const float* x, const float* scales, uint8_t* codes, int64_t n,
                         int64_t block, int64_t top, int64_t wide, const uint16_t* table, const uint16_t* offsets,
                         int64_t start, int64_t threads);

// out = codes / steps * scale, or x, which may be out, less that where x is not null.
void grace_shared_values(const grace::Loops* loops, const float* x, const uint8_t* codes, const float* scales,
                         float* out, int64_t n, int64_t block, int64_t steps, int64_t wide, int64_t threads);

// sums, float[rows, many]: of rows of x[n] of `size` elements with random signs, the top bits of words, int32[many,
// size]: grace.compressors.arctopk. 0, or -2: no memory.
int64_t grace_signed_sums(const grace::Loops* loops, const float* x, const int32_t* words, float* sums, int64_t n,
                          int64_t size, int64_t many, int64_t threads);
}  // extern "C"
