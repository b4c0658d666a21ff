"""Triton's kernels for single tensors: they call the kernels of groups for a group of one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from grace.core.dtypes import ITEMSIZE
from grace.core.rng import Rng, recent, signed
from grace.kernels.calls import Pairs, fitted
from grace.kernels.host import partly
from grace.kernels.quantisers import Quantisers
from grace.kernels.schema import CODECS
from grace.kernels.sparsifiers import Sparsifiers
from grace.kernels.transforms import Transforms
from grace.kernels.triton.tables import TritonGroups

Array = Any
Sizes = Any  # Sequence[tuple[str, int]]
"""The dtype and the length of each payload array. The second array has the scales, or the sent elements."""


class Singles:
    """Calls `TritonGroups` for single tensors; x always receives the new residual.

    A kernel that cannot be compiled or launched raises `Unavailable`, before writing any output.
    """

    def __init__(self, groups: TritonGroups):
        self._xp, self._groups = groups.xp, groups
        self._known: dict[Any, Any] = {}

    def _encode(
        self, name: str, x: Array, residual: Array | None, sizes: Sizes, how: Mapping[str, int],
        more: Mapping[str, Any] | None = None, rng: Rng | None = None,
    ) -> tuple[tuple[Array, ...], Array]:  # fmt: skip
        payload, places = self._payload(sizes)
        if not all(length for _, length in sizes):
            return payload, x

        def made() -> Any:
            points = self._points(x.shape[0], sizes, places, rng)
            return self._groups.encoder(name, how, more or {}, rng is not None, points)

        encoder = self._kept((name, x.shape[0], *how.items(), str(more), rng and rng.offset), made)
        state = (0, 0) if residual is None else (residual.data_ptr(), x.data_ptr())
        keys, table = _keys(rng)
        encoder.encode(x.data_ptr(), *state, payload[0].data_ptr() - places[0], keys, table)
        return payload, x

    def _mean(
        self, name: str, payloads: Pairs, out: Array | None, n: int, sizes: Sizes, how: Mapping[str, int],
        more: Mapping[str, Any] | None = None, rng: Rng | None = None,
    ) -> Array:  # fmt: skip
        payloads, out = fitted(self._xp, payloads, *sizes), self._xp.buffers.empty(n) if out is None else out
        if n == 0:
            return out
        at = _addresses(payloads)
        if (at - at[:, :1] != at[0] - at[0, 0]).any():  # a table has one offset per array, for all workers
            payloads = [self._copied(payload, sizes) for payload in payloads]
            at = _addresses(payloads)
        places, workers = (at[0] - at[0, 0]).tolist(), len(at)

        def made() -> Any:
            points = self._points(n, sizes, places, rng)
            return self._groups.decoder(name, how, more or {}, points, np.arange(workers)[None])

        key = name, n, workers, *places, *how.items(), str(more), rng and rng.offset
        self._kept(key, made).mean(at[:, 0], out.data_ptr(), _keys(rng)[0])
        return out

    def _kept(self, key: Any, made: Callable[[], Any]) -> Any:
        # One table per CUDA stream, because a table is copied on the stream that reads it.
        device = self._xp.device
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        return recent(self._known, (stream, *key), made)

    def _payload(self, sizes: Sizes) -> tuple[tuple[Array, ...], list[int]]:
        # Returns adjacent arrays in one message, wide dtypes first, and their byte offsets.
        places, at = [0] * len(sizes), 0
        for number in sorted(range(len(sizes)), key=lambda number: -ITEMSIZE[sizes[number][0]]):
            places[number], at = at, at + sizes[number][1] * ITEMSIZE[sizes[number][0]]
        message = self._xp.buffers.empty(at, "uint8")
        parts = zip(places, sizes, strict=True)
        views = (message[p : p + n * ITEMSIZE[dtype]].view(getattr(torch, dtype)) for p, (dtype, n) in parts)
        return tuple(views), places

    def _copied(self, payload: tuple[Array, ...], sizes: Sizes) -> tuple[Array, ...]:
        found, _ = self._payload(sizes)
        for to, array in zip(found, payload, strict=True):
            to.copy_(array)
        return found

    def _points(self, n: int, sizes: Sizes, places: Sequence[int], rng: Rng | None) -> dict[str, Any]:
        offset = 0 if rng is None else rng.offset
        numbers = {"sizes": n, "starts": offset, "counts": sizes[1][1], "flags": 0}
        found = {name: np.array([number], np.int64) for name, number in numbers.items()}
        return found | {"offsets": [np.array([place], np.int64) for place in places]}


def _addresses(payloads: Pairs) -> Any:
    return np.array([[array.data_ptr() for array in payload] for payload in payloads], np.int64)


def _keys(rng: Rng | None) -> tuple[Any, tuple[int, int]]:
    # The keys of a stream and of the noise table, as in `Blocks.encode`.
    if rng is None:
        return np.zeros((2, 1), np.int64), (0, 0)
    return np.array([[signed(key)] for key in rng.keys], np.int64), (signed(rng.table[0]), signed(rng.table[1]))


@partly(Quantisers)
class TritonQuantisers(Singles):
    """Kernels of `Quantisers` for device tensors: float32[n] -> the payload and new residual, and payloads -> mean."""

    def efsignsgd_encode(self, x: Array, residual: Array | None, block: int) -> Any:
        """Return bits and scales."""
        return self._coded("efsignsgd", x, residual, {"block": block})

    def efsignsgd_mean(self, payloads: Pairs, out: Array | None, n: int, block: int) -> Array:
        """Return float32[n], in ``out`` if given."""
        return self._decoded("efsignsgd", payloads, out, n, {"block": block})

    def blockint_encode(self, x: Array, residual: Array | None, block: int, bits: int, rng: Rng | None) -> Any:
        """Return codes and scales. ``rng``: for stochastic rounding."""
        return self._coded("blockint", x, residual, {"block": block, "bits": bits}, rng)

    def blockint_mean(self, payloads: Pairs, out: Array | None, n: int, block: int, bits: int) -> Array:
        """Return float32[n], in ``out`` if given."""
        return self._decoded("blockint", payloads, out, n, {"block": block, "bits": bits})

    def qsgd_encode(self, x: Array, residual: Array | None, block: int, bits: int, levels: int, rng: Rng) -> Any:
        """Return codes and norms. ``levels``: 0 for ternary numbers."""
        return self._coded("qsgd", x, residual, {"block": block, "bits": bits, "levels": levels}, rng)

    def qsgd_mean(self, payloads: Pairs, out: Array | None, n: int, block: int, bits: int, levels: int) -> Array:
        """Return float32[n], in ``out`` if given."""
        return self._decoded("qsgd", payloads, out, n, {"block": block, "bits": bits, "levels": levels})

    def _coded(self, name: str, x: Array, residual: Array | None, how: dict[str, int], rng: Rng | None = None) -> Any:
        return self._encode(name, x, residual, CODECS[name].sizes(x.shape[0], *how.values()), how, rng=rng)

    def _decoded(self, name: str, payloads: Pairs, out: Array | None, n: int, how: dict[str, int]) -> Array:
        return self._mean(name, payloads, out, n, CODECS[name].sizes(n, *how.values()), how)


@partly(Transforms)
class TritonTransforms(Singles):
    """Kernels of `Transforms` for device tensors."""

    def eden_encode(
        self, x: Array, residual: Array | None, width: int, levels: Sequence[float], middles: Sequence[float],
        divisor: float, stream: int, rng: Rng,
    ) -> tuple[tuple[Array, ...], Array]:  # fmt: skip
        """float32[n] -> the payload: codes, scales and streams; and the new residual (if there is a residual)."""
        how = {"width": width, "bits": len(levels).bit_length() - 1}
        more = {"levels": np.array(levels), "middles": np.array(middles), "divisor": divisor, "stream": stream}
        return self._encode("eden", x, residual, CODECS["eden"].sizes(x.shape[0], *how.values()), how, more, rng)

    def eden_mean(
        self, payloads: Pairs, out: Array | None, n: int, width: int, levels: Sequence[float], rng: Rng
    ) -> Array:
        """Each worker's codes, scales and streams -> float32[n], in ``out`` if given."""
        how = {"width": width, "bits": len(levels).bit_length() - 1}
        sizes, more = CODECS["eden"].sizes(n, *how.values()), {"levels": np.array(levels)}
        return self._mean("eden", payloads, out, n, sizes, how, more, rng)


@partly(Sparsifiers)
class TritonSparsifiers(Singles):
    """Kernels of `Sparsifiers` for device tensors."""

    def topk_encode(self, x: Array, residual: Array | None, k: int) -> tuple[tuple[Array, ...], Array]:
        """float32[n] -> positions int32[k] and values float32[k] of the largest magnitudes; and the new residual."""
        (positions, values), left = self._encode("topk", x, residual, (("int32", k), ("float32", k)), {})
        return (values, positions), left
