"""The table of accelerators, filled lazily: importing GRACE imports no method."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

from grace.backends.deferred import DeferredKernels
from grace.core import Array, Compressor, Context, Memory, Payload
from grace.core.errors import Unavailable
from grace.engine.accelerators.base import Accelerator, MemoryAccelerator
from grace.engine.workspace import deferring

FAMILIES: dict[str, tuple[str, ...]] = {
    "quantisers": (
        *("compressors.efsignsgd", "compressors.onebit", "compressors.blockint", "compressors.qsgd"),
        *("compressors.terngrad", "compressors.signsgd", "compressors.signum", "compressors.threelc"),
        *("compressors.inceptionn", "compressors.sketch"),
    ),
    "floats": (
        *("compressors.bf16", "compressors.fp8", "compressors.natural", "compressors.natural_dithering"),
        "compressors.dettmers8",
    ),
    "transforms": ("compressors.eden", "compressors.thc", "compressors.demo"),
    "sparsifiers": (
        *("compressors.topk", "compressors.dgc", "compressors.threshold", "compressors.sidco"),
        *("compressors.randomk", "compressors.chunktopk", "compressors.adaq", "compressors.adacomp"),
        "compressors.wangni",
    ),
    "agreements": ("compressors.gtopk", "compressors.arctopk", "compressors.sketch_sgd", "compressors.cltk"),
    "chains": ("compressors.chain", "compressors.stc", "compressors.qsparse"),
    "shared_integers": ("compressors.shared_int",),
    "low_rank": ("compressors.powersgd", "compressors.gradzip", "compressors.acpsgd", "compressors.atomo"),
    "memories": (
        *("memories.residual", "memories.decoupled", "memories.lowpass", "memories.momentum"),
        "memories.dgc",
    ),
}
"""By accelerator module, which has a dictionary ACCELERATORS: the modules of the methods that it accelerates."""
_PLACES = {f"grace.{module}": family for family, modules in FAMILIES.items() for module in modules}
_PLAIN: Accelerator[Any] = Accelerator()
_PLAIN_MEMORY: MemoryAccelerator[Any] = MemoryAccelerator()


def accelerator_of(compressor: Compressor) -> Accelerator[Any]:
    """The accelerator of a compressor's exact type. Subclasses get the default one: they may override any method."""
    found: Accelerator[Any] = _find(type(compressor))
    return found


def memory_accelerator_of(memory: Memory) -> MemoryAccelerator[Any]:
    """The accelerator of a memory's exact type."""
    found: MemoryAccelerator[Any] = _find(type(memory))
    return found


@cache
def _find(kind: type) -> Any:
    family, default = _PLACES.get(kind.__module__), _PLAIN_MEMORY if issubclass(kind, Memory) else _PLAIN
    return default if family is None else table(family).get(kind, default)


def table(family: str) -> dict[type, Any]:
    """The accelerators of a family, by method type."""
    found: dict[type, Any] = import_module(f"grace.engine.accelerators.{family}").ACCELERATORS
    return found


def encode(compressor: Compressor, x: Array, residual: Array | None, ctx: Context) -> tuple[Payload, Array] | None:
    """Compress x + residual with a kernel: its payload and the new residual, or None without a kernel. x is donated."""
    try:
        return accelerator_of(compressor).encode(compressor, x, residual, ctx) if ctx.xp.kernels else None
    except Unavailable:
        return None


def mean(
    compressor: Compressor,
    payloads: Sequence[Payload],
    out: Array | None,
    ctx: Context,
    deferred: DeferredKernels | None = None,
) -> Array | None:
    """`Compressor.aggregate` by a kernel, written to ``out`` if given; None without a kernel.

    ``deferred``: a queue for the kernel, which then fills the result later.
    """
    ctx = deferring(ctx, deferred)
    try:
        return accelerator_of(compressor).mean(compressor, payloads, out, ctx) if ctx.xp.kernels else None
    except Unavailable:
        return None


def decode(compressor: Compressor, payload: Payload, ctx: Context) -> Array:
    """`Compressor.decompress`, by a kernel if there is one."""
    found = mean(compressor, [payload], None, ctx) if ctx.size else None
    return accelerator_of(compressor).decode(compressor, payload, ctx) if found is None else found
