"""Chunk functions of blockwise methods, compiled by PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

from grace.core import Compressor, Context, name_of
from grace.core.sharding import divisible, in_chunks
from grace.engine.accelerators import accelerator_of


@cache
def compiled(xp: Any) -> Any:
    """A backend's compiled functions (`grace.engine.inductor.Forms`), or None."""
    if xp.name != "torch" or not xp.on_host:
        return None
    try:
        from grace.engine.inductor import Forms  # slow: imports the compiler
    except ImportError as error:
        warnings.warn(f"compile=True: this PyTorch lacks what it needs ({error})", stacklevel=2)
        return None
    return Forms(xp)


def uncompiled(points: Sequence[tuple[Compressor, Context]], xp: Any) -> str:
    """Why compiling would not help any of these compressors and tensors; empty if it would."""
    if compiled(xp) is None:
        return f"it is for PyTorch's tensors on CPUs, and these are {xp.name}'s" + " on a device" * (xp.name == "torch")
    names = ", ".join(sorted({repr(name_of(compressor)) for compressor, _ in points}))
    blockwise = [(compressor, ctx) for compressor, ctx in points if divisible(compressor)]
    if not blockwise:
        return (
            f"it is for methods that work on blocks one by one, as block_size=512 makes many do, not {names or 'none'}"
        )
    if not any(in_chunks(compressor, ctx) for compressor, ctx in blockwise):
        return f"it is for tensors of more than {xp.piece:,} elements; fuse='model' makes one of all"
    if xp.kernels and all(accelerator_of(compressor).encodes for compressor, _ in blockwise):
        return f"native kernels, which are faster, carry out {names}"
    return ""
