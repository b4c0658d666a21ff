"""Compares two versions of a tensor on its device, for `grace.patch`: `changes`."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

Array = Any

TILE = 4096
"""Words per program; divides `CHUNK`."""
CHUNK = 1 << 16
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def patch_count(new, base, counts, n, TILE: tl.constexpr):
    """Count the words of a tile that differ."""
    tile = tl.program_id(0).to(tl.int64)
    at = tile * TILE + tl.arange(0, TILE)
    a, b = tl.load(new + at, at < n, 0), tl.load(base + at, at < n, 0)
    tl.store(counts + tile, tl.sum((a != b).to(tl.int32), 0))


@triton.jit
def patch_gather(new, base, starts, places, values, steps, n, TILE: tl.constexpr):
    """Store the words of a tile that differ: their offsets in the chunk, new values, and steps, from ``starts`` on."""
    tile = tl.program_id(0).to(tl.int64)
    at = tile * TILE + tl.arange(0, TILE)
    a, b = tl.load(new + at, at < n, 0), tl.load(base + at, at < n, 0)
    differ = a != b
    to = tl.load(starts + tile) + tl.cumsum(differ.to(tl.int32), 0) - 1
    tl.store(places + to, (at & 65535).to(tl.int16), differ)  # as uint16: the upper half wraps
    tl.store(values + to, a, differ)
    tl.store(steps + to, a - b, differ)


def changes(new: Array, base: Array) -> tuple[Array, Array, Array, Array]:
    """Compare contiguous tensors of equal size and dtype, bit by bit, where they are.

    Returns, for n words of the element's size: counts, int32[chunks]; places, int16[k], the bits of uint16; steps and
    new values, [k]. These are the arrays of `grace.patch.delta.Delta`. The host waits once, for the number of changes.
    """
    word = WORDS[min(8, new.element_size())]
    if not new.numel():
        none = torch.empty(0, dtype=word, device=new.device)
        return none.int(), none.short(), none, none
    new, base = (each.reshape(-1).view(torch.uint8).view(word) for each in (new, base))
    n = new.numel()
    tiles = -(-n // TILE)
    counts = torch.empty(tiles, dtype=torch.int32, device=new.device)
    with torch.cuda.device_of(new):
        patch_count[(tiles,)](new, base, counts, n, TILE=TILE, enable_fp_fusion=False)
        ends = counts.cumsum(0, dtype=torch.int64)
        k = int(ends[-1])
        places = torch.empty(k, dtype=torch.int16, device=new.device)
        values, steps = (torch.empty(k, dtype=word, device=new.device) for _ in range(2))
        patch_gather[(tiles,)](new, base, ends - counts, places, values, steps, n, TILE=TILE, enable_fp_fusion=False)
    whole = torch.nn.functional.pad(counts, (0, -tiles % (CHUNK // TILE)))
    return whole.reshape(-1, CHUNK // TILE).sum(1, dtype=torch.int32), places, steps, values
