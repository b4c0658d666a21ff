"""The kernels as TensorFlow CPU operations, eager and inside ``tf.function``; optional, built with the kernels.

Operations compute what the methods of `grace.kernels.Library` with the same names do. x, residual and out are
float32[n]; ``residual`` may be None. ``out`` reuses the memory of x or of the residual if nothing else needs it.
Invalid arguments, such as a payload of the wrong size, raise ``InvalidArgumentError``. In a graph, shapes are known if
those of the arguments are. There are no gradients.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import tensorflow as tf

from grace.core import Compressor, name_of
from grace.core.rng import NOISE, Rng
from grace.kernels import library
from grace.kernels.arrays import Arrays
from grace.kernels.host import absent, partly
from grace.kernels.quantisers import Quantisers
from grace.kernels.sparsifiers import Sparsifiers
from grace.kernels.transforms import Transforms

__all__ = [
    "TensorflowKernels",
    "available",
    "blockint_encode",
    "blockint_mean",
    "efsignsgd_encode",
    "efsignsgd_mean",
    "noise_table",
    "sparse_mean",
    "topk_encode",
]

Tensor = Any


def available() -> bool:
    """Whether the operations are built, and GRACE_KERNELS is not off."""
    return library() is not None and _operations() is not None


def efsignsgd_encode(x: Tensor, residual: Tensor | None, block: int, threads: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return bits uint8[ceil(n/8)], scales float32[m], and out."""
    return _ops().grace_efsignsgd_encode(x=x, residual=_or_empty(residual), block=block, threads=threads)


def efsignsgd_mean(bits: Sequence[Tensor], scales: Sequence[Tensor], n: int, block: int, threads: int = 1) -> Tensor:
    """Return float32[n], the mean of the workers' payloads."""
    return _ops().grace_efsignsgd_mean(bits=bits, scales=scales, n=n, block=block, threads=threads)


def blockint_encode(
    x: Tensor,
    residual: Tensor | None,
    block: int,
    bits: int,
    table: Tensor | None = None,
    offsets: Tensor | None = None,
    start: int = 0,
    threads: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes uint8[ceil(n * bits / 8)], scales float32[m], and out.

    With ``table``, uint16[65536], and ``offsets``, rounding is stochastic; without them, it is to nearest.
    """
    nothing = tf.zeros(0, tf.uint16) if table is None else None
    return _ops().grace_blockint_encode(
        x=x,
        residual=_or_empty(residual),
        table=nothing if table is None else table,
        offsets=nothing if table is None else offsets,
        block=block,
        bits=bits,
        stochastic=table is not None,
        start=start,
        threads=threads,
    )


def blockint_mean(
    codes: Sequence[Tensor], scales: Sequence[Tensor], n: int, block: int, bits: int, threads: int = 1
) -> Tensor:
    """Return float32[n], the mean of the workers' payloads."""
    return _ops().grace_blockint_mean(codes=codes, scales=scales, n=n, block=block, bits=bits, threads=threads)


def topk_encode(x: Tensor, residual: Tensor | None, k: int, threads: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return values float32[k], positions int32[k], which ascend, and out."""
    return _ops().grace_topk_encode(x=x, residual=_or_empty(residual), k=k, threads=threads)


def sparse_mean(values: Sequence[Tensor], positions: Sequence[Tensor], n: int, threads: int = 1) -> Tensor:
    """Return float32[n], the mean of the workers' payloads; rejects positions that do not ascend within 0 .. n-1."""
    return _ops().grace_sparse_mean(values=values, positions=positions, n=n, threads=threads)


def noise_table(keys: tuple[Any, Any], n: int) -> Tensor:
    """Return uint16[n]: the upper halves of a stream's first n words."""
    key0, key1 = (tf.cast(key, tf.int64) for key in keys)
    return _ops().grace_noise_table(key0=key0, key1=key1, n=n)


def _or_empty(residual: Tensor | None) -> Tensor:
    return tf.zeros(0, tf.float32) if residual is None else residual


@cache
def _operations() -> Any:
    from grace.kernels import build

    path, kernels = build.find("tensorflow"), library()
    if path is None or kernels is None:
        return None
    operations = tf.load_op_library(str(path))
    use = ctypes.CDLL(str(path)).grace_tensorflow_use
    use.restype, use.argtypes = ctypes.c_int, [ctypes.c_char_p, ctypes.c_void_p]
    if use(kernels.path.encode(), kernels.handle):
        raise RuntimeError(f"{kernels.path} lacks what {path} needs: remove both and build again")
    return operations


def _ops() -> Any:
    operations = _operations()
    if operations is None:
        raise RuntimeError("TensorFlow's kernels are not built: python -m grace.kernels.build")
    return operations


@contextmanager
def _refusals() -> Iterator[None]:
    # In eager mode, raise ValueError for invalid payloads, as other backends do. A graph raises InvalidArgumentError.
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(error.message) from error


@partly(Quantisers)
class TensorflowQuantisers:
    """Kernels of `Quantisers` for TensorFlow's CPU tensors."""

    def __init__(self, xp: Any):
        self._xp = xp

    def efsignsgd_encode(self, x: Tensor, residual: Tensor | None, block: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """float32[n] -> bits uint8[ceil(n/8)], scales float32[m]; new residual."""
        *payload, left = efsignsgd_encode(x, residual, block, self._xp.threads)
        return tuple(payload), left

    def efsignsgd_mean(self, payloads: Sequence[tuple[Tensor, ...]], out: None, n: int, block: int) -> Tensor:
        """Each worker's bits and scales -> float32[n]."""
        bits, scales = zip(*payloads, strict=True)
        with _refusals():
            return efsignsgd_mean(bits, scales, n, block, self._xp.threads)

    def blockint_encode(
        self, x: Tensor, residual: Tensor | None, block: int, bits: int, rng: Rng | None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """float32[n] -> codes uint8[ceil(n * bits / 8)], scales float32[m]; new residual. ``rng``: round at random."""
        if rng is None:
            *payload, left = blockint_encode(x, residual, block, bits, threads=self._xp.threads)
            return tuple(payload), left
        table = noise_table(rng.table, NOISE)
        offsets = noise_table(rng.keys, -(-(rng.offset + x.shape[0]) // NOISE))[rng.offset // NOISE :]
        *payload, left = blockint_encode(x, residual, block, bits, table, offsets, rng.offset, self._xp.threads)
        return tuple(payload), left

    def blockint_mean(self, payloads: Sequence[tuple[Tensor, ...]], out: None, n: int, block: int, bits: int) -> Tensor:
        """Each worker's codes and scales -> float32[n]."""
        codes, scales = zip(*payloads, strict=True)
        with _refusals():
            return blockint_mean(codes, scales, n, block, bits, self._xp.threads)


@partly(Sparsifiers)
class TensorflowSparsifiers:
    """Kernels of `Sparsifiers` for TensorFlow's CPU tensors."""

    def __init__(self, xp: Any):
        self._xp = xp

    def topk_encode(self, x: Tensor, residual: Tensor | None, k: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """float32[n] -> values float32[k] and positions int32[k] of the largest magnitudes; and the new residual."""
        *payload, left = topk_encode(x, residual, k, self._xp.threads)
        return tuple(payload), left

    def sparse_mean(self, payloads: Sequence[tuple[Tensor, ...]], out: None, n: int) -> Tensor:
        """Each worker's values and ascending positions -> float32[n]."""
        values, positions = zip(*payloads, strict=True)
        with _refusals():
            return sparse_mean(values, positions, n, self._xp.threads)


def _stream(rng: Rng) -> dict[str, Any]:
    # Returns the arguments of operations that draw random words.
    key0, key1 = (tf.cast(key, tf.int64) for key in rng.keys)
    return {"key0": key0, "key1": key1, "start": rng.offset}


@partly(Transforms)
class TensorflowTransforms:
    """Kernels of `Transforms` for TensorFlow's CPU tensors."""

    def __init__(self, xp: Any):
        self._xp = xp

    def eden_encode(
        self,
        x: Tensor,
        residual: Tensor | None,
        width: int,
        levels: Sequence[float],
        middles: Sequence[float],
        divisor: float,
        stream: Any,
        rng: Rng,
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """float32[n] -> codes uint8, scales float32[m], streams uint8[m]; and the new residual, if there is one."""
        *payload, left = _ops().grace_eden_encode(
            x=x,
            residual=_or_empty(residual),
            stream=tf.cast(stream, tf.int64),
            **_stream(rng),
            width=width,
            levels=levels,
            middles=middles,
            divisor=divisor,
            threads=self._xp.threads,
        )
        return tuple(payload), left

    def eden_mean(
        self,
        payloads: Sequence[tuple[Tensor, ...]],
        out: None,
        n: int,
        width: int,
        levels: Sequence[float],
        rng: Rng,
    ) -> Tensor:
        """Each worker's codes, scales and streams -> float32[n]."""
        codes, scales, streams = zip(*payloads, strict=True)
        with _refusals():
            return _ops().grace_eden_mean(
                codes=codes,
                scales=scales,
                streams=streams,
                **_stream(rng),
                n=n,
                width=width,
                levels=levels,
                threads=self._xp.threads,
            )


class TensorflowKernels:
    """The counterpart of `grace.kernels.host.HostKernels` for TensorFlow's CPU tensors."""

    arrays = absent(Arrays)

    def __init__(self, xp: Any):
        found = library()
        self.quantisers, self.sparsifiers = TensorflowQuantisers(xp), TensorflowSparsifiers(xp)
        self.transforms = TensorflowTransforms(xp)
        self.isa = found.isa if found else ""

    def keys(self, stem: int, step: Any, worker: Any) -> tuple[Tensor, Tensor]:
        """Return two int64 scalars, the keys of a random stream: `grace.core.rng.keys`."""
        step, worker = tf.cast(step, tf.int64), tf.cast(worker, tf.int64)
        first, second = _ops().grace_keys(step=step, worker=worker, stem=stem)
        return first, second

    def whole(self, compressor: Compressor) -> bool:
        """Whether these operations cover the whole method; otherwise NumPy's kernels run it."""
        if name_of(compressor) == "topk":
            return (compressor.selector, compressor.index_coding) == ("exact", "int32")  # type: ignore[attr-defined]
        return name_of(compressor) in ("none", "fp16", "blockint", "efsignsgd", "eden")
