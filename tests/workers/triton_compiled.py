"""Triton's kernels, compiled for CUDA devices, which need not be present.

Run by tests/test_triton.py, as tests of pytest.
"""

import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from grace.kernels import triton as kernels

F, B, W, D = "*fp32", "*u8", "*i32", "*fp64"
T = kernels.TILE
V = {"x": F, "residual": F}
KEYS = {"start": "i64", **dict.fromkeys(kernels.KEYS, "i32")}
NAMES = [name for name, each in vars(kernels).items() if isinstance(each, JITFunction) and not name.startswith("_")]


def forms(name):
    """Argument types and constants of each kind of kernel that `TritonKernels` launches."""
    for add in (True, False):
        if name in ("signs_blocks", "ints_blocks"):
            for block in (24, kernels.LARGE) if add else (512,):
                rows, width = kernels._rows(block)
                shape = {"BLOCK": block, "ROWS": rows, **width, "ADD": add}
                if name == "signs_blocks":
                    yield {**V, "bits": B, "scales": F, "n": "i32"}, shape
                else:
                    bits = {24: 2, 512: 4}.get(block, 8)
                    form = {**shape, "BITS": bits, "RANDOM": bits > 2}
                    yield {**V, "codes": B, "scales": F, "n": "i64", **KEYS}, form
        elif name in ("signs_sums", "signs_rest", "ints_largest"):
            found = {"signs_sums": {"sums": D}, "signs_rest": {"bits": B, "scales": F}, "ints_largest": {"scales": W}}
            size = "i32" if add else "i64"
            sizes = {"n": size, "block": size, "tiles": "i32"}
            yield {**V, **found[name], **sizes}, {"TILE": T, "ADD": add}
        elif name == "ints_rest":
            sizes = {"n": "i32", "block": "i32", "tiles": "i32"}
            for bits in (8, 2) if add else (4,):
                form = {"TILE": T, "BITS": bits, "RANDOM": bits > 2, "ADD": add}
                yield {**V, "codes": B, "scales": F, **sizes, **KEYS}, form
        elif name in ("signs_mean", "ints_mean"):
            workers, block = (kernels.GROUP, 512) if add else (3, 0)
            form = {"BLOCK": block, "WORKERS": workers, "FIRST": not add, "DIVIDE": add, "TILE": T}
            arrays = {"scales": (F,) * workers, "out": F, "n": "i32", "divisor": "fp32"}
            if name == "signs_mean":
                yield {"bits": (B,) * workers, **arrays}, form
            else:
                for bits in (4,) if add else (8, 2):
                    yield {"codes": (B,) * workers, **arrays}, {**form, "BITS": bits}
        elif name == "topk_magnitudes":
            yield {**V, "magnitudes": F, "n": "i32"}, {"TILE": T, "ADD": add}
        elif name == "topk_take":
            sizes = {"n": "i32", "k": "i32", "tiles": "i32"}
            arrays = {"magnitudes": F, "bound": F, "counts": W, "ends": W, "values": F, "positions": W}
            yield {**V, **arrays, **sizes}, {"TILE": T, "ADD": add}
        elif add and name == "signs_scales":
            yield {"sums": D, "scales": F, "n": "i64", "block": "i64", "tiles": "i32"}, {"TILE": 1024}
        elif add and name == "topk_counts":
            yield {"magnitudes": F, "bound": F, "counts": W, "n": "i32", "tiles": "i32"}, {"TILE": T}


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("name", NAMES)
def test_compiles(name, architecture):
    compiled = 0
    for types, constants in forms(name):
        signature = {**types, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(fn=getattr(kernels, name), signature=signature, constexprs=constants)
        found = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options={"enable_fp_fusion": False})
        assert len(found.asm["cubin"]) > 1000
        assert f".target sm_{architecture}" in found.asm["ptx"]
        # Each operation rounds separately, to nearest, and subnormal numbers are not flushed to 0.
        code = [line.split("//")[0].split() for line in found.asm["ptx"].splitlines()]
        words = {word for line in code for word in line}
        assert not [word for word in words if re.match(r"fma\.|div\.(full|approx)|rcp|.*\.ftz", word)]
        arithmetic = {word for word in words if re.match(r"(add|sub|mul|div)\..*f(32|64)", word)}
        assert all(re.fullmatch(r"(add|sub|mul|div)\.rn\.f(32|64)", word) for word in arithmetic), arithmetic
        compiled += 1
    assert compiled


def test_all_kernels_are_tried():
    assert len(NAMES) == 12
