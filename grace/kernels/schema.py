"""The C interface of the kernels, one row each; ``python -m grace.kernels.schema`` writes the header `api.h` from it.

`grace.kernels.Library` takes its signatures from here, and `grace.kernels.calls` the sizes of payload arrays. To add a
kernel, add a row here and its C++ loop.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

from grace.kernels.declarations import (
    CODECS,
    KERNELS,
    KEYS,
    NOISE,
    SOURCE,
    SWAP,
    THREADS,
    VALUES,
    Argument,
    Kernel,
    blocks,
    codec,
    kernel,
)

__all__ = ["CODECS", "HEADER", "KERNELS", "Kernel", "blocks", "header"]

HEADER = Path(__file__).with_name("api.h")


def unordered(worker: int, n: int, **_: Any) -> str:
    """Returns the error text for a sparse vector with invalid positions."""
    return f"worker {worker} sent positions that do not ascend within 0 .. {n - 1}"


def misplaced(worker: int, **_: Any) -> str:
    """Returns the error text for places that do not ascend in their chunks."""
    return f"worker {worker} sent places that do not ascend in their chunks"


# ---- quantisers ----

SCALES = "float32[blocks(n, block)]"
codec(
    "efsignsgd",
    {"bits": "uint8[packed(1, n)]", "scales": SCALES},
    "int64_t block",
    """Encode the sign of each element (its bit is set if v >= 0) and the mean magnitude of each block. Method:
    grace.compressors.efsignsgd.""",
    swaps=True,
)
codec(
    "onebit",
    {"bits": "uint8[packed(1, n)]", "means": "float32[2 * blocks(n, block)]"},
    "int64_t block",
    """Encode the sign of each element (its bit is set if v < 0), and for each block the mean of its negative elements
    and the mean of its other elements. Method: grace.compressors.onebit.""",
    swaps=True,
)
codec(
    "blockint",
    {"codes": "uint8[packed(bits, n)]", "scales": SCALES},
    "int64_t block, int64_t bits",
    """Encode integers of 8, 4 or 2 bits, relative to `scale`, the largest magnitude of the block. They are steps = v /
    scale * (2^(bits - 1) - 1), rounded to nearest if `table` is null. Otherwise `table` is uint16[65536], and rounding
    is stochastic: floor(steps + u), where u = (noise + 0.5) / 65536. Method: grace.compressors.blockint. The element at
    position p = start + j has noise = (table[p % 65536] + offsets[p / 65536 - start / 65536]) % 65536.""",
    encode=f"int64_t block, int64_t bits, {NOISE}",
    swaps=True,
)
codec(
    "qsgd",
    {"codes": "uint8[packed(bits, n)]", "scales": SCALES},
    "int64_t block, int64_t bits, int64_t levels",
    """Encode codes of 1 .. 8 bits: the top bit is the sign; the other bits are a level, 0 .. `levels`, relative to the
    norm of the block and stochastically rounded with the noise of blockint_encode. Method: grace.compressors.qsgd. If
    levels = 0 and bits = 2, the codes are ternary numbers relative to the largest magnitude of the block, drawn with
    the keys' random words from position `start` on instead of `table`. Method: grace.compressors.terngrad.""",
    encode=f"int64_t block, int64_t bits, int64_t levels, {NOISE}, int64_t key0 = 0, int64_t key1 = 0",
    swaps=True,
)
codec(
    "signsgd",
    {"bits": "uint8[packed(1, n)]", "flags": "uint8[blocks(n, 8192)]"},
    "",
    """Encode the sign of each element (its bit is set if x >= 0), and one flag per 8192 elements, which says whether
    NaN or infinity is among them. The mean is a majority vote: 1 (also for a tie) or -1, and NaN for elements whose
    flag is set on any worker. Methods: grace.compressors.signsgd, signum.""",
    source="const float* x",
)
codec(
    "threelc",
    {"bytes": "uint8[blocks(n, 5)]", "scales": SCALES},
    "int64_t block, int64_t runs",
    """Encode ternary numbers, five per byte. Method: grace.compressors.threelc. block: a multiple of 40, or 0. If runs
    != 0, one byte replaces a run of 2 .. 14 bytes of five zeros each. Returns the number of bytes to send.""",
    encode="int64_t block, float sparsity, int64_t runs",
    result="int64_t",
    counts=True,
    refusal=lambda worker, n, **_: f"worker {worker} sent runs that do not expand to {-(-n // 5)} bytes",
)
codec(
    "codes",
    {"codes": "uint8[packed(8, n)]", "scales": "int32[blocks(n, block)]"},
    "int64_t block",
    """Encode codes of few bits, of the kind that `codec` describes (grace.kernels.Codes). Methods:
    grace.compressors.bf16, fp8, natural, natural_dithering, dettmers8. start: position of x[0] in the stream of random
    words. The scales are the bits of float32 numbers; for "natural" they are int32 exponent fields, and "bfloat16" has
    none.""",
    encode="int64_t block, int64_t start = 0",
    first="const grace::Codec* codec",
)
codec(
    "sketch",
    {"codes": "uint8[packed(bits, n)]", "means": "float32[q]"},
    "int64_t q, int64_t bits",
    """Encode elements as indices of q <= min(n, 256) buckets of equal population, and the mean of each bucket. Method:
    grace.compressors.sketch. sketch_mean writes NaN where any worker's code is q or larger. Returns 0 or -2.""",
    source="const float* x",
    result="int64_t",
    memory=True,
)
ROTATED = "int64_t width, int64_t bits, const float levels[]"
codec(
    "eden",
    {
        "codes": "uint8[packed(bits, blocks(n, width) * width)]",
        "scales": "float32[blocks(n, width)]",
        "streams": "uint8[blocks(n, width)]",
    },
    "int64_t width, int64_t bits",
    """Encode: rotate each block at random, and round each element to the nearest of 2^bits levels. Method:
    grace.compressors.eden. width: number of elements per block, a power of two, at least 8; the last block is padded
    with zeros. A scale is the sum of |rotated element * level|, divided by `divisor`; if divisor = 0, it is the scale
    that makes the result unbiased. The rotation takes the keys' random words from position `start` on.""",
    encode=f"{ROTATED}, const float middles[], float divisor, int64_t stream, {KEYS} = 0",
    mean=f"{ROTATED}, {KEYS} = 0",
    swaps=True,
)
kernel(
    "void thc_norms(const float* x, float* norms, int64_t n, int64_t block, int64_t threads = 1)",
    """Compute norms[m] = the Euclidean norm of each block, as grace.ops.blocks.norms does. block > 0. Method:
    grace.compressors.thc.""",
)
STEPS = "int64_t n, int64_t width, int64_t top, int64_t wide, float cut, float factor"
kernel(
    "void thc_encode(const float* x, const float* norms, uint8_t* codes, "
    f"{STEPS}, const uint16_t* table, const uint16_t* offsets, {KEYS} = 0, {THREADS})",
    """Encode: r = x / norm, rotated as in eden_encode and clipped to -cut .. cut. Then round (r + cut) * factor
    stochastically to 0 .. top, with the noise of blockint_encode. Method: grace.compressors.thc. codes[width * m]:
    int32 if `wide`, else uint8.""",
)
kernel(
    "void thc_values(const float* x, const uint8_t* codes, const float* norms, float* out, int64_t n, int64_t width, "
    f"int64_t wide, float cut, float factor, {KEYS} = 0, {THREADS})",
    """Decode codes, or sums of codes. factor: the size of one step. out = the decoded values; if x is not null, out = x
    - decoded values (the residual). out may alias x.""",
)

# ---- large elements ----

kernel(
    f"int64_t topk_encode({SOURCE}, {VALUES}, int64_t n, int64_t k, {SWAP})",
    """Select the k <= n elements of largest magnitude, as xp.topk(xp.abs(v), k) does. positions ascend. out = v with
    zeros at these positions. Returns 0 or -2.""",
    memory=True,
)
kernel(
    f"int64_t topk_rows(const float* x, int64_t m, int64_t n, int64_t k, int32_t* positions, {THREADS})",
    """In each row of x[m, n], select the k <= n elements of largest magnitude. positions, int32[m, k], ascend in each
    row. Returns 0 or -2.""",
    memory=True,
)
kernel(
    f"int64_t threshold_encode({SOURCE}, float bound, {VALUES}, int64_t capacity, int64_t n, {THREADS})",
    """Select the elements whose magnitude is at least `bound`, and those that are not finite. Method:
    grace.compressors.threshold. Returns the number of selected elements. values and positions have room for `capacity`
    elements; positions ascend. out = v with zeros at these positions. If the returned number exceeds `capacity`, values
    and positions are undefined and out = v, so call again with more room, and, if out is not null, with x = out and
    without residual.""",
)
kernel(
    f"int64_t beyond(const float* x, float bound, {VALUES}, int64_t capacity, int64_t n, {THREADS})",
    "As threshold_encode, for the elements whose magnitude is not <= bound (NaN is among them). x is not changed.",
)
kernel(
    f"int64_t excess(const float* x, float bound, double* found, int64_t n, {THREADS})",
    """Compute found[3] = the number of magnitudes above `bound`, the sum of their excesses over it, and the sum of the
    squares of these excesses. Method: grace.compressors.sidco. Returns 0 or -2.""",
    memory=True,
)
kernel(
    f"int64_t smallest_words({KEYS}, int64_t n, int64_t k, int32_t* positions, {THREADS})",
    """Write to positions, int32[k], where the k smallest of n random words are, in ascending order. k <= n <= 2^31.
    Method: grace.compressors.randomk. Returns 0 or -2.""",
    memory=True,
)
kernel(
    f"int64_t sampled(const float* x, int64_t n, {KEYS}, int64_t sample, int64_t rank, const float* factors, "
    "const float* miss, int64_t many, int64_t first, int64_t k, int64_t most, "
    f"{VALUES}, int64_t capacity, {THREADS})",
    """Select the elements that grace.compressors.selectors.Sampled selects, for methods topk and dgc. values and
    positions have room for `capacity` elements. Returns the number of selected elements; -2 if out of memory; -3 -
    count if `capacity` must be at least `count`. The sample is x[(word & 0x7fffffff) % n] for `sample` random words
    from position `start` on. Candidate bound j is factors[j] times the rank-th largest magnitude of the sample;
    factors[many] ascend, many <= 255. The kernel takes the bound that minimises |min(count, most) - k| + miss[j], where
    `count` elements exceed bound j. If first != 0, it first tries, to save time, only the higher bounds, from about the
    (3 * rank)-th largest magnitude of the sample on, and then all bounds if a lower one may be closer.""",
    memory=True,
)
PAIRS = "const float* const values[], const int32_t* const positions[]"
kernel(
    f"int64_t sparse_mean({PAIRS}, const int64_t counts[], int64_t workers, float* out, int64_t n, {THREADS})",
    """Average: out, float[n] = the mean of the workers' vectors; worker w's vector has values[w] at positions[w] and
    zeros elsewhere. Returns -1 on success, or the first worker whose positions do not ascend within 0 .. n-1 (out is
    then undefined), or -2.""",
    refusal=unordered,
    memory=True,
)
kernel(
    "int64_t positions_write(const int32_t* positions, int64_t k, int64_t lower, uint8_t* const planes[], "
    "uint8_t* upper, "
    "int64_t marks)",
    """Encode positions[k], which must ascend, in the Elias-Fano code ("elias_fano" in grace.ops.index_coding). The
    lowest `lower` bits of each position go to planes of up to 8 bits. The higher bits are coded in unary, in the first
    `marks` bits of `upper`. Returns the number of positions that fit, which is k on success.""",
)
kernel(
    "int64_t positions_read(const uint8_t* const planes[], const uint8_t* upper, int64_t marks, int64_t k, "
    "int64_t lower, "
    "int32_t* positions)",
    """Decode what positions_write has written. Returns how many of the first `marks` bits of `upper` are set. positions
    are valid only if this number is k.""",
)
codec(
    "chunktopk",
    {
        "low": "uint8[chosen(n, chunk, k)]",
        "high": "uint8[packed(above(chunk), chosen(n, chunk, k))]",
        "codes": "uint8[packed(2, chosen(n, chunk, k))]",
        "magnitudes": "float32[2 * blocks(n, chunk)]",
    },
    "int64_t chunk, int64_t k",
    """Encode the k elements of largest magnitude of each chunk, in two bits each. Method: grace.compressors.chunktopk.
    chunk: a power of two. k: a multiple of 8. low and high: the lower byte of an element's place in its chunk, and the
    higher bits; high is absent for chunks of up to 256 elements. Returns 0 or -2.""",
    result="int64_t",
    memory=True,
    means=False,
)
kernel(
    "int64_t chunktopk_values(const uint8_t* low, const uint8_t* high, const uint8_t* codes, const float* magnitudes, "
    f"int64_t n, int64_t chunk, int64_t k, {VALUES})",
    """Decode a payload of chunktopk_encode to values[K] at positions[K], where K elements were sent. Returns 1 if a
    position lies outside its chunk, else 0.""",
)
SENT = "blocks(a, rows) * blocks(b, columns) * k"
codec(
    "demo",
    {"values": f"float32[{SENT}]", "low": f"uint8[{SENT}]", "high": f"uint8[packed(above(rows * columns), {SENT})]"},
    "int64_t k",
    """Encode the k coefficients of largest magnitude of each chunk's cosine transform. Method: grace.compressors.demo.
    x, residual, out: float[a, b], in chunks [rows, columns] of up to 65536 elements. low and high: the lower byte of a
    coefficient's place in its chunk, and the higher bits; high is absent for chunks of up to 256 elements. The last
    bits of values depend on the instruction set; the result of demo_mean does not. Returns 0 or -2. In demo_mean, if
    senders != 0, each coefficient is divided by the number of workers that sent it, instead of by the number of
    workers; if sign != 0, the result is replaced by its signs; if a payload is invalid, out is unchanged.""",
    mean="int64_t k, int64_t senders = 0, int64_t sign = 0",
    size="int64_t a, int64_t b, int64_t rows, int64_t columns",
    result="int64_t",
    refusal=misplaced,
    memory=True,
)
kernel(
    "int64_t demo_left(const float* x, const float* values, const uint8_t* low, const uint8_t* high, float* out, "
    f"int64_t a, int64_t b, int64_t rows, int64_t columns, int64_t k, {THREADS})",
    """Compute the residual: out = x - decode(payload), for the payload of one worker. out may alias x. Returns -1 on
    success, 0 if positions do not ascend in their chunks, or -2.""",
    refusal=misplaced,
    memory=True,
)

# ---- numbers at random, products ----

kernel(
    "int64_t finite(const float* const vectors[], const int64_t counts[], int64_t many)",
    "Returns whether all elements of all vectors are finite: 1 or 0.",
)
kernel(
    "int64_t gathered(int64_t n)",
    """Announce that the next calls of this thread write results of n elements in total; with n = 0, each call
    counts alone again. If the total exceeds the caches, the calls write results with streaming stores. Returns the
    previous n.""",
)
kernel(
    f"void words({KEYS}, int64_t n, int32_t* out, {THREADS})",
    "Generate: out[n] = random words from position `start` on, as grace.backends.random.Random.words does.",
)
kernel(
    "void noise_table(int64_t key0, int64_t key1, int64_t n, uint16_t* out)",
    "Generate: out[n] = the upper 16 bits of the random words at positions 0 .. n-1.",
)
kernel(
    "void stream_keys(const int64_t* stems, int64_t n, int64_t step, int64_t worker, int64_t* key0, int64_t* key1)",
    "Derive keys: key0[n], key1[n] = grace.core.rng.keys of each stem, for a step and a worker.",
)
kernel(
    f"int64_t rows(int64_t kernel, const int64_t* words, int64_t width, int64_t many, int64_t* results, {THREADS})",
    """Call a kernel once per row of words[many, width]. kernel: its index in GRACE_KERNELS. A row holds the kernel's
    arguments after `loops`, in 8 bytes each; smaller types take the lower bytes. results[many] = the return values of
    the calls, or -1 for a kernel that returns nothing. threads: how many threads make the calls. Returns 0, or -3 if no
    kernel has this index or `width` is not its number of arguments.""",
)
# Products of matrices: powersgd, gradzip, acpsgd, atomo.
MATRIX = f"int64_t a, int64_t b, int64_t r, {THREADS}"
kernel(
    f"void lowrank_product(const float* x, const float* p, const float* q, float* out, {MATRIX})",
    "Multiply: out[a, b] = x - p[a, r] q[r, b], or out = p q if x is null. out may alias x.",
)
kernel(
    f"void lowrank_part(float* x, const float* p, const float* q, float* rest, {MATRIX})",
    """Split x: rest[a, b] = x - p[a, r] q[r, b], then x = p q. The results have the same bits as two calls of
    lowrank_product.""",
)
kernel(
    f"void lowrank_left(float* m, const float* residual, const float* q, float* p, {MATRIX})",
    "Multiply: p[a, r] = m[a, b] q^T, with q[r, b]. If residual is not null, m += residual first.",
)
kernel(
    f"void lowrank_right(const float* m, const float* p, float* q, {MATRIX})",
    "Multiply: q[r, b] = p^T m, with p[a, r] and m[a, b].",
)

# ---- single methods ----

kernel(
    f"int64_t adaq_count({SOURCE}, int64_t* signs, int64_t n, {THREADS})",
    """Count signs: signs[3] = the number of elements of v above zero, the number below zero, and the bits of the
    largest magnitude. If out is not null, out = v (not the residual). Returns 0, or -2, in which case nothing was
    written.""",
    memory=True,
)
kernel(
    "int64_t adaq_encode(const float* x, const int64_t* signs, double ratio, float* means, int32_t* sent, "
    "float* left, "
    "int64_t capacity, int64_t n)",
    """Encode the elements of largest magnitude among the positive ones and among the negative ones, a share `ratio` of
    each, and means[2], the mean of each group. Method: grace.compressors.adaq. signs[3]: from adaq_count. sent:
    positions p in ascending order, stored as -1 - p for negative elements. left: null, or x, which becomes x -
    decode(payload). Returns the number of positions, or -2. If the number exceeds `capacity`, nothing was written to
    sent and left, so call again with room for that many positions.""",
    memory=True,
)
kernel(
    f"int64_t adaq_mean({PAIRS}, const int64_t counts[], int64_t workers, float* out, int64_t n, {THREADS})",
    """As sparse_mean, for payloads of adaq_encode: values[w] are two means. A position p >= 0 has the first mean; p < 0
    stands for position -1 - p with the second mean.""",
    refusal=unordered,
    memory=True,
)
TAGGED = f"int64_t n, int64_t lowest, int64_t middle, {THREADS}"
kernel(
    f"void inceptionn_count(const float* x, int64_t* starts, {TAGGED})",
    """Count numbers: starts, int64[ceil(n / 65536) + 1, 3] = how many numbers of 32, 16 and 8 bits precede each piece
    of 65536 elements; the last row has the totals. Method: grace.compressors.inceptionn. lowest, middle: exponents of
    the smallest magnitudes with 8 and 16 bits, -14 .. 0.""",
)
kernel(
    "void inceptionn_encode(const float* x, const int64_t* starts, uint8_t* tags, float* three, uint8_t* two, "
    "uint8_t* one, "
    f"{TAGGED})",
    """Encode a tag of two bits per element, and the numbers of 32, 16 and 8 bits (`three`, `two`, `one`). starts: from
    inceptionn_count; its last row has the lengths of these three arrays.""",
)
kernel(
    "int64_t inceptionn_mean(const uint8_t* const tags[], const float* const three[], const uint8_t* const two[], "
    f"const uint8_t* const one[], const int64_t counts[], int64_t workers, float* out, {TAGGED})",
    """Average the workers' payloads of inceptionn_encode. counts, int64[workers, 3]: how many numbers of 32, 16 and 8
    bits each worker sent. Returns -1 on success, or the first worker whose tags stand for other counts.""",
    refusal=lambda worker, **_: f"worker {worker} sent tags that do not match the number of its values",
)
kernel(
    "void shared_int_encode(const float* x, const float* scales, uint8_t* codes, int64_t n, int64_t block, "
    f"int64_t top, int64_t wide, {NOISE}, {THREADS})",
    """Encode codes = x / scale * top, stochastically rounded with the noise of blockint_encode. codes: int32[n] if wide
    != 0, else int8[n]. Method: grace.compressors.shared_int.""",
)
kernel(
    "void shared_int_values(const float* x, const uint8_t* codes, const float* scales, float* out, int64_t n, "
    "int64_t block, "
    f"int64_t steps, int64_t wide, {THREADS})",
    "Decode: out = codes / steps * scale; if x is not null, out = x - this (the residual). out may alias x.",
)

# ---- patches of weights: grace.patch ----

CHANGES = "const int32_t* counts, const uint16_t* places"
kernel(
    "int64_t patch_diff(const uint8_t* fresh, const uint8_t* base, int32_t* counts, uint16_t* places, uint8_t* values, "
    "uint8_t* steps, int64_t n, int64_t size)",
    """Compare n words of `size` bytes (1, 2, 4 or 8). For those that differ, in each chunk of 65536 words: counts =
    their number, places = their offsets in the chunk, values = the new words, steps = fresh - base modulo the word's
    range. places, values and steps have room for n words. Returns the number of words that differ.""",
)
kernel(
    f"void patch_step(uint8_t* x, {CHANGES}, const uint8_t* steps, uint8_t* values, int64_t chunks, int64_t size)",
    "Step: x += steps at the places of all chunks; values = the results. Places must lie in x.",
)
kernel(
    f"void patch_write(uint8_t* x, {CHANGES}, const uint8_t* values, int64_t chunks, int64_t size)",
    "Write: x = values at the places of all chunks, which must lie in x.",
)
kernel(
    "int64_t patch_nibbles(const uint8_t* steps, uint8_t* out, uint8_t* large, int64_t k, int64_t size)",
    """Encode steps of `size` bytes as zigzag codes, 2 step or -2 step - 1: out[(k + 1) / 2] = the codes in 4 bits each,
    the first in the lower ones; 15 stands for codes of 15 and more, which go to `large`, with room for k words. Returns
    their number.""",
)
kernel(
    "int64_t patch_unnibbles(const uint8_t* sent, const uint8_t* large, uint8_t* steps, int64_t k, int64_t many, "
    "int64_t size)",
    """Decode what patch_nibbles has written, with `many` large codes. Returns 1, or 0 if their number is another; steps
    are undefined then.""",
)
kernel(
    f"int64_t patch_places({CHANGES}, uint8_t* out, int64_t chunks)",
    """Encode the places of each chunk in the Elias-Fano code (grace.patch.delta.write_places). Returns the number of
    bytes written.""",
)
kernel(
    "int64_t patch_unplaces(const int32_t* counts, const uint8_t* sent, uint16_t* places, int64_t chunks, int64_t n)",
    """Decode what patch_places has written for n words. counts, 0 .. 65536 each, must fit the size of `sent`. Returns
    1; or 0 if places do not ascend within their chunks, in which case they are undefined.""",
)


HEAD = """\
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
"""


def header() -> str:
    """Returns the content of `api.h`."""
    lines = HEAD.splitlines()
    for each in KERNELS.values():
        lines += ["", *textwrap.wrap(each.doc, 120, initial_indent="// ", subsequent_indent="// ")]
        head = f"{each.result} grace_{each.name}("
        arguments = ", ".join(map(str, (Argument("const grace::Loops*", "loops"), *each.arguments)))
        # A name stays on the line of its type.
        joined = ", ".join(part.replace(" ", "\0") for part in arguments.split(", "))
        wrapped = textwrap.wrap(head.replace(" ", "\0") + joined + ");", 120, subsequent_indent=" " * len(head))
        lines += [line.replace("\0", " ") for line in wrapped]
    lines += ['}  // extern "C"', "", "// The kernels, in the order of their indices."]
    calls = textwrap.wrap(" ".join(f"X({name})" for name in KERNELS), 116, initial_indent="  ", subsequent_indent="  ")
    lines += [" \\\n".join(["#define GRACE_KERNELS(X)", *calls]), ""]
    return "\n".join(lines)


def main() -> int:
    """Rewrite the header."""
    HEADER.write_text(header())
    return 0


if __name__ == "__main__":
    sys.exit(main())
