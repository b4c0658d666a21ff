"""Triton's kernels, compiled for CUDA devices, which need not be present.

Run by tests/test_triton.py, as tests of pytest.
"""

import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from grace.kernels.triton import groups, launcher, quantisers, sparsifiers, transforms

F, B, W, D, L = "*fp32", "*u8", "*i32", "*fp64", "*i64"
T = launcher.TILE
V = {"x": F, "residual": F}
KEYS = {"start": "i64", **dict.fromkeys(quantisers.KEYS, "i32")}
KERNELS = {
    name: each
    for module in (groups, quantisers, sparsifiers, transforms)
    for name, each in vars(module).items()
    if isinstance(each, JITFunction) and each.__module__ == module.__name__ and not name.startswith("_")
}


def group_forms(name):
    """`forms`, of the kernels of groups."""
    table = {"tiles": L, "table": L, "many": "i32"}
    sent = {**table, "out": "i64"}
    received = {**table, "senders": L, "count": "i32"}
    for add in (True, False):
        if name == "group_finite":
            yield {**received, "flags": W}, {"TILE": T}
        elif name == "group_restore":
            yield {**table, "flags": W}, {"TILE": T}
        elif name == "group_partials":
            for total in (True, False):
                yield {**table, "partials": D}, {"TILE": T, "SUM": total, "ADD": add}
        elif name == "group_scales":
            blocks = {"blocks": L, "partials": D, "table": L, "many": "i32", "out": "i64"}
            yield blocks, {"TILE": 1024, "SUM": add}
        elif name in ("efsignsgd_group", "blockint_group"):
            for whole, block in ((True, 24), (True, launcher.LARGE), (False, T)):
                rows, width = launcher.rows_of(block) if whole else (1, T)
                form = {"BLOCK": block, "ROWS": rows, "WIDTH": width, "ADD": add, "WHOLE": whole}
                if name == "efsignsgd_group":
                    yield sent, form
                else:
                    bits = {24: 2, T: 4}.get(block, 8)
                    yield {**sent, "table0": "i32", "table1": "i32"}, {**form, "BITS": bits, "RANDOM": bits > 2}
        elif name == "efsignsgd_group_mean":
            yield received, {"BLOCK": 512 if add else 0, "TILE": T}
        elif name == "blockint_group_mean":
            for bits in (8, 4, 2):
                yield received, {"BLOCK": 512 if add else 0, "BITS": bits, "TILE": T}
        elif name in ("eden_group", "eden_group_mean"):
            for width, bits in ((8, 3), (launcher.LARGE, 4)) if add else ((64, 2), (4096, 1)):
                form = transforms.form_of(width, range(1 << bits))
                levels, middles = ("fp32",) * (1 << bits), ("fp32",) * ((1 << bits) - 1)
                if name == "eden_group":
                    floats = {"levels": levels, "middles": middles, "root": "fp32", "divisor": "fp32"}
                    yield {**sent, **floats, "stream": "i32"}, {**form, "BIASED": bits == 1, "ADD": add}
                else:
                    yield {**received, "levels": levels, "root": "fp32"}, form


def forms(name):
    """Argument types and constants of each kind of kernel that `TritonKernels` launches."""
    yield from group_forms(name)
    for add in (True, False):
        if name in ("efsignsgd_blocks", "blockint_blocks"):
            for block in (24, launcher.LARGE) if add else (512,):
                rows, width = launcher.rows_of(block)
                shape = {"BLOCK": block, "ROWS": rows, "WIDTH": width, "ADD": add}
                if name == "efsignsgd_blocks":
                    yield {**V, "bits": B, "scales": F, "n": "i32"}, shape
                else:
                    bits = {24: 2, 512: 4}.get(block, 8)
                    form = {**shape, "BITS": bits, "RANDOM": bits > 2}
                    yield {**V, "codes": B, "scales": F, "n": "i64", **KEYS}, form
        elif name in ("efsignsgd_sums", "efsignsgd_rest", "blockint_largest"):
            found = {
                "efsignsgd_sums": {"sums": D},
                "efsignsgd_rest": {"bits": B, "scales": F},
                "blockint_largest": {"scales": W},
            }
            size = "i32" if add else "i64"
            sizes = {"n": size, "block": size, "tiles": "i32"}
            yield {**V, **found[name], **sizes}, {"TILE": T, "ADD": add}
        elif name == "blockint_rest":
            sizes = {"n": "i32", "block": "i32", "tiles": "i32"}
            for bits in (8, 2) if add else (4,):
                form = {"TILE": T, "BITS": bits, "RANDOM": bits > 2, "ADD": add}
                yield {**V, "codes": B, "scales": F, **sizes, **KEYS}, form
        elif name in ("efsignsgd_mean", "blockint_mean"):
            workers, block = (launcher.GROUP, 512) if add else (3, 0)
            form = {"BLOCK": block, "WORKERS": workers, "FIRST": not add, "DIVIDE": add, "TILE": T}
            arrays = {"scales": (F,) * workers, "out": F, "n": "i32", "divisor": "fp32"}
            if name == "efsignsgd_mean":
                yield {"bits": (B,) * workers, **arrays}, form
            else:
                for bits in (4,) if add else (8, 2):
                    yield {"codes": (B,) * workers, **arrays}, {**form, "BITS": bits}
        elif name in ("eden_encode", "eden_mean"):
            for width, bits in ((8, 3), (launcher.LARGE, 4)) if add else ((64, 2), (4096, 1)):
                form, keys = transforms.form_of(width, range(1 << bits)), {"start": "i64", "key0": "i32", "key1": "i32"}
                floats = {"levels": ("fp32",) * (1 << bits), "middles": ("fp32",) * ((1 << bits) - 1), "root": "fp32"}
                if name == "eden_encode":
                    arrays = {**V, "codes": B, "scales": F, "streams": B, "n": "i32", **floats}
                    yield (
                        {**arrays, "divisor": "fp32", "stream": "i32", **keys},
                        {**form, "BIASED": bits == 1, "ADD": add},
                    )
                else:
                    workers = transforms.TOGETHER if add else 3
                    arrays = {name: F if name.startswith("scales") else B for name in transforms.SENT}
                    how = {"n": "i64", "divisor": "fp32", "levels": floats["levels"], "root": "fp32"}
                    place = {"WORKERS": workers, "FIRST": not add, "DIVIDE": add}
                    yield {**arrays, "out": F, **how, **keys}, {**form, **place}
        elif name == "topk_magnitudes":
            yield {**V, "magnitudes": F, "n": "i32"}, {"TILE": T, "ADD": add}
        elif name == "topk_take":
            sizes = {"n": "i32", "k": "i32", "tiles": "i32"}
            arrays = {"magnitudes": F, "bound": F, "counts": W, "ends": W, "values": F, "positions": W}
            yield {**V, **arrays, **sizes}, {"TILE": T, "ADD": add}
        elif add and name == "efsignsgd_scales":
            yield {"sums": D, "scales": F, "n": "i64", "block": "i64", "tiles": "i32"}, {"TILE": 1024}
        elif add and name == "topk_counts":
            yield {"magnitudes": F, "bound": F, "counts": W, "n": "i32", "tiles": "i32"}, {"TILE": T}


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name, architecture):
    compiled = 0
    for types, constants in forms(name):
        signature = {**types, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(fn=KERNELS[name], signature=signature, constexprs=constants)
        options = {"enable_fp_fusion": False}
        if name.startswith("eden"):
            options["num_warps"] = transforms.warps_of(constants["WIDTH"])
        found = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
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
    assert len(KERNELS) == 24
