// The C interface of the kernels. `python -m grace.kernels.schema` writes this file from schema.py.
//
// Arrays. Pointers are raw addresses of contiguous arrays of the given sizes. They need no alignment, and must not
// change during the call. Kernels check only payloads, because payloads come from the network.
//
// Arguments. n: number of elements; may be 0. block: number of elements that share a scale, a multiple of 8; 0 means
// that all elements share one. m: number of blocks. residual may be null: then v = x, otherwise v = x + residual. out
// may be null; otherwise out = v - decode(payload), the new residual, where a text does not say otherwise. out may
// alias x or residual. If swap != 0 and residual is not null, out must be the residual, and x receives the old
// residual. threads: how many threads share the work on more than 262,144 elements; no result depends on it.
//
// Results. -2 means out of memory. A kernel that checks payloads returns -1 if they are valid, otherwise the index of a
// worker whose payload is not.
#pragma once

#include <cstdint>

namespace grace {
struct Loops;
struct Codec;
}  // namespace grace

extern "C" {
// Returns whether this machine has an instruction set: "avx512", "avx2", "neon" or "scalar".
int64_t grace_supports(const char* isa);
// Returns the loops of an instruction set. Each instruction set has a library, which exports only this function.
const grace::Loops* grace_loops();
// Returns the name of the loops' instruction set.
const char* grace_name(const grace::Loops* loops);
// For tests: sets the smallest number of elements that are written with streaming stores. Returns the old number.
int64_t grace_stream_from(int64_t n);

// Encode the sign of each element (its bit is set if v >= 0) and the mean magnitude of each block. Method:
// grace.compressors.efsignsgd. bits: uint8[packed(1, n)]; scales: float32[blocks(n, block)].
void grace_efsignsgd_encode(const grace::Loops* loops, const float* x, const float* residual, float* out, uint8_t* bits,
                            float* scales, int64_t n, int64_t block, int64_t threads, int64_t swap);

// Average: out, float[n] = the mean of the workers' payloads of efsignsgd_encode.
void grace_efsignsgd_mean(const grace::Loops* loops, const uint8_t* const bits[], const float* const scales[],
                          int64_t workers, float* out, int64_t n, int64_t block, int64_t threads);

// Encode the sign of each element (its bit is set if v < 0), and for each block the mean of its negative elements and
// the mean of its other elements. Method: grace.compressors.onebit. bits: uint8[packed(1, n)]; means: float32[2 *
// blocks(n, block)].
void grace_onebit_encode(const grace::Loops* loops, const float* x, const float* residual, float* out, uint8_t* bits,
                         float* means, int64_t n, int64_t block, int64_t threads, int64_t swap);

// Average: out, float[n] = the mean of the workers' payloads of onebit_encode.
void grace_onebit_mean(const grace::Loops* loops, const uint8_t* const bits[], const float* const means[],
                       int64_t workers, float* out, int64_t n, int64_t block, int64_t threads);

// Encode integers of 8, 4 or 2 bits, relative to `scale`, the largest magnitude of the block. They are steps = v /
// scale * (2^(bits - 1) - 1), rounded to nearest if `table` is null. Otherwise `table` is uint16[65536], and rounding
// is stochastic: floor(steps + u), where u = (noise + 0.5) / 65536. Method: grace.compressors.blockint. The element at
// position p = start + j has noise = (table[p % 65536] + offsets[p / 65536 - start / 65536]) % 65536. codes:
// uint8[packed(bits, n)]; scales: float32[blocks(n, block)].
void grace_blockint_encode(const grace::Loops* loops, const float* x, const float* residual, float* out, uint8_t* codes,
                           float* scales, int64_t n, int64_t block, int64_t bits, const uint16_t* table,
                           const uint16_t* offsets, int64_t start, int64_t threads, int64_t swap);

// Average: out, float[n] = the mean of the workers' payloads of blockint_encode.
void grace_blockint_mean(const grace::Loops* loops, const uint8_t* const codes[], const float* const scales[],
                         int64_t workers, float* out, int64_t n, int64_t block, int64_t bits, int64_t threads);

// Encode codes of 1 .. 8 bits: the top bit is the sign; the other bits are a level, 0 .. `levels`, relative to the norm
// of the block and stochastically rounded with the noise of blockint_encode. Method: grace.compressors.qsgd. If levels
// = 0 and bits = 2, the codes are ternary numbers relative to the largest magnitude of the block, drawn with the keys'
// random words from position `start` on instead of `table`. Method: grace.compressors.terngrad. codes:
// uint8[packed(bits, n)]; scales: float32[blocks(n, block)].
void grace_qsgd_encode(const grace::Loops* loops, const float* x, const float* residual, float* out, uint8_t* codes,
                       float* scales, int64_t n, int64_t block, int64_t bits, int64_t levels, const uint16_t* table,
                       const uint16_t* offsets, int64_t start, int64_t key0, int64_t key1, int64_t threads,
                       int64_t swap);

// Average: out, float[n] = the mean of the workers' payloads of qsgd_encode.
void grace_qsgd_mean(const grace::Loops* loops, const uint8_t* const codes[], const float* const scales[],
                     int64_t workers, float* out, int64_t n, int64_t block, int64_t bits, int64_t levels,
                     int64_t threads);

// Encode the sign of each element (its bit is set if x >= 0), and one flag per 8192 elements, which says whether NaN or
// infinity is among them. The mean is a majority vote: 1 (also for a tie) or -1, and NaN for elements whose flag is set
// on any worker. Methods: grace.compressors.signsgd, signum. bits: uint8[packed(1, n)]; flags: uint8[blocks(n, 8192)].
void grace_signsgd_encode(const grace::Loops* loops, const float* x, uint8_t* bits, uint8_t* flags, int64_t n,
                          int64_t threads);

// Average: out, float[n] = the mean of the workers' payloads of signsgd_encode.
void grace_signsgd_mean(const grace::Loops* loops, const uint8_t* const bits[], const uint8_t* const flags[],
                        int64_t workers, float* out, int64_t n, int64_t threads);

// Encode ternary numbers, five per byte. Method: grace.compressors.threelc. block: a multiple of 40, or 0. If runs !=
// 0, one byte replaces a run of 2 .. 14 bytes of five zeros each. Returns the number of bytes to send. bytes:
// uint8[blocks(n, 5)]; scales: float32[blocks(n, block)].
int64_t grace_threelc_encode(const grace::Loops* loops, const float* x, const float* residual, float* out,
                             uint8_t* bytes, float* scales, int64_t n, int64_t block, float sparsity, int64_t runs,
                             int64_t threads);

// Average: out, float[n] = the mean of the workers' payloads of threelc_encode. Returns -1 on success, or the first
// worker whose payload is invalid.
int64_t grace_threelc_mean(const grace::Loops* loops, const uint8_t* const bytes[], const float* const scales[],
                           const int64_t counts[], int64_t workers, float* out, int64_t n, int64_t block, int64_t runs,
                           int64_t threads);

// Encode codes of few bits, of the kind that `codec` describes (grace.kernels.Codes). Methods: grace.compressors.bf16,
// fp8, natural, natural_dithering, dettmers8. start: position of x[0] in the stream of random words. The scales are the
// bits of float32 numbers; for "natural" they are int32 exponent fields, and "bfloat16" has none. codes:
// uint8[packed(8, n)]; scales: int32[blocks(n, block)].
void grace_codes_encode(const grace::Loops* loops, const grace::Codec* codec, const float* x, const float* residual,
                        float* out, uint8_t* codes, int32_t* scales, int64_t n, int64_t block, int64_t start,
                        int64_t threads);

// Average: out, float[n] = the mean of the workers' payloads of codes_encode.
void grace_codes_mean(const grace::Loops* loops, const grace::Codec* codec, const uint8_t* const codes[],
                      const int32_t* const scales[], int64_t workers, float* out, int64_t n, int64_t block,
                      int64_t threads);

// Encode elements as indices of q <= min(n, 256) buckets of equal population, and the mean of each bucket. Method:
// grace.compressors.sketch. sketch_mean writes NaN where any worker's code is q or larger. Returns 0 or -2. codes:
// uint8[packed(bits, n)]; means: float32[q].
int64_t grace_sketch_encode(const grace::Loops* loops, const float* x, uint8_t* codes, float* means, int64_t n,
                            int64_t q, int64_t bits, int64_t threads);

// Average: out, float[n] = the mean of the workers' payloads of sketch_encode.
void grace_sketch_mean(const grace::Loops* loops, const uint8_t* const codes[], const float* const means[],
                       int64_t workers, float* out, int64_t n, int64_t q, int64_t bits, int64_t threads);

// Encode: rotate each block at random, and round each element to the nearest of 2^bits levels. Method:
// grace.compressors.eden. width: number of elements per block, a power of two, at least 8; the last block is padded
// with zeros. A scale is the sum of |rotated element * level|, divided by `divisor`; if divisor = 0, it is the scale
// that makes the result unbiased. The rotation takes the keys' random words from position `start` on. codes:
// uint8[packed(bits, blocks(n, width) * width)]; scales: float32[blocks(n, width)]; streams: uint8[blocks(n, width)].
void grace_eden_encode(const grace::Loops* loops, const float* x, const float* residual, float* out, uint8_t* codes,
                       float* scales, uint8_t* streams, int64_t n, int64_t width, int64_t bits, const float levels[],
                       const float middles[], float divisor, int64_t stream, int64_t key0, int64_t key1, int64_t start,
                       int64_t threads, int64_t swap);

// Average: out, float[n] = the mean of the workers' payloads of eden_encode.
void grace_eden_mean(const grace::Loops* loops, const uint8_t* const codes[], const float* const scales[],
                     const uint8_t* const streams[], int64_t workers, float* out, int64_t n, int64_t width,
                     int64_t bits, const float levels[], int64_t key0, int64_t key1, int64_t start, int64_t threads);

// Compute norms[m] = the Euclidean norm of each block, as grace.ops.blocks.norms does. block > 0. Method:
// grace.compressors.thc.
void grace_thc_norms(const grace::Loops* loops, const float* x, float* norms, int64_t n, int64_t block,
                     int64_t threads);

// Encode: r = x / norm, rotated as in eden_encode and clipped to -cut .. cut. Then round (r + cut) * factor
// stochastically to 0 .. top, with the noise of blockint_encode. Method: grace.compressors.thc. codes[width * m]: int32
// if `wide`, else uint8.
void grace_thc_encode(const grace::Loops* loops, const float* x, const float* norms, uint8_t* codes, int64_t n,
                      int64_t width, int64_t top, int64_t wide, float cut, float factor, const uint16_t* table,
                      const uint16_t* offsets, int64_t key0, int64_t key1, int64_t start, int64_t threads);

// Decode codes, or sums of codes. factor: the size of one step. out = the decoded values; if x is not null, out = x -
// decoded values (the residual). out may alias x.
void grace_thc_values(const grace::Loops* loops, const float* x, const uint8_t* codes, const float* norms, float* out,
                      int64_t n, int64_t width, int64_t wide, float cut, float factor, int64_t key0, int64_t key1,
                      int64_t start, int64_t threads);

// Select the k <= n elements of largest magnitude, as xp.topk(xp.abs(v), k) does. positions ascend. out = v with zeros
// at these positions. Returns 0 or -2.
int64_t grace_topk_encode(const grace::Loops* loops, const float* x, const float* residual, float* out, float* values,
                          int32_t* positions, int64_t n, int64_t k, int64_t threads, int64_t swap);

// In each row of x[m, n], select the k <= n elements of largest magnitude. positions, int32[m, k], ascend in each row.
// Returns 0 or -2.
int64_t grace_topk_rows(const grace::Loops* loops, const float* x, int64_t m, int64_t n, int64_t k, int32_t* positions,
                        int64_t threads);

// Select the elements whose magnitude is at least `bound`, and those that are not finite. Method:
// grace.compressors.threshold. Returns the number of selected elements. values and positions have room for `capacity`
// elements; positions ascend. out = v with zeros at these positions. If the returned number exceeds `capacity`, values
// and positions are undefined and out = v, so call again with more room, and, if out is not null, with x = out and
// without residual.
int64_t grace_threshold_encode(const grace::Loops* loops, const float* x, const float* residual, float* out,
                               float bound, float* values, int32_t* positions, int64_t capacity, int64_t n,
                               int64_t threads);

// As threshold_encode, for the elements whose magnitude is not <= bound (NaN is among them). x is not changed.
int64_t grace_beyond(const grace::Loops* loops, const float* x, float bound, float* values, int32_t* positions,
                     int64_t capacity, int64_t n, int64_t threads);

// Compute found[3] = the number of magnitudes above `bound`, the sum of their excesses over it, and the sum of the
// squares of these excesses. Method: grace.compressors.sidco. Returns 0 or -2.
int64_t grace_excess(const grace::Loops* loops, const float* x, float bound, double* found, int64_t n, int64_t threads);

// Write to positions, int32[k], where the k smallest of n random words are, in ascending order. k <= n <= 2^31. Method:
// grace.compressors.randomk. Returns 0 or -2.
int64_t grace_smallest_words(const grace::Loops* loops, int64_t key0, int64_t key1, int64_t start, int64_t n, int64_t k,
                             int32_t* positions, int64_t threads);

// Select the elements that grace.compressors.selectors.Sampled selects, for methods topk and dgc. values and positions
// have room for `capacity` elements. Returns the number of selected elements; -2 if out of memory; -3 - count if
// `capacity` must be at least `count`. The sample is x[(word & 0x7fffffff) % n] for `sample` random words from position
// `start` on. Candidate bound j is factors[j] times the rank-th largest magnitude of the sample; factors[many] ascend,
// many <= 255. The kernel takes the bound that minimises |min(count, most) - k| + miss[j], where `count` elements
// exceed bound j. If first != 0, it first tries, to save time, only the higher bounds, from about the (3 * rank)-th
// largest magnitude of the sample on, and then all bounds if a lower one may be closer.
int64_t grace_sampled(const grace::Loops* loops, const float* x, int64_t n, int64_t key0, int64_t key1, int64_t start,
                      int64_t sample, int64_t rank, const float* factors, const float* miss, int64_t many,
                      int64_t first, int64_t k, int64_t most, float* values, int32_t* positions, int64_t capacity,
                      int64_t threads);

// Average: out, float[n] = the mean of the workers' vectors; worker w's vector has values[w] at positions[w] and zeros
// elsewhere. Returns -1 on success, or the first worker whose positions do not ascend within 0 .. n-1 (out is then
// undefined), or -2.
int64_t grace_sparse_mean(const grace::Loops* loops, const float* const values[], const int32_t* const positions[],
                          const int64_t counts[], int64_t workers, float* out, int64_t n, int64_t threads);

// Encode positions[k], which must ascend, in the Elias-Fano code ("elias_fano" in grace.ops.index_coding). The lowest
// `lower` bits of each position go to planes of up to 8 bits. The higher bits are coded in unary, in the first `marks`
// bits of `upper`. Returns the number of positions that fit, which is k on success.
int64_t grace_positions_write(const grace::Loops* loops, const int32_t* positions, int64_t k, int64_t lower,
                              uint8_t* const planes[], uint8_t* upper, int64_t marks);

// Decode what positions_write has written. Returns how many of the first `marks` bits of `upper` are set. positions are
// valid only if this number is k.
int64_t grace_positions_read(const grace::Loops* loops, const uint8_t* const planes[], const uint8_t* upper,
                             int64_t marks, int64_t k, int64_t lower, int32_t* positions);

// Encode the k elements of largest magnitude of each chunk, in two bits each. Method: grace.compressors.chunktopk.
// chunk: a power of two. k: a multiple of 8. low and high: the lower byte of an element's place in its chunk, and the
// higher bits; high is absent for chunks of up to 256 elements. Returns 0 or -2. low: uint8[chosen(n, chunk, k)]; high:
// uint8[packed(above(chunk), chosen(n, chunk, k))]; codes: uint8[packed(2, chosen(n, chunk, k))]; magnitudes: float32[2
// * blocks(n, chunk)].
int64_t grace_chunktopk_encode(const grace::Loops* loops, const float* x, const float* residual, float* out,
                               uint8_t* low, uint8_t* high, uint8_t* codes, float* magnitudes, int64_t n, int64_t chunk,
                               int64_t k, int64_t threads);

// Decode a payload of chunktopk_encode to values[K] at positions[K], where K elements were sent. Returns 1 if a
// position lies outside its chunk, else 0.
int64_t grace_chunktopk_values(const grace::Loops* loops, const uint8_t* low, const uint8_t* high, const uint8_t* codes,
                               const float* magnitudes, int64_t n, int64_t chunk, int64_t k, float* values,
                               int32_t* positions);

// Encode the k coefficients of largest magnitude of each chunk's cosine transform. Method: grace.compressors.demo. x,
// residual, out: float[a, b], in chunks [rows, columns] of up to 65536 elements. low and high: the lower byte of a
// coefficient's place in its chunk, and the higher bits; high is absent for chunks of up to 256 elements. The last bits
// of values depend on the instruction set; the result of demo_mean does not. Returns 0 or -2. In demo_mean, if senders
// != 0, each coefficient is divided by the number of workers that sent it, instead of by the number of workers; if sign
// != 0, the result is replaced by its signs; if a payload is invalid, out is unchanged. values: float32[blocks(a, rows)
// * blocks(b, columns) * k]; low: uint8[blocks(a, rows) * blocks(b, columns) * k]; high: uint8[packed(above(rows *
// columns), blocks(a, rows) * blocks(b, columns) * k)].
int64_t grace_demo_encode(const grace::Loops* loops, const float* x, const float* residual, float* out, float* values,
                          uint8_t* low, uint8_t* high, int64_t a, int64_t b, int64_t rows, int64_t columns, int64_t k,
                          int64_t threads);

// Average: out, float[n] = the mean of the workers' payloads of demo_encode. Returns -1 on success, the first worker
// whose payload is invalid, or -2.
int64_t grace_demo_mean(const grace::Loops* loops, const float* const values[], const uint8_t* const low[],
                        const uint8_t* const high[], int64_t workers, float* out, int64_t a, int64_t b, int64_t rows,
                        int64_t columns, int64_t k, int64_t senders, int64_t sign, int64_t threads);

// Compute the residual: out = x - decode(payload), for the payload of one worker. out may alias x. Returns -1 on
// success, 0 if positions do not ascend in their chunks, or -2.
int64_t grace_demo_left(const grace::Loops* loops, const float* x, const float* values, const uint8_t* low,
                        const uint8_t* high, float* out, int64_t a, int64_t b, int64_t rows, int64_t columns, int64_t k,
                        int64_t threads);

// Returns whether all elements of all vectors are finite: 1 or 0.
int64_t grace_finite(const grace::Loops* loops, const float* const vectors[], const int64_t counts[], int64_t many);

// Announce that the next calls of this thread write results of n elements in total; with n = 0, each call counts alone
// again. If the total exceeds the caches, the calls write results with streaming stores. Returns the previous n.
int64_t grace_gathered(const grace::Loops* loops, int64_t n);

// Generate: out[n] = random words from position `start` on, as grace.backends.random.Random.words does.
void grace_words(const grace::Loops* loops, int64_t key0, int64_t key1, int64_t start, int64_t n, int32_t* out,
                 int64_t threads);

// Generate: out[n] = the upper 16 bits of the random words at positions 0 .. n-1.
void grace_noise_table(const grace::Loops* loops, int64_t key0, int64_t key1, int64_t n, uint16_t* out);

// Derive keys: key0[n], key1[n] = grace.core.rng.keys of each stem, for a step and a worker.
void grace_stream_keys(const grace::Loops* loops, const int64_t* stems, int64_t n, int64_t step, int64_t worker,
                       int64_t* key0, int64_t* key1);

// Call a kernel once per row of words[many, width]. kernel: its index in GRACE_KERNELS. A row holds the kernel's
// arguments after `loops`, in 8 bytes each; smaller types take the lower bytes. results[many] = the return values of
// the calls, or -1 for a kernel that returns nothing. threads: how many threads make the calls. Returns 0, or -3 if no
// kernel has this index or `width` is not its number of arguments.
int64_t grace_rows(const grace::Loops* loops, int64_t kernel, const int64_t* words, int64_t width, int64_t many,
                   int64_t* results, int64_t threads);

// Multiply: out[a, b] = x - p[a, r] q[r, b], or out = p q if x is null. out may alias x.
void grace_lowrank_product(const grace::Loops* loops, const float* x, const float* p, const float* q, float* out,
                           int64_t a, int64_t b, int64_t r, int64_t threads);

// Split x: rest[a, b] = x - p[a, r] q[r, b], then x = p q. The results have the same bits as two calls of
// lowrank_product.
void grace_lowrank_part(const grace::Loops* loops, float* x, const float* p, const float* q, float* rest, int64_t a,
                        int64_t b, int64_t r, int64_t threads);

// Multiply: p[a, r] = m[a, b] q^T, with q[r, b]. If residual is not null, m += residual first.
void grace_lowrank_left(const grace::Loops* loops, float* m, const float* residual, const float* q, float* p, int64_t a,
                        int64_t b, int64_t r, int64_t threads);

// Multiply: q[r, b] = p^T m, with p[a, r] and m[a, b].
void grace_lowrank_right(const grace::Loops* loops, const float* m, const float* p, float* q, int64_t a, int64_t b,
                         int64_t r, int64_t threads);

// Count signs: signs[3] = the number of elements of v above zero, the number below zero, and the bits of the largest
// magnitude. If out is not null, out = v (not the residual). Returns 0, or -2, in which case nothing was written.
int64_t grace_adaq_count(const grace::Loops* loops, const float* x, const float* residual, float* out, int64_t* signs,
                         int64_t n, int64_t threads);

// Encode the elements of largest magnitude among the positive ones and among the negative ones, a share `ratio` of
// each, and means[2], the mean of each group. Method: grace.compressors.adaq. signs[3]: from adaq_count. sent:
// positions p in ascending order, stored as -1 - p for negative elements. left: null, or x, which becomes x -
// decode(payload). Returns the number of positions, or -2. If the number exceeds `capacity`, nothing was written to
// sent and left, so call again with room for that many positions.
int64_t grace_adaq_encode(const grace::Loops* loops, const float* x, const int64_t* signs, double ratio, float* means,
                          int32_t* sent, float* left, int64_t capacity, int64_t n);

// As sparse_mean, for payloads of adaq_encode: values[w] are two means. A position p >= 0 has the first mean; p < 0
// stands for position -1 - p with the second mean.
int64_t grace_adaq_mean(const grace::Loops* loops, const float* const values[], const int32_t* const positions[],
                        const int64_t counts[], int64_t workers, float* out, int64_t n, int64_t threads);

// Count numbers: starts, int64[ceil(n / 65536) + 1, 3] = how many numbers of 32, 16 and 8 bits precede each piece of
// 65536 elements; the last row has the totals. Method: grace.compressors.inceptionn. lowest, middle: exponents of the
// smallest magnitudes with 8 and 16 bits, -14 .. 0.
void grace_inceptionn_count(const grace::Loops* loops, const float* x, int64_t* starts, int64_t n, int64_t lowest,
                            int64_t middle, int64_t threads);

// Encode a tag of two bits per element, and the numbers of 32, 16 and 8 bits (`three`, `two`, `one`). starts: from
// inceptionn_count; its last row has the lengths of these three arrays.
void grace_inceptionn_encode(const grace::Loops* loops, const float* x, const int64_t* starts, uint8_t* tags,
                             float* three, uint8_t* two, uint8_t* one, int64_t n, int64_t lowest, int64_t middle,
                             int64_t threads);

// Average the workers' payloads of inceptionn_encode. counts, int64[workers, 3]: how many numbers of 32, 16 and 8 bits
// each worker sent. Returns -1 on success, or the first worker whose tags stand for other counts.
int64_t grace_inceptionn_mean(const grace::Loops* loops, const uint8_t* const tags[], const float* const three[],
                              const uint8_t* const two[], const uint8_t* const one[], const int64_t counts[],
                              int64_t workers, float* out, int64_t n, int64_t lowest, int64_t middle, int64_t threads);

// Encode codes = x / scale * top, stochastically rounded with the noise of blockint_encode. codes: int32[n] if wide !=
// 0, else int8[n]. Method: grace.compressors.shared_int.
void grace_shared_int_encode(const grace::Loops* loops, const float* x, const float* scales, uint8_t* codes, int64_t n,
                             int64_t block, int64_t top, int64_t wide, const uint16_t* table, const uint16_t* offsets,
                             int64_t start, int64_t threads);

// Decode: out = codes / steps * scale; if x is not null, out = x - this (the residual). out may alias x.
void grace_shared_int_values(const grace::Loops* loops, const float* x, const uint8_t* codes, const float* scales,
                             float* out, int64_t n, int64_t block, int64_t steps, int64_t wide, int64_t threads);

// Compare n words of `size` bytes (1, 2, 4 or 8). For those that differ, in each chunk of 65536 words: counts = their
// number, places = their offsets in the chunk, values = the new words, steps = fresh - base modulo the word's range.
// places, values and steps have room for n words. Returns the number of words that differ.
int64_t grace_patch_diff(const grace::Loops* loops, const uint8_t* fresh, const uint8_t* base, int32_t* counts,
                         uint16_t* places, uint8_t* values, uint8_t* steps, int64_t n, int64_t size);

// Step: x += steps at the places of all chunks; values = the results. Places must lie in x.
void grace_patch_step(const grace::Loops* loops, uint8_t* x, const int32_t* counts, const uint16_t* places,
                      const uint8_t* steps, uint8_t* values, int64_t chunks, int64_t size);

// Write: x = values at the places of all chunks, which must lie in x.
void grace_patch_write(const grace::Loops* loops, uint8_t* x, const int32_t* counts, const uint16_t* places,
                       const uint8_t* values, int64_t chunks, int64_t size);

// Encode steps of `size` bytes as zigzag codes, 2 step or -2 step - 1: out[(k + 1) / 2] = the codes in 4 bits each, the
// first in the lower ones; 15 stands for codes of 15 and more, which go to `large`, with room for k words. Returns
// their number.
int64_t grace_patch_nibbles(const grace::Loops* loops, const uint8_t* steps, uint8_t* out, uint8_t* large, int64_t k,
                            int64_t size);

// Decode what patch_nibbles has written, with `many` large codes. Returns 1, or 0 if their number is another; steps are
// undefined then.
int64_t grace_patch_unnibbles(const grace::Loops* loops, const uint8_t* sent, const uint8_t* large, uint8_t* steps,
                              int64_t k, int64_t many, int64_t size);

// Encode the places of each chunk in the Elias-Fano code (grace.patch.delta.write_places). Returns the number of bytes
// written.
int64_t grace_patch_places(const grace::Loops* loops, const int32_t* counts, const uint16_t* places, uint8_t* out,
                           int64_t chunks);

// Decode what patch_places has written for n words. counts, 0 .. 65536 each, must fit the size of `sent`. Returns 1; or
// 0 if places do not ascend within their chunks, in which case they are undefined.
int64_t grace_patch_unplaces(const grace::Loops* loops, const int32_t* counts, const uint8_t* sent, uint16_t* places,
                             int64_t chunks, int64_t n);
}  // extern "C"

// The kernels, in the order of their indices.
#define GRACE_KERNELS(X) \
  X(efsignsgd_encode) X(efsignsgd_mean) X(onebit_encode) X(onebit_mean) X(blockint_encode) X(blockint_mean) \
  X(qsgd_encode) X(qsgd_mean) X(signsgd_encode) X(signsgd_mean) X(threelc_encode) X(threelc_mean) X(codes_encode) \
  X(codes_mean) X(sketch_encode) X(sketch_mean) X(eden_encode) X(eden_mean) X(thc_norms) X(thc_encode) X(thc_values) \
  X(topk_encode) X(topk_rows) X(threshold_encode) X(beyond) X(excess) X(smallest_words) X(sampled) X(sparse_mean) \
  X(positions_write) X(positions_read) X(chunktopk_encode) X(chunktopk_values) X(demo_encode) X(demo_mean) \
  X(demo_left) X(finite) X(gathered) X(words) X(noise_table) X(stream_keys) X(rows) X(lowrank_product) \
  X(lowrank_part) X(lowrank_left) X(lowrank_right) X(adaq_count) X(adaq_encode) X(adaq_mean) X(inceptionn_count) \
  X(inceptionn_encode) X(inceptionn_mean) X(shared_int_encode) X(shared_int_values) X(patch_diff) X(patch_step) \
  X(patch_write) X(patch_nibbles) X(patch_unnibbles) X(patch_places) X(patch_unplaces)
