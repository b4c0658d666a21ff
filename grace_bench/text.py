"""A training with a name: layers of GPT-2's size learn the bytes of Python's standard library, by several methods.

Two processes share a device over gloo; seed, text and order are equal for all methods, and only the exchange differs.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import grace
from grace.factory import grace_from_params
from grace_bench.processes import Measurement

METHODS: dict[str, dict[str, Any]] = {
    "dense": {"compressor": "none"},
    "fp16": {"compressor": "fp16"},
    "blockint, 4 bits": {"compressor": "blockint", "bits": 4},
    "eden, 3 bits": {"compressor": "eden", "bits": 3, "block_size": 64},
    "powersgd, rank 16": {"compressor": "powersgd", "compress_rank": 16},
    "diloco, blockint, 4 bits": {"compressor": "blockint", "bits": 4, "memory": "none", "rounding": "stochastic"},
}
SYNC_EVERY = 10
"""Steps between the exchanges of DiLoCo."""


class Size(NamedTuple):
    """A model and its training."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int
    steps: int


LARGE, QUICK = Size(12, 768, 12, 256, 16, 300), Size(2, 64, 4, 32, 4, 20)
BYTES = 2**22
"""Bytes of text."""


class Bytes(torch.nn.Module):
    """GPT-2's layers over bytes instead of tokens: 86 million parameters in `LARGE`."""

    def __init__(self, size: Size):
        super().__init__()
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(
            size.width, size.heads, 4 * size.width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.letters, self.places = (torch.nn.Embedding(n, size.width) for n in (256, size.length))
        self.layers = torch.nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.norm, self.head = torch.nn.LayerNorm(size.width), torch.nn.Linear(size.width, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of each next byte, in nats; x: int64[batch, length + 1]."""
        given, wanted = x[:, :-1], x[:, 1:]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(given.shape[1], device=x.device)
        found = self.letters(given) + self.places(torch.arange(given.shape[1], device=x.device))
        found = self.head(self.norm(self.layers(found, mask=mask, is_causal=True)))
        return torch.nn.functional.cross_entropy(found.flatten(0, 1), wanted.flatten())


def text() -> torch.Tensor:
    """The first `BYTES` of the standard library's modules in the order of their names, as uint8."""
    found = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(found) < BYTES:
            found += path.read_bytes()
    return torch.frombuffer(bytearray(found[:BYTES]), dtype=torch.uint8)


def measurements(device: str, quick: bool) -> Iterator[Measurement]:
    """One training for each method."""
    for label, params in METHODS.items():
        yield label, partial(train, label, params, device, QUICK if quick else LARGE)


def train(label: str, params: Mapping[str, Any], device: str, size: Size) -> dict[str, Any]:
    """Returns a row: the mean loss of all workers in each step, and what the exchange sent."""
    model, corpus, local = Bytes(size).to(device), text(), label.startswith("diloco")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-4)
    grc = grace_from_params(dict(params), "torch")
    outer: Any = None
    if local:
        outer = grace.local.DiLoCo(grc, sync_every=SYNC_EVERY)
        grace.torch.local(optimizer, outer, model.named_parameters(), model.named_buffers())
    else:
        optimizer = grace.torch.DistributedOptimizer(optimizer, grc, named_parameters=model.named_parameters())
    drawn = torch.Generator().manual_seed(1 + dist.get_rank())
    losses, began = [], time.perf_counter()
    for _ in range(size.steps):
        starts = torch.randint(len(corpus) - size.length, (size.batch,), generator=drawn).tolist()
        batch = torch.stack([corpus[at : at + size.length + 1] for at in starts]).long().to(device)
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            loss = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if outer is not None:
        outer.finish()
    found = torch.stack(losses).float().cpu()
    dist.all_reduce(found)
    report = grc.report()
    return {
        "method": label,
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": [round(each, 4) for each in (found / dist.get_world_size()).tolist()],
        "seconds": round(time.perf_counter() - began, 2),
        "bytes_per_step": report.bytes_sent / size.steps,
    }
