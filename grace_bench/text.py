"""A training with a name: GPT-2's layers learn the text of Python's standard library, by several methods.

Two processes share a device over gloo; seed, text and order are equal for all methods, and only the exchange differs.
"""

from __future__ import annotations

import importlib.util
import sysconfig
import time
from collections.abc import Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import grace
from grace.factory import grace_from_params
from grace_bench.processes import Measurement

METHODS: dict[str, dict[str, Any]] = {
    "dense": {"compressor": "none"},
    "blockint, 4 bits": {"compressor": "blockint", "bits": 4},
    "eden, 3 bits": {"compressor": "eden", "bits": 3, "block_size": 64},
    "powersgd, rank 16": {"compressor": "powersgd", "compress_rank": 16},
    "diloco, blockint, 4 bits": {"compressor": "blockint", "bits": 4, "memory": "none", "rounding": "stochastic"},
    "fp16": {"compressor": "fp16"},
}
"""Without time for all, the last ones are missing."""
SYNC_EVERY = 10
"""Steps between the exchanges of DiLoCo."""


class Size(NamedTuple):
    """A model and its training."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    places: int
    """The longest sequence."""
    length: int
    batch: int
    steps: int
    corpus: int
    """Bytes of text."""
    rate: float = 3e-4
    """The learning rate."""


LARGE = Size(12, 768, 12, 50_257, 1024, 256, 8, 300, 2**22)
"""GPT-2 with 124 million parameters, in 148 tensors."""
QUICK = Size(2, 64, 4, 512, 32, 32, 4, 20, 2**17, 3e-3)


class Gpt2(torch.nn.Module):
    """GPT-2: layers that normalise first, learnt positions, and the token embedding as the last layer."""

    def __init__(self, size: Size):
        super().__init__()
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(
            size.width, size.heads, 4 * size.width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.tokens, self.places = (torch.nn.Embedding(n, size.width) for n in (size.vocabulary, size.places))
        self.layers = torch.nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.norm = torch.nn.LayerNorm(size.width)
        for embedding in (self.tokens, self.places):
            torch.nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of each next token, in nats; x: int64[batch, length + 1]."""
        given, wanted = x[:, :-1], x[:, 1:]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(given.shape[1], device=x.device)
        found = self.tokens(given) + self.places(torch.arange(given.shape[1], device=x.device))
        found = self.norm(self.layers(found, mask=mask, is_causal=True)) @ self.tokens.weight.T
        return torch.nn.functional.cross_entropy(found.flatten(0, 1).float(), wanted.flatten())


def text(n: int) -> bytes:
    """The first n bytes of the standard library's modules in the order of their names."""
    found = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(found) < n:
            found += path.read_bytes()
    return found[:n]


def kind_of_tokens() -> str:
    """The kind of tokens on this machine: byte pairs if the library `tokenizers` is installed, otherwise bytes."""
    return "byte pairs" if importlib.util.find_spec("tokenizers") else "bytes"


def encoded(corpus: bytes, vocabulary: int) -> torch.Tensor:
    """A text as tokens below ``vocabulary``, int64[n]: byte pairs that are learnt from it, see `kind_of_tokens`."""
    if kind_of_tokens() == "bytes":
        return torch.frombuffer(bytearray(corpus), dtype=torch.uint8).long()
    from tokenizers import ByteLevelBPETokenizer

    tokenizer, lines = ByteLevelBPETokenizer(), corpus.decode("utf-8", "replace").splitlines(keepends=True)
    tokenizer.train_from_iterator(lines, vocab_size=vocabulary, show_progress=False)
    return torch.tensor([token for line in tokenizer.encode_batch(lines) for token in line.ids])


@cache
def tokens(size: Size) -> torch.Tensor:
    """The tokens of the corpus, int64[n], the same on all workers: worker 0 makes them."""
    mine = encoded(text(size.corpus), size.vocabulary) if dist.get_rank() == 0 else torch.empty(0)
    count = torch.tensor([len(mine)])
    dist.broadcast(count, 0)
    found = mine if dist.get_rank() == 0 else torch.empty(int(count), dtype=torch.int64)
    dist.broadcast(found, 0)
    return found


def measurements(device: str, quick: bool) -> Iterator[Measurement]:
    """One training for each method."""
    for label, params in METHODS.items():
        yield label, partial(train, label, params, device, QUICK if quick else LARGE)


def train(label: str, params: Mapping[str, Any], device: str, size: Size) -> dict[str, Any]:
    """Returns a row: the mean loss of all workers in each step, and what the exchange sent."""
    model, corpus, local = Gpt2(size).to(device), tokens(size), label.startswith("diloco")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=size.rate)
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
        batch = torch.stack([corpus[at : at + size.length + 1] for at in starts]).to(device)
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
        "tokens": kind_of_tokens(),
        "losses": [round(each, 4) for each in (found / dist.get_world_size()).tolist()],
        "seconds": round(time.perf_counter() - began, 2),
        "bytes_per_step": report.bytes_sent / size.steps,
    }
