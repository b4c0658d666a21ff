"""Functions that Triton's kernels share: addresses, packed codes, random numbers, and the codes of each method.

Places are int32 offsets from a tile's start; starts are int64. A word is a group of EACH codes that fills whole bytes.
Elements of a tile are [rows, words, EACH]; FAST tiles are full, and their addresses are aligned for wide accesses.
"""

from __future__ import annotations

import triton
import triton.language as tl

from grace.kernels.triton.launcher import magnitudes_of, mixed


# -- memory ------------------------------------------------------------------------------------------------------------
@triton.jit
def floats(address):
    """An address as a pointer to float32 numbers."""
    return address.to(tl.pointer_type(tl.float32), bitcast=False)


@triton.jit
def integers(address, SIZE: tl.constexpr):
    """An address as a pointer to integers of SIZE bytes; to single bytes if SIZE is neither 2 nor 4."""
    if SIZE == 4:
        found = address.to(tl.pointer_type(tl.int32), bitcast=False)
    elif SIZE == 2:
        found = address.to(tl.pointer_type(tl.int16), bitcast=False)
    else:
        found = address.to(tl.pointer_type(tl.uint8), bitcast=False)
    return found


@triton.jit
def load_floats(address, at, here, FAST: tl.constexpr):
    """Return the float32 numbers at offsets ``at`` from an address; 0 where ``here`` is false."""
    if FAST:
        found = tl.load(tl.multiple_of(floats(address), 16) + at)
    else:
        found = tl.load(floats(address) + at, mask=here, other=0.0)
    return found


@triton.jit
def store_floats(address, at, here, value, FAST: tl.constexpr):
    """The counterpart of `load_floats`."""
    if FAST:
        tl.store(tl.multiple_of(floats(address), 16) + at, value)
    else:
        tl.store(floats(address) + at, value, mask=here)


@triton.jit
def put_codes(codes, code, word, room, BITS: tl.constexpr, EACH: tl.constexpr, FAST: tl.constexpr):
    """Pack codes int32[rows, words, EACH] of BITS bits, and store them from the address ``codes`` on.

    ``word``: the index of each word, int32[rows, words, 1]; ``room``: how many elements remain from its first one on.
    """
    SIZE: tl.constexpr = EACH * BITS // 8
    shift = (tl.arange(0, EACH) * BITS)[None, None, :]
    if SIZE > 4:
        packed = tl.sum(code.to(tl.int64) << shift.to(tl.int64), 2, keep_dims=True)
    else:
        packed = tl.sum(code << shift, 2, keep_dims=True)
    if FAST and (SIZE == 4 or SIZE == 2):
        tl.store(integers(codes, SIZE) + word, packed.to(tl.int32 if SIZE == 4 else tl.int16))
    else:
        for i in tl.static_range(SIZE):
            octet = ((packed >> (8 * i)) & 255).to(tl.uint8)
            here = room > 0 if 8 % BITS else 8 * i < room * BITS  # 3 bits: a word takes all its bytes
            tl.store(integers(codes, 1) + word * SIZE + i, octet, mask=here)


@triton.jit
def load_codes(codes, word, room, BITS: tl.constexpr, EACH: tl.constexpr, FAST: tl.constexpr):
    """The inverse of `put_codes`: codes in 0 .. 2**BITS - 1; 0 beyond the last element."""
    SIZE: tl.constexpr = EACH * BITS // 8
    shift = (tl.arange(0, EACH) * BITS)[None, None, :]
    if FAST and (SIZE == 4 or SIZE == 2):
        packed = tl.load(integers(codes, SIZE) + word).to(tl.int32)
    else:
        packed = (word * 0).to(tl.int64 if SIZE > 4 else tl.int32)
        for i in tl.static_range(SIZE):
            octet = tl.load(integers(codes, 1) + word * SIZE + i, mask=8 * i < room * BITS, other=0)
            packed |= octet.to(packed.dtype) << (8 * i)
    return (packed >> shift).to(tl.int32) & ((1 << BITS) - 1)


# -- random numbers ----------------------------------------------------------------------------------------------------
@triton.jit
def words(start, at, key0, key1):
    """Return `grace.core.rng.Rng.bits` of the elements start + at, as int32."""
    low = (start & 0xFFFFFFFF).to(tl.uint32) + at.to(tl.uint32)
    high = (start >> 32).to(tl.uint32) + (low < at.to(tl.uint32)).to(tl.uint32)
    h = mixed(low + key0.to(tl.uint32, bitcast=True))
    return mixed(h ^ (high + key1.to(tl.uint32, bitcast=True))).to(tl.int32, bitcast=True)


@triton.jit
def _upper(j, key0, key1):
    # Returns the upper 16 bits, as uint32, of a stream's word j, for j below 2**32.
    h = mixed(j + key0.to(tl.uint32, bitcast=True))
    return mixed(h ^ key1.to(tl.uint32, bitcast=True)) >> 16


@triton.jit
def _noise(start, at, table0, table1, key0, key1):
    # Returns `grace.core.rng.Rng.noise` of the elements start + at, which lie in at most two rows of 65536.
    place = (start & 65535).to(tl.int32) + at
    row = (start >> 16).to(tl.uint32)
    offset = tl.where(place < 65536, _upper(row, key0, key1), _upper(row + 1, key0, key1))
    whole = (_upper((place & 65535).to(tl.uint32), table0, table1) + offset) & 65535
    return (whole.to(tl.int32).to(tl.float32) + 0.5) * 0.0000152587890625


@triton.jit
def drawn(METHOD: tl.constexpr, start, at, table0, table1, key0, key1):
    """Return the random numbers of a method for the elements start + at: noise or words."""
    if METHOD == "blockint" or METHOD == "qsgd":
        found = _noise(start, at, table0, table1, key0, key1)
    else:
        found = words(start, at, key0, key1)
    return found


# -- scales ------------------------------------------------------------------------------------------------------------
@triton.jit
def scales_at(METHOD: tl.constexpr, address):
    """A pointer to the scales of blocks: float32 numbers; exponents int32 for natural, flags uint8 for signsgd."""
    if METHOD == "natural" or METHOD == "signsgd":
        found = integers(address, 4 if METHOD == "natural" else 1)
    else:
        found = floats(address)
    return found


@triton.jit
def not_zero(value):
    """Return the value, or 1 instead of 0."""
    return tl.where(value == 0.0, 1.0, value)


@triton.jit
def sums(value):
    """Return the sum of each row, added in float64: [rows, words, EACH] -> float64[rows, 1, 1]."""
    return tl.sum(tl.sum(value.to(tl.float64), 2, keep_dims=True), 1, keep_dims=True)


@triton.jit
def _most(value):
    return tl.max(tl.max(value, 2, keep_dims=True), 1, keep_dims=True)


@triton.jit
def norm_of(largest, squares):
    """Return `grace.ops.blocks.norms`. ``squares``: the sum of squares of elements / largest, float64."""
    return largest * tl.sqrt_rn(squares.to(tl.float32))


@triton.jit
def scales_of(METHOD: tl.constexpr, value, draws, count, LEVELS: tl.constexpr, RANDOM: tl.constexpr):
    """Return the scale of each row, which is a block of ``count`` elements; dtypes as in `scales_at`."""
    if METHOD == "efsignsgd":
        found = tl.div_rn(sums(tl.abs(value)).to(tl.float32), count.to(tl.float32))
    elif METHOD == "natural":
        found = natural_scale(_most(natural_fields(value, draws, RANDOM)), LEVELS)
    elif METHOD == "signsgd":
        found = (_most(magnitudes_of(value)) >= 0x7F800000).to(tl.uint8)
    else:
        found = _most(magnitudes_of(value)).to(tl.float32, bitcast=True)
        if METHOD == "qsgd":
            share = tl.div_rn(value, not_zero(found))
            found = norm_of(found, sums(share * share))
    return found


# -- codes of each method ----------------------------------------------------------------------------------------------
@triton.jit
def _blockint(value, scale, noise, BITS: tl.constexpr, RANDOM: tl.constexpr):
    top: tl.constexpr = (1 << (BITS - 1)) - 1
    steps = tl.div_rn(value, not_zero(scale)) * float(top)
    if RANDOM:
        steps += noise
        steps = tl.where(tl.abs(steps) < 1024.0, steps, 0.0)  # NaN has no integer value
        code = steps.to(tl.int32)
        code -= (code.to(tl.float32) > steps).to(tl.int32)  # tl.floor would treat the smallest numbers as 0
    else:
        steps = tl.where(tl.abs(steps) < 1024.0, steps, 0.0)
        code = ((steps + 12582912.0) - 12582912.0).to(tl.int32)  # adding 1.5 * 2**23 rounds, halves to even
    return code & ((1 << BITS) - 1)


@triton.jit
def _qsgd(value, scale, noise, BITS: tl.constexpr, LEVELS: tl.constexpr):
    raised = tl.div_rn(tl.abs(value), not_zero(scale)) * float(LEVELS) + noise
    level = tl.where(raised < LEVELS + 1.0, raised, float(LEVELS)).to(tl.int32)  # NaN becomes a valid level, too
    return tl.minimum(level, LEVELS) + (value < 0.0).to(tl.int32) * (1 << (BITS - 1))


@triton.jit
def _terngrad(value, scale, word):
    uniform = (word.to(tl.uint32, bitcast=True) >> 8).to(tl.int32).to(tl.float32) * 0.000000059604644775390625
    sent = uniform < tl.div_rn(tl.abs(value), not_zero(scale))
    return 1 + (sent & (value > 0.0)).to(tl.int32) - (sent & (value < 0.0)).to(tl.int32)


@triton.jit
def natural_fields(value, word, RANDOM: tl.constexpr):
    """Return the exponent fields of elements rounded to powers of two; 255 for those that are not finite."""
    magnitude = magnitudes_of(value)
    mantissa = magnitude & 0x7FFFFF
    up = mantissa > ((word >> 9) & 0x7FFFFF) if RANDOM else mantissa >= 0x400000
    field = tl.minimum((magnitude >> 23) + up.to(tl.int32), 254)
    field = tl.where(magnitude >= 0x800000, field, 0)  # subnormal numbers become zero
    return tl.where(magnitude >= 0x7F800000, 255, field)


@triton.jit
def natural_scale(most, LEVELS: tl.constexpr):
    """Return the exponent field of code 127, given a block's largest field. LEVELS: a fixed field, or 0."""
    return tl.where(most == 255, 255, LEVELS) if LEVELS else most


@triton.jit
def _natural(value, scale, word, LEVELS: tl.constexpr, RANDOM: tl.constexpr):
    field = tl.minimum(natural_fields(value, word, RANDOM), 254)
    top = LEVELS if LEVELS else tl.minimum(scale, 254)
    code = tl.where(field > 0, tl.minimum(tl.maximum(field - top + 127, 0), 127), 0)
    return code | (value < 0.0).to(tl.int32) * 128


@triton.jit
def codes_of(METHOD: tl.constexpr, value, scale, draws, BITS: tl.constexpr, LEVELS: tl.constexpr, RANDOM: tl.constexpr):
    """Return the codes of elements, int32. LEVELS: qsgd's number of levels; for natural, see `natural_scale`."""
    if METHOD == "blockint":
        code = _blockint(value, scale, draws, BITS, RANDOM)
    elif METHOD == "qsgd":
        code = _qsgd(value, scale, draws, BITS, LEVELS)
    elif METHOD == "terngrad":
        code = _terngrad(value, scale, draws)
    elif METHOD == "natural":
        code = _natural(value, scale, draws, LEVELS, RANDOM)
    else:
        code = (value >= 0.0).to(tl.int32)
    return code


@triton.jit
def values_of(METHOD: tl.constexpr, code, scale, BITS: tl.constexpr, LEVELS: tl.constexpr):
    """Return the values of codes, float32."""
    if METHOD == "efsignsgd":
        value = tl.where(code != 0, scale, -scale)
    elif METHOD == "signsgd":
        value = tl.where(scale != 0, float("nan"), tl.where(code != 0, 1.0, -1.0))
    elif METHOD == "blockint":
        half: tl.constexpr = 1 << (BITS - 1)
        step = tl.div_rn(scale, tl.full(scale.shape, half - 1, tl.float32))
        value = ((code ^ half) - half).to(tl.float32) * step
    elif METHOD == "qsgd":
        sign: tl.constexpr = 1 << (BITS - 1)
        level = tl.div_rn((code & (sign - 1)).to(tl.float32), tl.full(code.shape, LEVELS, tl.float32))
        value = tl.where(code >= sign, -level, level) * scale
    elif METHOD == "terngrad":
        value = (code - 1).to(tl.float32) * scale
    else:
        field = tl.maximum((code & 127) + scale - 127, 0)
        value = tl.where((code & 127) > 0, (field << 23).to(tl.float32, bitcast=True), 0.0)
        value = tl.where(code >= 128, -value, value)
        value = tl.where((scale >= 0) & (scale < 255), value, float("nan"))  # no other exponent field is valid
    return value
