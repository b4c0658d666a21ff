"""Files: safetensors by mmap, written whole and renamed; checksums and zstd."""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grace.core.files import replacing

NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
    "C128": "complex128",
}
"""Names of dtypes in safetensors files, and in NumPy and the toolkits; safetensors itself lacks C128."""
SIZES = dict(zip(NAMES.values(), (1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 8, 8, 8, 8, 16), strict=True))
CODES = {name: code for code, name in NAMES.items()}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PART = 1 << 24
"""Bytes per write."""


class Slot(NamedTuple):
    """A tensor in a file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Safetensors:
    """A safetensors file, mapped into memory for reading. Raises ValueError for a damaged one."""

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise ValueError(f"{path} is damaged: {size} bytes are no safetensors file")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        length = int.from_bytes(self._map[:8], "little")
        if not 2 <= length <= min(size - 8, 100_000_000):
            raise ValueError(f"{path} is damaged: a header of {length} bytes in a file of {size}")
        try:
            header = json.loads(self._map[8 : 8 + length])
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            self.slots = {name: _slot(entry, 8 + length, size) for name, entry in header.items()}
            if not all(isinstance(each, str) for pair in self.metadata.items() for each in pair):
                raise ValueError("its metadata are no texts")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error

    def data(self, name: str) -> memoryview:
        """The bytes of a tensor."""
        slot = self.slots[name]
        return memoryview(self._map)[slot.begin : slot.end]

    @property
    def content(self) -> memoryview:
        """All bytes of the file."""
        return memoryview(self._map)


def _slot(entry: Mapping[str, Any], offset: int, size: int) -> Slot:
    begin, end = (offset + each for each in entry["data_offsets"])
    shape = tuple(entry["shape"])
    if entry["dtype"] not in NAMES:
        raise ValueError(f"dtype {entry['dtype']} is unknown")
    dtype = NAMES[entry["dtype"]]
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"shape {shape}")
    if not offset <= begin <= end <= size or end - begin != prod(shape) * SIZES[dtype]:
        raise ValueError(f"{end - begin} bytes at {begin} for {dtype}{list(shape)}: the file may be truncated")
    return Slot(dtype, shape, begin, end)


def write_safetensors(
    path: Path,
    tensors: Iterable[tuple[str, str, tuple[int, ...], Callable[[], Any]]],
    metadata: Mapping[str, str],
    done: Callable[[int], None] = lambda n: None,
) -> None:
    """Write a file whole: name, dtype, shape and data of each tensor. safetensors' own writer first copies each one.

    Data are called for one at a time.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset, listed = 0, list(tensors)
    for name, dtype, shape, _ in listed:
        size = prod(shape) * SIZES[dtype]
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, _, _, data in listed:
            content = memoryview(data())
            for begin in range(0, content.nbytes, PART):
                done(file.write(content[begin : begin + PART]))


def remove_parts(folder: Path) -> None:
    """Remove what killed writers left, of processes that are no more."""
    for part in folder.glob(".*.part"):
        with suppress(ValueError, OSError):
            try:
                os.kill(int(part.suffixes[-2][1:]), 0)
            except ProcessLookupError:
                part.unlink(missing_ok=True)


# -- packages of the extra ---------------------------------------------------------------------------------------------
def needed(package: str) -> Any:
    """A package of the extra `patch`."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"grace.patch needs {package}: pip install '.[patch]' in GRACE's source tree", name=error.name
        ) from error


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


CHECKSUMS: dict[str, Callable[[], Any]] = {
    "xxh3-128": lambda: needed("xxhash").xxh3_128(),
    "adler32": _Adler32,
    "blake3": lambda: needed("blake3").blake3(),
}
"""The formats of checksums; blake3 needs the package of its name, which no extra brings along."""


def hasher(kind: str) -> Any:
    """An object with ``update`` and ``hexdigest``."""
    if kind not in CHECKSUMS:
        raise ValueError(f"checksum {kind!r}: choose one of {', '.join(CHECKSUMS)}")
    return CHECKSUMS[kind]()


def checksum(kind: str, data: Any) -> str:
    """The checksum of some bytes."""
    found = hasher(kind)
    found.update(data)
    return str(found.hexdigest())


def pack(data: Any) -> bytes:
    """zstd, level 1."""
    return bytes(needed("zstandard").ZstdCompressor(level=1).compress(data))


def unpack(data: Any, most: int) -> bytes:
    """The inverse of `pack`. Raises ValueError for a damaged stream, and for one of more than ``most`` bytes."""
    zstandard = needed("zstandard")
    try:
        # A reader makes no more than it is asked for, whatever a damaged stream claims.
        found: bytes = zstandard.ZstdDecompressor().stream_reader(data).read(most + 1)
    except (zstandard.ZstdError, MemoryError) as error:
        raise ValueError(f"its zstd stream is damaged: {error}") from error
    if len(found) > most:
        raise ValueError(f"its zstd stream has more than {most} bytes")
    return found


def bits(data: Any) -> np.ndarray[Any, Any]:
    """Bytes as uint8."""
    return np.frombuffer(data, np.uint8)
