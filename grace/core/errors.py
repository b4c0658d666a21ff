"""Errors that several modules raise or handle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from grace.core.state import name_of

if TYPE_CHECKING:
    from grace.core.compressor import Compressor
    from grace.core.context import Context


class Unavailable(RuntimeError):
    """A kernel cannot be compiled or launched. It has written no output, so the call can be repeated without it."""


@contextmanager
def sent_by(worker: int | None, compressor: Compressor, ctx: Context) -> Iterator[None]:
    """Name the sender in a ValueError about its payload. ``worker``: its rank in ``ctx``; None: all of them."""
    try:
        yield
    except ValueError as error:
        ranks = range(ctx.world_size) if ctx._workers is None else ctx._workers
        who = "the workers together" if worker is None else f"worker {ranks[worker]} of {ranks.stop}"
        raise ValueError(
            f"{who} sent a payload for {ctx.name!r} that {name_of(compressor)!r} cannot have made: {error}. All "
            "workers must run the same version of GRACE; if they do, memory or the network has failed on that machine: "
            "restart from the last checkpoint without that machine"
        ) from error
