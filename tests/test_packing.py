"""Packing of b-bit codes, against Python integers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import BACKENDS, backend

from grace.ops.packing import pack, pack_trits, packed_size, packed_trits, unpack, unpack_trits

WIDTHS = range(1, 9)


def packed(bits, codes):
    """The definition with Python's integers: one long integer with code j at bit j * bits."""
    n = len(codes)
    size = -(-n * bits // 8) if bits in (1, 2, 4, 8) else -(-n // 8) * bits
    number = sum(code << (j * bits) for j, code in enumerate(codes))
    return number.to_bytes(size, "little")


def codes_of(bits, n, seed=0):
    return np.random.default_rng(seed).integers(0, 2**bits, n)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1003])
def test_bytes_are_those_of_python_and_come_back(xp, bits, dtype, n):
    codes = codes_of(bits, n)
    wire = pack(xp, bits, xp.asarray(codes.astype(dtype), dtype))
    assert xp.dtype(wire) == "uint8"
    assert xp.to_numpy(wire).tobytes() == packed(bits, codes.tolist())
    back = unpack(xp, bits, wire, n)
    assert xp.dtype(back) == "uint8"
    assert xp.shape(back) == (n,)
    assert xp.to_numpy(back).tolist() == codes.tolist()


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data(), bits=st.integers(1, 8))
def test_round_trip(name, data, bits):
    xp = backend(name)
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=80))
    wire = pack(xp, bits, xp.asarray(np.array(codes, np.int32), "int32"))
    assert xp.to_numpy(wire).tobytes() == packed(bits, codes)
    assert xp.to_numpy(unpack(xp, bits, wire, len(codes))).tolist() == codes


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("n", [*range(20), 1000, 1001])
def test_packed_size(bits, n):
    wire = pack(backend("numpy"), bits, np.zeros(n, np.int32))
    assert packed_size(bits, n) == len(wire) == len(packed(bits, [0] * n))


@pytest.mark.parametrize("bits", WIDTHS)
def test_tail_bits_are_zero(xp, bits):
    for n in (1, 3, 9, 1003):
        wire = xp.to_numpy(pack(xp, bits, xp.asarray(np.full(n, 2**bits - 1), "int64")))
        assert int.from_bytes(wire.tobytes(), "little") == 2 ** (bits * n) - 1


@pytest.mark.parametrize("bits", WIDTHS)
def test_tail_bits_are_ignored(xp, bits):
    n = 1003
    codes = codes_of(bits, n)
    number = int.from_bytes(packed(bits, codes.tolist()), "little")
    size = packed_size(bits, n)
    dirty = (number | (2 ** (8 * size) - 1) >> (bits * n) << (bits * n)).to_bytes(size, "little")
    wire = xp.asarray(np.frombuffer(dirty, np.uint8).copy(), "uint8")
    assert xp.to_numpy(unpack(xp, bits, wire, n)).tolist() == codes.tolist()


@pytest.mark.parametrize(
    "bits, codes, golden",
    [
        (1, [1, 0, 1, 1, 0, 1, 0, 1, 1], "ad01"),
        (2, [2, 1, 2, 1, 1, 2, 0, 1], "6649"),
        (3, [1, 2, 3, 4, 5, 6, 7, 0, 7], "d1581f070000"),
        (4, [0x2, 0xC, 0x1, 0x0, 0x0, 0x7, 0xD, 0x5], "c201705d"),
        (5, [1, 2, 3, 31], "418c0f0000"),
        (6, [1, 2, 3, 63], "8130fc000000"),
        (7, [1, 2, 3, 127], "01c1e00f000000"),
        (8, [0, 1, 128, 255], "000180ff"),
    ],
)
def test_golden_bytes(xp, bits, codes, golden):
    wire = pack(xp, bits, xp.asarray(np.array(codes), "int32"))
    assert xp.to_numpy(wire).tobytes().hex() == golden


@pytest.mark.parametrize("n", [0, 1, 4, 5, 6, 1003])
def test_trits_are_the_digits_of_bytes(xp, n):
    trits = np.random.default_rng(0).integers(-1, 2, n).astype(np.int32)
    wire = pack_trits(xp, xp.asarray(trits, "int32"))
    assert xp.dtype(wire) == "uint8"
    groups = [trits[start : start + 5].tolist() for start in range(0, n, 5)]
    expected = [121 + sum(trit * 3**i for i, trit in enumerate(group)) for group in groups]
    assert xp.to_numpy(wire).tolist() == expected
    assert len(expected) == packed_trits(n)
    back = unpack_trits(xp, wire, n)
    assert xp.dtype(back) == "int32"
    assert xp.to_numpy(back).tolist() == trits.tolist()


def test_golden_trits(xp):
    wire = pack_trits(xp, xp.asarray([-1] * 5 + [1] * 5 + [0, 0, 0, 0, 0, 1, 0, 1], "int32"))
    assert xp.to_numpy(wire).tolist() == [0, 242, 121, 131]
