"""The models in PyTorch. Inputs and logits have the layout of Keras: channels of images last, classes last."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from grace_bench.tasks.data import Arrays
from grace_bench.tasks.tasks import Task


def _conv(into: int, out: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(into, out, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_uniform_(convolution.weight, nonlinearity="relu")
    return nn.Sequential(convolution, nn.BatchNorm2d(out))


class _Residual(nn.Module):
    def __init__(self, into: int, out: int, stride: int):
        super().__init__()
        self.first, self.second = _conv(into, out, stride=stride), _conv(out, out)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or into != out:
            self.shortcut = _conv(into, out, 1, stride)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network of four stages (He et al., 2016); the first convolution halves the image."""

    def __init__(self, side: int, classes: int, width: int, blocks: int):
        super().__init__()
        layers: list[nn.Module] = [_conv(3, width, stride=2), nn.ReLU()]
        into = width
        for stage in range(4):
            out = min(width * 2**stage, 4 * width)
            for block in range(blocks):
                layers.append(_Residual(into, out, 2 if stage and not block else 1))
                into = out
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(into, classes)

    def forward(self, images: Any) -> Any:
        return self.head(self.layers(images.permute(0, 3, 1, 2).contiguous()).mean((2, 3)))


class LSTM(nn.Module):
    """Predicts the next word."""

    def __init__(self, words: int, length: int, width: int, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, words)
        for bias in ("bias_ih", "bias_hh"):  # as in Keras: forget gates are open at first
            for layer in range(layers):
                nn.init.zeros_(getattr(self.lstm, f"{bias}_l{layer}"))
                if bias == "bias_ih":
                    nn.init.ones_(getattr(self.lstm, f"{bias}_l{layer}")[width : 2 * width])
        nn.init.uniform_(self.embedding.weight, -0.05, 0.05)

    def forward(self, words: Any) -> Any:
        return self.head(self.lstm(self.embedding(words))[0])


class _Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        size, length, width = x.shape
        normed = self.before(x)
        q, k, v = (
            each(normed).view(size, length, self.heads, -1).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(size, length, width))
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """Predicts the next word: a decoder with pre-normalisation."""

    def __init__(self, words: int, length: int, width: int, layers: int, heads: int):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        for table in (self.words, self.places):
            nn.init.uniform_(table.weight, -0.05, 0.05)
        self.blocks = nn.Sequential(*[_Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, words: Any) -> Any:
        x = self.words(words) + self.places.weight[: words.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class NCF(nn.Module):
    """Neural matrix factorisation (He et al., 2017, section 3.4): products and a network over two pairs of tables."""

    def __init__(self, users: int, items: int, width: int):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for rows in (users, items, users, items))
        for table in self.tables:
            nn.init.uniform_(table.weight, -0.05, 0.05)
        layers: list[nn.Module] = []
        for into, out in ((2 * width, 2 * width), (2 * width, width), (width, width // 2)):
            layers += [nn.Linear(into, out), nn.ReLU()]
        self.network, self.head = nn.Sequential(*layers), nn.Linear(width + width // 2, 1)

    def forward(self, users: Any, items: Any) -> Any:
        a, b, c, d = (table(rows) for table, rows in zip(self.tables, (users, items, users, items), strict=True))
        return self.head(torch.cat([a * b, self.network(torch.cat([c, d], -1))], -1))[..., 0]


class UNet(nn.Module):
    """A contracting and an expanding path with shortcuts (Ronneberger et al., 2015), with norms and padding."""

    def __init__(self, side: int, classes: int, width: int, levels: int):
        super().__init__()

        def pair(into: int, out: int) -> nn.Module:
            return nn.Sequential(_conv(into, out), nn.ReLU(), _conv(out, out), nn.ReLU())

        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(pair(i, o) for i, o in zip([3, *widths], widths, strict=False))
        steps = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.wider = nn.ModuleList(nn.ConvTranspose2d(i, o, 2, 2) for i, o in steps)
        self.up = nn.ModuleList(pair(2 * o, o) for _, o in steps)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, images: Any) -> Any:
        x, kept = images.permute(0, 3, 1, 2).contiguous(), []
        for level, pair in enumerate(self.down):
            x = pair(functional.max_pool2d(x, 2) if level else x)
            kept.append(x)
        kept.pop()
        for wider, pair in zip(self.wider, self.up, strict=True):
            x = pair(torch.cat([kept.pop(), wider(x)], 1))
        return self.head(x).permute(0, 2, 3, 1)


MODELS: dict[str, type[nn.Module]] = {
    "resnet": ResNet,
    "lstm": LSTM,
    "transformer": Transformer,
    "ncf": NCF,
    "unet": UNet,
}


def optimizer_of(task: Task, parameters: Iterable[nn.Parameter], lr: float, momentum: float) -> torch.optim.Optimizer:
    """The optimizer that a task names."""
    if task.optimizer == "adam":
        return torch.optim.Adam(parameters, lr, betas=(momentum, 0.999))
    return torch.optim.SGD(parameters, lr, momentum=momentum)


def loss_of(task: Task, model: nn.Module, inputs: Arrays, targets: Any) -> torch.Tensor:
    """The loss of a batch of NumPy arrays."""
    logits, wanted = model(*map(torch.from_numpy, inputs)), torch.from_numpy(targets)
    if task.binary:
        return functional.binary_cross_entropy_with_logits(logits, wanted.float())
    return functional.cross_entropy(logits.flatten(0, -2), wanted.flatten())


def predict(model: nn.Module, inputs: Arrays) -> Any:
    """Logits in evaluation mode, as a NumPy array."""
    model.eval()
    with torch.no_grad():
        found = model(*map(torch.from_numpy, inputs)).numpy()
    model.train()
    return found
