"""Triton's kernels of grace.patch: interpreted against NumPy, and compiled for CUDA devices, which need not be present.

Run by tests/test_patch_triton.py, as tests of pytest: `interpreted` with TRITON_INTERPRET=1, `compiled` without.
"""

import os

import numpy as np
import pytest
import torch

import grace
from grace.kernels.triton import patches
from grace.patch import delta, device

WIDTHS = {1: ("u1", "*u8"), 2: ("i2", "*i16"), 4: ("i4", "*i32"), 8: ("i8", "*i64")}


def two(n, width, density):
    rng = np.random.default_rng(n)
    base = rng.integers(0, 256, n * width, np.uint8).view(WIDTHS[width][0])
    new = base.copy()
    where = rng.random(n) < density
    new.view(np.uint8).reshape(n, width)[where, rng.integers(0, width)] ^= 129
    return new, base


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n, density", [(0, 1.0), (1, 1.0), (4097, 1.0), (69633, 0.04)])
def test_interpreted_equals_numpy(n, width, density, monkeypatch):
    assert os.environ["TRITON_INTERPRET"] == "1"
    monkeypatch.setattr(delta, "library", lambda: None)
    new, base = two(n, width, density)
    with np.errstate(over="ignore"):
        found = device.compare(torch.from_numpy(new), torch.from_numpy(base))
        expected = delta.compare(new.view(f"u{width}"), base.view(f"u{width}"))
    assert found.size == expected.size
    for name in ("counts", "places", "steps", "fresh"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == other.dtype
        assert np.array_equal(one, other), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool])
def test_interpreted_in_a_diff(dtype, monkeypatch):
    base = torch.randint(0, 2, (70000,), dtype=torch.uint8).to(dtype)
    new = base.clone()
    new[::30] = torch.logical_not(base[::30]) if dtype == torch.bool else 3
    expected = grace.patch.diff({"w": new}, {"w": base})
    calls = []
    monkeypatch.setattr(device, "reaches", lambda tensor: calls.append(1) or True)
    found = grace.patch.diff({"w": new}, {"w": base})
    assert calls
    (one,), (other,) = found.entries, expected.entries
    assert bytes(found.data_of(one)) == bytes(expected.data_of(other))
    assert one.checksum == other.checksum
    with pytest.raises(ValueError, match="new is"):
        grace.patch.diff({"w": new}, {"w": base[:-1]})


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["patch_count", "patch_gather"])
def test_compiled(name, width, architecture):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    word = WIDTHS[width][1]
    kinds = {"new": word, "base": word, "values": word, "steps": word, "counts": "*i32", "starts": "*i64"}
    kinds |= {"places": "*i16", "n": "i64", "TILE": "constexpr"}
    kernel = getattr(patches, name)
    signature = {each: kinds[each] for each in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs={"TILE": patches.TILE})
    found = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"enable_fp_fusion": False})
    assert len(found.asm["cubin"]) > 1000
    assert f".target sm_{architecture}" in found.asm["ptx"]
