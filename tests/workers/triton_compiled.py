"""Triton's kernels, compiled for CUDA devices, which need not be present.

Run by tests/test_triton.py, as tests of pytest.
"""

import re

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import JITFunction

from grace.kernels.triton import groups, launcher, rotations, selections
from grace.kernels.triton.tables import form_of_blocks

F, W, D, L = "*fp32", "*i32", "*fp64", "*i64"
T = launcher.TILE
KERNELS = {
    name: each
    for module in (groups, selections)
    for name, each in vars(module).items()
    if isinstance(each, JITFunction) and each.__module__ == module.__name__ and not name.startswith("_")
}
TABLE = {"tiles": L, "table": L, "many": "i32"}
SENT = {**TABLE, "out": "i64"}
RECEIVED = {**TABLE, "senders": L, "count": "i32"}
CHUNKED = {"chunks": L, "table": L, "many": "i32"}
BLOCKS = {
    "int2, small blocks": ("blockint", {"block": 24, "bits": 2}),
    "int4": ("blockint", {"block": 512, "bits": 4}),
    "int8, one scale": ("blockint", {"block": 0, "bits": 8}),
    "signs": ("efsignsgd", {"block": 512}),
    "signs, one scale": ("efsignsgd", {"block": 0}),
    "qsgd": ("qsgd", {"block": 512, "bits": 8, "levels": 127}),
    "qsgd of 5 bits, one norm": ("qsgd", {"block": 0, "bits": 5, "levels": 15}),
    "terngrad": ("qsgd", {"block": launcher.LARGE, "bits": 2, "levels": 0}),
    "natural, one scale": ("codes", {"block": 0}),
    "natural, a fixed window": ("codes", {"block": 512, "levels": 145}),
    "votes": ("signsgd", {}),
}


def forms(name):
    """Argument types and constants of each launched variant of a kernel."""
    if name in ("group_encode", "group_mean", "group_partials", "group_scales"):
        for number, (method, how) in enumerate(BLOCKS.values()):
            form, add = form_of_blocks(method, how), number % 2 == 0
            whole = form["BLOCK"] > 0
            random = form["METHOD"] not in ("efsignsgd", "signsgd") and number != 1
            part = {"METHOD": form["METHOD"], "LEVELS": form["LEVELS"]}
            if name == "group_mean":
                yield RECEIVED, {**form, "TILE": T}
            elif name == "group_encode":
                rows, width = launcher.rows_of(form["BLOCK"]) if whole else (1, T)
                shape = {"BLOCK": form["BLOCK"] or T, "ROWS": rows, "WIDTH": width, "WHOLE": whole}
                yield {**SENT, "table0": "i32", "table1": "i32"}, {**form, **shape, "RANDOM": random, "ADD": add}
            elif not whole:
                for squares in (False, True) if method == "qsgd" else (False,):
                    if name == "group_partials":
                        more = {"TILE": T, "RANDOM": random, "ADD": add, "SQUARES": squares}
                        yield {**SENT, "partials": D}, {**part, **more}
                    else:
                        blocks = {"blocks": L, "partials": D, "table": L, "many": "i32", "out": "i64"}
                        yield blocks, {**part, "TILE": 1024, "SQUARES": squares}
    elif name in ("group_finite", "group_restore"):
        yield {**(RECEIVED if name == "group_finite" else TABLE), "flags": W}, {"TILE": T}
    elif name in ("eden_group", "eden_group_mean"):
        for width, bits in ((8, 3), (64, 2), (64, 4), (4096, 1), (launcher.LARGE, 4)):
            form = rotations.form_of(width, range(1 << bits))
            levels, middles = ("fp32",) * (1 << bits), ("fp32",) * ((1 << bits) - 1)
            if name == "eden_group":
                floats = {"levels": levels, "middles": middles, "root": "fp32", "divisor": "fp32"}
                yield {**SENT, **floats, "stream": "i32"}, {**form, "BIASED": bits == 1, "ADD": bits > 1}
            else:
                yield {**RECEIVED, "levels": levels, "root": "fp32"}, form
    elif name == "group_scatter":
        for address in ("i32", "i64"):
            yield {**RECEIVED, "positions": address}, {"TILE": T, "SOME": 256}
    else:
        for random in (True, False):
            form = {"TILE": T, "RANDOM": random, "ADD": not random}
            if name == "group_digits":
                for shift in selections.SHIFTS:
                    yield {**CHUNKED, "before": W, "counts": W, "found": L, "marks": W}, {**form, "SHIFT": shift}
            else:
                more = {"counts": W, "found": L, "marks": W, "positions": "i64"}
                yield {**CHUNKED, "out": "i64", **more}, form


def compiled(name, types, constants, architecture):
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=KERNELS[name], signature=signature, constexprs=constants)
    options = {"enable_fp_fusion": False}
    if name.startswith("eden"):
        options["num_warps"] = rotations.warps_of(constants["WIDTH"])
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name, architecture):
    done = 0
    for types, constants in forms(name):
        found = compiled(name, types, constants, architecture)
        assert len(found.asm["cubin"]) > 1000
        assert f".target sm_{architecture}" in found.asm["ptx"]
        # Each operation rounds separately, to nearest, and subnormal numbers are not flushed to 0.
        code = [line.split("//")[0].split() for line in found.asm["ptx"].splitlines()]
        words = {word for line in code for word in line}
        assert not [word for word in words if re.match(r"fma\.|div\.(full|approx)|rcp|.*\.ftz", word)]
        arithmetic = {word for word in words if re.match(r"(add|sub|mul|div)\..*f(32|64)", word)}
        assert all(re.fullmatch(r"(add|sub|mul|div)\.rn\.f(32|64)", word) for word in arithmetic), arithmetic
        done += 1
    assert done


def counted(name, types, constants):
    """The number of wide and narrow memory accesses in the code for sm_90."""
    text = compiled(name, types, constants, 90).asm["ptx"]
    return {
        access: len(re.findall(rf"\b{access.split('.')[0]}\.global(?:\.\S+)?\.{access.split('.', 1)[1]}\s", text))
        for access in ("ld.v4.b32", "st.v4.b32", "st.b32", "st.b8", "ld.b32", "ld.b8")
    }


@pytest.mark.parametrize("method", ["int4", "signs", "eden"])
def test_full_tiles_are_read_and_written_by_accesses_of_128_bits(method):
    """x and the residual are read, the new residual and x are written; codes of 4 bits are written as 32-bit words."""
    if method == "eden":
        form = {**rotations.form_of(64, range(16)), "BIASED": False, "ADD": True}
        floats = {"levels": ("fp32",) * 16, "middles": ("fp32",) * 15, "root": "fp32", "divisor": "fp32"}
        encode = "eden_group", {**SENT, **floats, "stream": "i32"}, form
        mean = (
            "eden_group_mean",
            {**RECEIVED, "levels": ("fp32",) * 16, "root": "fp32"},
            rotations.form_of(64, range(16)),
        )
        each = rotations.TILE // 128 // 4
    else:
        form = form_of_blocks(*BLOCKS[method])
        shape = {"ROWS": 8, "WIDTH": 512, "WHOLE": True, "RANDOM": False, "ADD": True}
        encode = "group_encode", {**SENT, "table0": "i32", "table1": "i32"}, {**form, **shape}
        mean, each = ("group_mean", RECEIVED, {**form, "TILE": T}), T // 128 // 4
    found, back = counted(*encode), counted(*mean)
    assert found["ld.v4.b32"] == found["st.v4.b32"] == 2 * each  # for each of 128 threads
    assert back["st.v4.b32"] == each


def test_all_kernels_are_tried():
    assert len(KERNELS) == 11
