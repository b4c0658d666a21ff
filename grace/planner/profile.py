"""Profiles of a backward pass: a model's tensors in the order of their gradients, with the time of each part."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

FORMAT = 1


@dataclass(frozen=True)
class TensorProfile:
    """A gradient: its shape, and the seconds between the previous gradient and this one."""

    name: str
    shape: tuple[int, ...]
    backward: float

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a float32 gradient."""
        return 4 * self.size


@dataclass(frozen=True)
class Profile:
    """The tensors of a model in the order of their gradients."""

    tensors: tuple[TensorProfile, ...]
    source: str
    """Source of the times: "measured", "measured as a whole, apportioned by FLOPs", "assumed"."""
    forward: float = 0.0
    """Seconds of a step outside the backward pass: forward pass and optimizer."""

    @property
    def backward(self) -> float:
        """Seconds of the whole backward pass."""
        return sum(tensor.backward for tensor in self.tensors)

    @property
    def size(self) -> int:
        """Number of elements of all tensors."""
        return sum(tensor.size for tensor in self.tensors)

    def scaled(self, backward: float, source: str) -> Profile:
        """The same model with a backward pass of this many seconds; the forward pass scales with it."""
        factor = backward / self.backward
        tensors = tuple(replace(tensor, backward=tensor.backward * factor) for tensor in self.tensors)
        return Profile(tensors, source, self.forward * factor)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` is the inverse."""
        return {"version": FORMAT, **asdict(self)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1))


def from_dict(data: Any) -> Profile:
    """A profile from JSON data: {"tensors": [{"name", "shape" or "size", "backward"}], "source", "forward"}.

    ValueError, naming the tensor, for anything else.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("tensors"), Sequence) or not data["tensors"]:
        raise ValueError(
            'a profile is {"tensors": [{"name": ..., "shape": [...], "backward": seconds}, ...]}' + but(data)
        )
    if data.get("version", FORMAT) != FORMAT:
        raise ValueError(f"this profile has version {data['version']!r}, but this version of grace reads {FORMAT}")
    tensors = tuple(_tensor(each, number) for number, each in enumerate(data["tensors"]))
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the profile has two tensors of the name {twice!r}")
    return Profile(tensors, str(data.get("source", "given")), seconds(data.get("forward", 0.0), "forward"))


def _tensor(data: Any, number: int) -> TensorProfile:
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
        raise ValueError(f"tensor {number} of the profile has no name")
    name = data["name"]
    shape = data.get("shape", [data.get("size")])
    if not isinstance(shape, Sequence) or not all(type(length) is int and length > 0 for length in shape):
        raise ValueError(f'tensor {name!r} of the profile needs a "shape" (or a "size") of positive whole numbers')
    return TensorProfile(name, tuple(shape), seconds(data.get("backward", 0.0), f"backward of {name!r}"))


def seconds(value: Any, what: str) -> float:
    """A finite, non-negative number from untrusted data; else ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{what}={value!r}: write a finite number of at least 0")
    return float(value)


def load(path: str | os.PathLike[str]) -> Profile:
    """A profile from a JSON file. ValueError, naming the file, for anything else."""
    data = read_json(path)
    try:
        return from_dict(data)
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)}: {error}") from error


def read_json(path: str | os.PathLike[str]) -> Any:
    """The data of a JSON file; ValueError names the file and explains in plain words what is wrong."""
    name = os.fspath(path)
    text = read_text(path)
    if not text.strip():
        raise ValueError(f"{name} is empty")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{name} is not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:
        first = text.split("\n", 1)[0]
        try:
            kind = f": it is {KINDS['kind']}" if "kind" in json.loads(first) else ": it has several values"
        except (ValueError, TypeError):
            kind = f" ({error})"
        raise ValueError(f"{name} is not one JSON value{kind}") from error


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file; ValueError explains in plain words why it cannot be read."""
    name = os.fspath(path)
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ValueError(f"No such file: {name}") from error
    except IsADirectoryError as error:
        raise ValueError(f"{name} is a folder, not a file") from error
    except OSError as error:
        raise ValueError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not text in UTF-8") from error


KINDS = {
    "kind": "the record of a training, for `grace report`",
    "hash": "a plan",
    "inter": "a cluster, for --cluster",
    "wire": "compression costs, for --costs",
    "tensors": "a profile of a model",
    "records": "what `grace bench` measured",
}
"""Kinds of GRACE files, each by a key that only files of this kind have."""


def but(data: Any) -> str:
    """The end of an error message: which of GRACE's file types the data is, if any."""
    first = data[0] if isinstance(data, list) and data else data
    found = next((what for key, what in KINDS.items() if isinstance(first, Mapping) and key in first), None)
    return "" if found is None else f"; this is {found}"


def apportioned(work: Iterable[tuple[str, tuple[int, ...], float]], backward: float, source: str) -> Profile:
    """A backward pass of this many seconds, apportioned to tensors by their work.

    ``work``: name, shape and FLOPs (in any unit) of each tensor, in the order of the gradients.
    """
    rows = list(work)
    total = sum(flops for *_, flops in rows) or 1.0
    return Profile(tuple(TensorProfile(n, s, backward * flops / total) for n, s, flops in rows), source)


def medians(steps: Sequence[Sequence[tuple[str, float]]], shapes: Mapping[str, tuple[int, ...]]) -> Profile:
    """A profile from the gradient times of several backward passes.

    ``steps``: for each pass the pairs (name, seconds since it began), in order. The order is that of the last pass,
    the times are medians of the differences.
    """
    order = [name for name, _ in steps[-1]]
    waits: dict[str, list[float]] = {name: [] for name in order}
    for step in steps:
        before = 0.0
        for name, moment in step:
            if name in waits:
                waits[name].append(moment - before)
            before = moment
    tensors = []
    for name in order:
        found = sorted(waits[name])
        tensors.append(TensorProfile(name, shapes[name], max(found[len(found) // 2], 0.0)))
    return Profile(tuple(tensors), "measured")
