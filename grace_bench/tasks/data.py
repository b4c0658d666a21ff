"""The data of tasks: synthetic data made from a seed, and readers of data sets on disk. Needs NumPy alone."""

from __future__ import annotations

import pickle
import re
import sysconfig
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

Arrays = tuple[Any, ...]
Predict = Callable[[Arrays], Any]
"""A model's prediction: arrays of inputs -> float32 logits, whose last dimension is the classes."""
PIECE = 64  # examples per call when a model predicts


class Data(ABC):
    """Training data to draw batches from, and held-out data to judge a model by."""

    source: str
    """A description of the data's origin."""

    @property
    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Sizes that a model needs, such as the number of classes or words."""

    @abstractmethod
    def batch(self, rng: np.random.Generator, size: int) -> tuple[Arrays, Any]:
        """Inputs and targets (integers) of ``size`` examples."""

    @abstractmethod
    def quality(self, predict: Predict) -> float:
        """The model's metric on held-out data."""


def in_pieces(predict: Predict, inputs: Arrays) -> Any:
    """The logits of many examples, computed piece by piece; the last piece is padded, so that all have one shape."""
    size, found = len(inputs[0]), []
    for start in range(0, size, PIECE):
        rows = np.arange(start, start + PIECE) % size
        found.append(predict(tuple(array[rows] for array in inputs)))
    return np.concatenate(found)[:size]


# -- images ------------------------------------------------------------------------------------------------------------
class Images(Data):
    """Images float32[n, side, side, 3] with a class for each, int64[n]: judged by accuracy."""

    def __init__(self, train: tuple[Any, Any], test: tuple[Any, Any], classes: int, source: str):
        self.train, self.test, self.classes, self.source = train, test, classes, source

    @property
    def sizes(self) -> dict[str, int]:
        return {"classes": self.classes, "side": self.train[0].shape[1]}

    def batch(self, rng: np.random.Generator, size: int) -> tuple[Arrays, Any]:
        rows = rng.integers(len(self.train[0]), size=size)
        return (self.train[0][rows],), self.train[1][rows]

    def quality(self, predict: Predict) -> float:
        return float((in_pieces(predict, (self.test[0],)).argmax(-1) == self.test[1]).mean())


class Masks(Images):
    """Images with a class per pixel, int64[n, side, side], 0 for background: judged by the other classes' mean IoU.

    IoU of a class: pixels that both the label and the prediction assign to it, over those that at least one does
    (Jaccard index).
    """

    def quality(self, predict: Predict) -> float:
        said, real = in_pieces(predict, (self.test[0],)).argmax(-1), self.test[1]
        found = []
        for kind in range(1, self.classes):
            either = np.logical_or(said == kind, real == kind).sum()
            found.append(np.logical_and(said == kind, real == kind).sum() / max(either, 1))
        return float(np.mean(found))


SHAPES = ("disc", "square", "triangle", "ring", "cross")


def _inside(kind: Any, x: Any, y: Any) -> Any:
    # Returns whether points (in units of the shape's radius) belong to the shape; all arrays broadcast.
    distance = np.hypot(x, y)
    arms = (abs(x) < 0.32) | (abs(y) < 0.32)
    tests = [
        distance < 1,
        np.maximum(abs(x), abs(y)) < 0.85,
        (y < 0.7) & (y > 2.2 * abs(x) - 1),
        (distance < 1.05) & (distance > 0.6),
        (np.maximum(abs(x), abs(y)) < 1) & arms,
    ]
    return np.choose(kind, tests)


def shapes(rng: np.random.Generator, n: int, noise: float, side: int = 32) -> tuple[Any, Any, Any]:
    """Noisy images of one coloured shape each: float32[n, side, side, 3]; classes int64[n]; masks int64[n, side, side].

    There are ten classes: each of `SHAPES`, brighter or darker than the background. A mask is 1 inside the shape.
    """
    one = np.float32(1)
    kind, dark = rng.integers(len(SHAPES), size=n), rng.integers(2, size=n)
    radius = rng.uniform(0.2, 0.34, (n, 1, 1)).astype(np.float32) * side
    centre = rng.uniform(0.36, 0.64, (2, n, 1, 1)).astype(np.float32) * side
    row, column = np.mgrid[:side, :side].astype(np.float32) + one / 2
    x, y = (column - centre[0]) / radius, (row - centre[1]) / radius
    turn = rng.uniform(-0.3, 0.3, (n, 1, 1)).astype(np.float32)
    x, y = x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn)
    mask = _inside(kind[:, None, None], x, y)
    ground = rng.uniform(-0.5, 0.5, (n, 1, 1, 3)).astype(np.float32)
    change = rng.uniform(0.35, 0.9, (n, 1, 1, 3)).astype(np.float32) * np.where(dark, -one, one)[:, None, None, None]
    across, down = rng.uniform(-0.4, 0.4, (2, n, 1, 1, 1)).astype(np.float32)
    images = noise * rng.standard_normal((n, side, side, 3), np.float32)
    images += ground + across * (column / side - one / 2)[..., None] + down * (row / side - one / 2)[..., None]
    images += change * mask[..., None]
    return images, kind + len(SHAPES) * dark, mask.astype(np.int64)


def made_images(train: int = 3500, test: int = 500) -> Images:
    """Ten classes of `shapes`, in CIFAR-10's form."""
    images, labels, _ = shapes(np.random.default_rng(1), train + test, 0.45)
    return Images((images[test:], labels[test:]), (images[:test], labels[:test]), 10, "made shapes")


def made_masks(train: int = 2250, test: int = 250) -> Masks:
    """The masks of `shapes`, with noisier images."""
    images, _, masks = shapes(np.random.default_rng(2), train + test, 1.0)
    return Masks((images[test:], masks[test:]), (images[:test], masks[:test]), 2, "made shapes")


def cifar10(folder: Path) -> Images:
    """CIFAR-10 from the five ``data_batch_*`` and ``test_batch`` of its Python version, channels normalised.

    The files are pickles: read only those that you trust.
    """

    def read(names: Iterable[str]) -> tuple[Any, Any]:
        images, labels = [], []
        for name in names:
            with (folder / name).open("rb") as file:
                found = _Plain(file, encoding="latin1").load()
            images.append(np.asarray(found["data"], np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
            labels += found["labels"]
        return np.concatenate(images).astype(np.float32) / 255, np.asarray(labels, np.int64)

    (x, y), (test_x, test_y) = read(f"data_batch_{i}" for i in range(1, 6)), read(["test_batch"])
    mean, spread = x.mean((0, 1, 2)), x.std((0, 1, 2)) + 1e-6
    return Images(((x - mean) / spread, y), ((test_x - mean) / spread, test_y), 10, "CIFAR-10")


class _Plain(pickle.Unpickler):
    """Unpickles arrays, lists and dictionaries only; rejects every other class."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {"_reconstruct", "ndarray", "dtype", "_frombuffer", "scalar", "encode"}
        if name not in allowed or module.partition(".")[0] not in ("numpy", "_codecs"):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in CIFAR-10: is this its Python version?")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


# -- text --------------------------------------------------------------------------------------------------------------
class Text(Data):
    """A long text, int32[n], in pieces of ``length`` words; the model predicts each next word: judged by perplexity."""

    def __init__(self, train: Any, test: Any, words: int, source: str, length: int = 32, pieces: int = 64):
        self.train, self.test, self.words, self.source, self.length = train, test, words, source, length
        starts = np.linspace(0, len(test) - length - 1, pieces).astype(int)
        self._held = test[starts[:, None] + np.arange(length + 1)]

    @property
    def sizes(self) -> dict[str, int]:
        return {"words": self.words, "length": self.length}

    def batch(self, rng: np.random.Generator, size: int) -> tuple[Arrays, Any]:
        starts = rng.integers(len(self.train) - self.length, size=size)
        found = self.train[starts[:, None] + np.arange(self.length + 1)]
        return (found[:, :-1],), found[:, 1:].astype(np.int64)

    def quality(self, predict: Predict) -> float:
        logits = in_pieces(predict, (self._held[:, :-1],)).astype(np.float32)
        logits -= logits.max(-1, keepdims=True)
        right = np.take_along_axis(logits, self._held[:, 1:, None].astype(np.int64), -1)[..., 0]
        losses = np.log(np.exp(logits).sum(-1)) - right
        return float(np.exp(min(losses.mean(dtype=np.float64), 50.0)))


UNKNOWN = "<unk>"


def numbered(train: Sequence[str], test: Sequence[str], words: int | None = None) -> tuple[Any, Any, int]:
    """Convert both texts to int32 numbers of words; also returns the number of different words.

    Number 0 is `UNKNOWN`; the words of the training text follow, by falling frequency. ``words``: the largest number of
    different words, `UNKNOWN` included (None: no limit); all further words become `UNKNOWN`.
    """
    counts = Counter(train)
    counts.pop(UNKNOWN, None)
    kept = [word for word, _ in sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))][: words and words - 1]
    numbers = {word: number for number, word in enumerate([UNKNOWN, *kept])}
    both = (np.fromiter((numbers.get(word, 0) for word in text), np.int32, len(text)) for text in (train, test))
    first, second = both
    return first, second, len(numbers)


def python_sources(words: int = 2000, limit: int = 300_000) -> Text:
    """The words, numbers and signs in the sources of Python's standard library, in the order of file names.

    Every tenth file is held out. The text, and so the perplexity, depends on the version of the running Python.
    """
    train: list[str] = []
    test: list[str] = []
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for index, path in enumerate(files):
        into, most = (test, limit // 10) if index % 10 == 0 else (train, limit)
        if len(into) < most:
            found = re.findall(r"[A-Za-z_]+|\d+|\n|[^\s\w]", path.read_text(encoding="utf-8", errors="replace"))
            into += found[: most - len(into)]
    return Text(*numbered(train, test, words), "sources of Python's standard library")


def word_files(train: Path, test: Path, source: str) -> Text:
    """A text with spaces between words and a sentence on each line: the form of PTB and WikiText-2."""

    def read(path: Path) -> list[str]:
        return path.read_text(encoding="utf-8").replace("\n", " <eos> ").split()

    return Text(*numbered(read(train), read(test)), source)


# -- interactions ------------------------------------------------------------------------------------------------------
NEGATIVES = 4  # negative items drawn for each item that a user took: He et al., section 4.1
RIVALS = 99  # items that the user did not take, against which the held-out one is ranked
TOP = 10


class Interactions(Data):
    """Pairs of a user and an item that the user took, int32[n], and one held-out item of each user: judged by HR@10.

    HR@10: the share of users whose held-out item is among the first ten when it is ranked with 99 items that the user
    did not take (He et al., "Neural Collaborative Filtering", WWW 2017, section 4.1). Ties count against the model.
    """

    def __init__(self, users: Any, items: Any, held: Any, source: str, judged: int = 1000):
        """``held``: int32[users], the held-out item of each user; -1 for none."""
        self.users, self.items, self.source = users, items, source
        self._size = int(max(users.max(initial=0) + 1, len(held))), int(max(items.max(), held.max()) + 1)
        rng = np.random.default_rng(3)
        taken = np.zeros(self._size, bool)
        taken[users, items] = True
        known = np.flatnonzero(held >= 0)
        taken[known, held[known]] = True
        asked = known[~taken[known].all(1)]  # a user who took every item has no negatives
        asked = np.sort(rng.permutation(asked)[:judged])
        rivals = [rng.choice(np.flatnonzero(~taken[user]), RIVALS) for user in asked]
        self._asked = np.repeat(asked, 1 + RIVALS).astype(np.int32)
        self._ranked = np.concatenate([held[asked, None], rivals], 1).astype(np.int32)

    @property
    def sizes(self) -> dict[str, int]:
        return {"users": self._size[0], "items": self._size[1]}

    def batch(self, rng: np.random.Generator, size: int) -> tuple[Arrays, Any]:
        rows = np.repeat(rng.integers(len(self.users), size=-(-size // (1 + NEGATIVES))), 1 + NEGATIVES)[:size]
        targets = (np.arange(size) % (1 + NEGATIVES) == 0).astype(np.int64)
        drawn = rng.integers(self._size[1], size=size).astype(np.int32)
        return (self.users[rows], np.where(targets, self.items[rows], drawn)), targets

    def quality(self, predict: Predict) -> float:
        scores = in_pieces_of(25_000, predict, (self._asked, self._ranked.reshape(-1))).reshape(self._ranked.shape)
        return float(((scores[:, 1:] >= scores[:, :1]).sum(1) < TOP).mean())

    @cached_property
    def popularity(self) -> float:
        """HR@10 of recommending the items that most users took."""
        counts = np.bincount(self.items, minlength=self._size[1]).astype(np.float32)
        return self.quality(lambda inputs: counts[inputs[1]])


def in_pieces_of(size: int, predict: Predict, inputs: Arrays) -> Any:
    """The logits float32[n] of examples, computed ``size`` examples at a time."""
    parts = [predict(tuple(a[i : i + size] for a in inputs)) for i in range(0, len(inputs[0]), size)]
    return np.concatenate(parts).reshape(-1)


def made_interactions(users: int = 3000, items: int = 1500, each: int = 30) -> Interactions:
    """Users and items with eight latent features: the more alike they are, the likelier a user takes an item.

    Some items are popular with all users, so that popularity is a baseline above chance. One item of each user is held
    out.
    """
    rng = np.random.default_rng(4)
    tastes, traits = rng.standard_normal((users, 8)), rng.standard_normal((items, 8))
    scores = (tastes @ traits.T) * 1.1 + 0.7 * rng.standard_normal(items)
    # The largest scores plus Gumbel noise are draws without replacement, with probabilities proportional to exp(score).
    taken = np.argpartition(-(scores + rng.gumbel(size=scores.shape)), each, axis=1)[:, :each]
    taken = rng.permuted(taken, axis=1).astype(np.int32)
    who = np.repeat(np.arange(users, dtype=np.int32), each - 1)
    return Interactions(who, taken[:, 1:].reshape(-1), taken[:, 0], "made interactions of eight tastes")


def movielens(file: Path) -> Interactions:
    """MovieLens 100K (``u.data``) or 1M (``ratings.dat``): every rating is an interaction.

    Each user's last interaction is held out, as in He et al., section 4.1.
    """
    separator = "::" if file.suffix == ".dat" else "\t"
    rows = [line.split(separator) for line in file.read_text(encoding="latin1").splitlines() if line]
    table = np.array([[int(row[0]), int(row[1]), int(row[3])] for row in rows])
    _, users = np.unique(table[:, 0], return_inverse=True)
    _, items = np.unique(table[:, 1], return_inverse=True)
    order = np.lexsort((np.arange(len(table)), table[:, 2], users))
    users, items = users[order].astype(np.int32), items[order].astype(np.int32)
    last = np.append(users[1:] != users[:-1], True)
    return Interactions(users[~last], items[~last], items[last], f"MovieLens ({file.name})")
