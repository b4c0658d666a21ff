"""Declarations of kernels: the rows of `grace.kernels.schema`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True)
class Argument:
    """A C argument. Python passes a sequence for a type ending in [], and an address or None for a pointer."""

    type: str
    name: str
    default: str | None = None

    @classmethod
    def parse(cls, text: str) -> Argument:
        """Parse C, with a default value for Python: ``int64_t threads = 1``."""
        text, _, default = text.partition(" = ")
        type, _, name = text.strip().rpartition(" ")
        return cls(f"{type}[]" if name.endswith("[]") else type, name.removesuffix("[]"), default or None)

    @property
    def value(self) -> int | None:
        """The default value."""
        return None if self.default in (None, "nullptr") else int(self.default)

    def __str__(self) -> str:
        return f"{self.type.removesuffix('[]')} {self.name}{'[]' * self.type.endswith('[]')}"


@dataclass(frozen=True)
class Kernel:
    """A library function. ``arguments`` omits the first one, the loops of an instruction set."""

    name: str
    result: str
    arguments: tuple[Argument, ...]
    doc: str = ""
    refusal: Callable[..., str] | None = None
    """Returns an error text, given the arguments and a non-negative result, which is the index of the worker with an
    invalid payload."""
    memory: bool = False
    """Whether the function may return -2: out of memory."""

    def completed(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """The given arguments, followed by the missing ones, by name or default."""
        rest = self.arguments[len(arguments) :]
        if missing := [each.name for each in rest if each.name not in named and each.default is None]:
            raise TypeError(f"{self.name} lacks {', '.join(missing)}")
        if unknown := named.keys() - {each.name for each in rest}:
            raise TypeError(f"{self.name} does not take {', '.join(unknown)}")
        return *arguments, *(named.get(each.name, each.value) for each in rest)


@dataclass(frozen=True)
class Codec:
    """Kernels that encode a vector, and average the workers' payloads."""

    encode: str
    mean: str
    arrays: tuple[str, ...]
    """The names of the payload's arrays, which are arguments of the kernels."""
    sizes: Callable[..., tuple[tuple[str, int | None], ...]]
    """A function of n and the attributes. Returns the dtype and the length of each payload array; a length of None
    means that the array is absent."""


KERNELS: dict[str, Kernel] = {}
CODECS: dict[str, Codec] = {}

SOURCE = "const float* x, const float* residual, float* out"
NOISE = "const uint16_t* table = nullptr, const uint16_t* offsets = nullptr, int64_t start = 0"
KEYS = "int64_t key0, int64_t key1, int64_t start"
THREADS = "int64_t threads = 1"
SWAP = "int64_t threads = 1, int64_t swap = 0"
VALUES = "float* values, int32_t* positions"
C_TYPES = {"uint8": "uint8_t", "int32": "int32_t", "float32": "float"}


def packed(bits: int, n: int) -> int | None:
    """Number of bytes of n codes of ``bits`` bits each; None if ``bits`` is 0."""
    return (-(-n * bits // 8) if 8 % bits == 0 else -(-n // 8) * bits) if bits > 0 else None


def blocks(n: int, block: int) -> int:
    """Number of blocks; if ``block`` is 0, all elements are one block."""
    return -(-n // block) if block else min(n, 1)


def above(size: int) -> int:
    """Number of bits beyond the lower byte of a position in a chunk of ``size`` elements."""
    return max(0, (size - 1).bit_length() - 8)


def chosen(n: int, chunk: int, k: int) -> int:
    """Number of sent elements if each chunk sends k."""
    full, rest = divmod(n, chunk)
    return full * k + min(rest, k)


def kernel(declaration: str, doc: str = "", **more: Any) -> None:
    """Add a kernel. ``declaration``: in C, without the first argument, `loops`."""
    head, _, arguments = declaration.removesuffix(")").partition("(")
    result, _, name = head.rpartition(" ")
    parsed = tuple(Argument.parse(each) for each in arguments.split(", ") if each)
    KERNELS[name] = Kernel(name, result, parsed, " ".join(doc.split()), **more)


def codec(
    name: str,
    payload: dict[str, str],
    attributes: str,
    doc: str,
    encode: str | None = None,
    mean: str | None = None,
    *,
    first: str = "",
    source: str = SOURCE,
    size: str = "int64_t n",
    result: str = "void",
    counts: bool = False,
    refusal: Callable[..., str] | None = None,
    memory: bool = False,
    means: bool = True,
    swaps: bool = False,
) -> None:
    """Add the rows NAME_encode and NAME_mean.

    ``payload``: for each array dtype[length], where the length is a formula of ``size`` and the ``attributes``.
    ``encode``, ``mean``: arguments that replace the attributes in the row NAME_encode or NAME_mean. ``first``: leading
    arguments. ``swaps``: whether the encoder has `SWAP`.
    """
    named = ", ".join(Argument.parse(each).name for each in f"{size}, {attributes}".split(", ") if each)
    types, lengths = zip(*(each.removesuffix("]").split("[") for each in payload.values()), strict=True)
    pairs = "".join(f"({dtype!r}, {length}), " for dtype, length in zip(types, lengths, strict=True))
    sizes = eval(f"lambda {named}, *_: ({pairs})", globals())
    # cached, because each step evaluates it for each tensor
    CODECS[name] = Codec(f"{name}_encode", f"{name}_mean", tuple(payload), lru_cache(1024)(sizes))

    def add(kind: str, result: str, text: str, *parts: str | None, **more: Any) -> None:
        kernel(f"{result} {name}_{kind}({', '.join(filter(None, parts))})", text, **more)

    columns = [(C_TYPES[dtype], array) for dtype, array in zip(types, payload, strict=True)]
    arrays = ", ".join(f"{type}* {array}" for type, array in columns)
    what = "; ".join(f"{array}: {each}" for array, each in payload.items())
    taken, last = attributes if encode is None else encode, SWAP if swaps else THREADS
    add("encode", result, f"{doc} {what}.", first, source, arrays, size, taken, last, memory=memory)
    if means:
        sent = ", ".join(f"const {type}* const {array}[]" for type, array in columns)
        taken, counted = attributes if mean is None else mean, "const int64_t counts[]" if counts else ""
        wrong = "int64_t" if refusal else "void"
        text = f"Average: out, float[n] = the mean of the workers' payloads of {name}_encode."
        if refusal:
            text += f" Returns -1 on success,{' or' * (not memory)} the first worker whose payload is invalid"
            text += ", or -2." if memory else "."
        more = {"refusal": refusal, "memory": memory and refusal is not None}
        add("mean", wrong, text, first, sent, counted, "int64_t workers, float* out", size, taken, THREADS, **more)
