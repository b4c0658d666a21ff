"""The lab's models, with at least 8 million parameters and cheap steps, and their generated data.

Every worker draws its batches from (seed, rank, step) alone: the data never end, and all cases start from the same
weights and see the same data. So losses on the held-out batch can be compared between cases after equally many steps.
"""

from __future__ import annotations

import math
import sysconfig
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path

import torch
from torch import nn

HELD_OUT = -1  # the rank of the held-out batches
Batch = tuple[torch.Tensor, torch.Tensor]


def generator(*key: int) -> torch.Generator:
    """A separate generator for every key."""
    number = 0
    for part in key:
        number = (number * 1_000_003 + part + 1) % 2**62
    return torch.Generator().manual_seed(number)


class Task(ABC):
    """A model and its endless data."""

    batch_size: int
    lr: float
    momentum: float = 0.9

    def falling_rate(self, done: float) -> float:
        """The learning rate after this share of a complete training; it falls to zero along half a cosine."""
        return self.lr * 0.5 * (1 + math.cos(math.pi * done))

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model; its weights come from torch's seed."""

    @abstractmethod
    def batch(self, rank: int, step: int, size: int) -> Batch:
        """Inputs and targets."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Cross entropy."""
        inputs, targets = batch
        return nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    def held_out_loss(self, model: nn.Module) -> float:
        """The mean loss on the same held-out examples."""
        with torch.no_grad():
            return sum(self.loss(model, self.batch(HELD_OUT, i, 64)).item() for i in range(8)) / 8


class Prototypes(Task):
    """Ten noisy prototypes; one label in five is drawn at random, so no model's loss goes to zero."""

    shape: tuple[int, ...] = (3072,)
    noise = 4.0

    @cache  # noqa: B019 - one task for each process
    def prototypes(self) -> torch.Tensor:
        return torch.randn(10, *self.shape, generator=generator(0))

    def batch(self, rank: int, step: int, size: int) -> Batch:
        random = generator(1, rank + 1, step)
        labels = torch.randint(10, (size,), generator=random)
        inputs = self.prototypes()[labels] + self.noise * torch.randn(size, *self.shape, generator=random)
        wrong = torch.rand(size, generator=random) < 0.2
        return inputs, torch.where(wrong, torch.randint(10, (size,), generator=random), labels)


class MLP(Prototypes):
    """3072-2048-1024-10 with ReLU: 8.4 million parameters, nearly all in two matrices."""

    batch_size = 16
    lr = 0.002

    def model(self) -> nn.Module:
        layers = [nn.Linear(3072, 2048), nn.ReLU(), nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 10)]
        return nn.Sequential(*layers)


class CNN(Prototypes):
    """Six convolutions and two linear layers on 16x16 images: 10.5 million parameters in 28 tensors."""

    batch_size = 16
    lr = 0.003
    shape = (3, 16, 16)
    noise = 2.0

    def model(self) -> nn.Module:
        layers: list[nn.Module] = []
        widths = [(3, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2), (512, 512, 1), (512, 512, 1)]
        for into, out, stride in widths:
            layers += [nn.Conv2d(into, out, 3, stride, padding=1), nn.GroupNorm(8, out), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


class Block(nn.Module):
    """One layer of a Transformer."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(size, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(size, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """Predicts the next byte."""

    def __init__(self, layers: int = 6, width: int = 384, heads: int = 6, length: int = 32):
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class LanguageModel(Task):
    """A Transformer of 10.8 million parameters in 78 tensors, on the sources of Python's standard library."""

    batch_size = 4
    lr = 0.02
    length = 32

    @cache  # noqa: B019 - one task for each process
    def text(self) -> torch.Tensor:
        folder = Path(sysconfig.get_path("stdlib"))
        sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
        return torch.frombuffer(bytearray(byte for byte in sources if byte < 128), dtype=torch.uint8)

    def model(self) -> nn.Module:
        return Transformer(length=self.length)

    def batch(self, rank: int, step: int, size: int) -> Batch:
        text = self.text()
        held = len(text) // 10  # the first tenth is held out
        low, high = (0, held) if rank == HELD_OUT else (held, len(text))
        starts = torch.randint(low, high - self.length - 1, (size,), generator=generator(2, rank + 1, step))
        pieces = torch.stack([text[start : start + self.length + 1] for start in starts.tolist()]).long()
        return pieces[:, :-1], pieces[:, 1:]


TASKS: dict[str, type[Task]] = {"mlp": MLP, "cnn": CNN, "lm": LanguageModel}
