"""Broadcasts of parameters and of optimizer state."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from grace.backends import backend_of
from grace.collectives import Broadcast
from grace.core import Transport
from grace.pipeline import Grace
from grace.transports import get_transport

CHUNK_BYTES = 64 * 2**20
"""Of one broadcast message."""


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]], root_rank: int = 0, grace: Grace | None = None
) -> None:
    """Copy worker ``root_rank``'s values to all workers, in place.

    ``params``: ``model.state_dict()`` or ``model.named_parameters()``. ``grace``: whose transport to use; default: the
    one that is initialised.
    """
    named = dict(params)
    tensors = [named[name].detach() for name in sorted(named) if isinstance(named[name], torch.Tensor)]
    if not tensors:
        return
    transport = transport_of(grace, tensors[0])
    for chunk in _chunks(tensors):
        wait = transport.start([Broadcast((tensor.contiguous(),), root_rank) for tensor in chunk], "parameters")
        for tensor, (value,) in zip(chunk, wait(), strict=True):
            tensor.copy_(value)


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0, grace: Grace | None = None) -> None:
    """Copy worker ``root_rank``'s optimizer state to all workers, also to those that have none yet."""
    example = next(p for group in optimizer.param_groups for p in group["params"])
    transport = transport_of(grace, example)
    saved = io.BytesIO()
    if transport.rank == root_rank:
        torch.save(optimizer.state_dict(), saved)
    data = torch.frombuffer(bytearray(saved.getvalue() or b"\0"), dtype=torch.uint8).to(example.device)
    ((received,),) = transport.start([Broadcast((data,), root_rank, ragged=True)], "optimizer")()
    if transport.rank != root_rank:
        content = io.BytesIO(received.cpu().numpy().tobytes())
        optimizer.load_state_dict(torch.load(content, map_location=example.device, weights_only=True))


def transport_of(grace: Grace | None, example: torch.Tensor) -> Transport:
    """A Grace's transport, or the one that is initialised, for tensors like this one."""
    transport = get_transport() if grace is None else grace.transport
    return transport.bind(backend_of(example)) if getattr(transport, "xp", None) is None else transport


def _chunks(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    chunk: list[torch.Tensor] = []
    room = CHUNK_BYTES
    for tensor in tensors:
        if chunk and tensor.nbytes > room:
            yield chunk
            chunk, room = [], CHUNK_BYTES
        chunk.append(tensor)
        room -= tensor.nbytes
    yield chunk
