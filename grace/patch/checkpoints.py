"""Checkpoints: folders of safetensors files, mapped into memory, and their indexes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grace.core.files import replacing
from grace.patch.files import INDEX, SINGLE, Safetensors, checksum
from grace.patch.tensors import View, everything, words_of


def number(version: object) -> int:
    """A version as a number: "000007", or "v7" as ModelExpress writes it."""
    text = str(version).removeprefix("v")
    if not text.isdigit():
        raise ValueError(f"version {version!r} is no number")
    return int(text)


def read_index(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The metadata and the map of tensors of a folder's index. Raises ValueError for a damaged one."""
    path = folder / INDEX
    try:
        text = path.read_text()
        found = json.loads(text)
        metadata, files = found.get("metadata", {}), found["weight_map"]
        if not isinstance(metadata, dict) or not all(isinstance(each, str) for each in files.values()):
            raise ValueError("it maps no tensors to files")
        if metadata.get("delta_encoding") == "steps":
            digest = metadata.pop("digest", None)
            if digest != _digest(found) or text != _index_text({**metadata, "digest": digest}, files):
                raise ValueError("its digest is another")
    except (AttributeError, KeyError, TypeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if odd := [each for each in files.values() if Path(each).name != each or not each]:
        raise ValueError(f"{path} is damaged: {odd[0]!r} is no file in its folder")
    return metadata, files


def _index_text(metadata: Mapping[str, Any], files: Mapping[str, str]) -> str:
    return json.dumps({"metadata": metadata, "weight_map": files}, indent=1)


def _digest(index: Mapping[str, Any]) -> str:
    return checksum("xxh3-128", json.dumps(index, sort_keys=True).encode())


def write_index(folder: Path, metadata: dict[str, Any], files: Mapping[str, str]) -> None:
    """Write a folder's index whole; that of "steps" with its own checksum."""
    if metadata.get("delta_encoding") == "steps":
        metadata = {**metadata, "digest": _digest({"metadata": metadata, "weight_map": files})}
    with replacing(folder / INDEX) as file:
        file.write(_index_text(metadata, files).encode())


class Folder:
    """A checkpoint: a folder with `model.safetensors`, or with several files and an index."""

    def __init__(self, path: Path):
        self.path = path
        self.index: dict[str, Any] | None = None
        if (path / INDEX).exists():
            self.index, files = read_index(path)
            if "delta_encoding" in self.index:
                raise ValueError(f"{path} holds a patch, not a checkpoint")
            self.files = files
        elif (path / SINGLE).exists():
            self.files = {}
        else:
            raise FileNotFoundError(f"{path} has neither {SINGLE} nor {INDEX}")
        self.opened = {name: Safetensors(path / name) for name in sorted(set(self.files.values())) or [SINGLE]}
        if self.index is None:
            self.files = dict.fromkeys(self.opened[SINGLE].slots, SINGLE)
        for key, name in self.files.items():
            if key not in self.opened[name].slots:
                raise ValueError(f"{path / name} lacks {key}, which the index says it has")

    @property
    def version(self) -> int | None:
        """The version that the last applied patch led to; None if unknown."""
        held = self.index if self.index is not None else self.opened[SINGLE].metadata
        return number(held["version"]) if "version" in held else None

    def views(self) -> dict[str, View]:
        """Its tensors, mapped into memory, to be read."""
        found = {}
        for key, name in self.files.items():
            slot = self.opened[name].slots[key]
            words = words_of(self.opened[name].data(key), slot.dtype)
            found[key] = View(words, slot.dtype, slot.shape, everything(slot.shape))
        return found

    def check(self) -> None:
        """Compare the checksums that `save_whole` wrote; ValueError if one is another."""
        for key, name in self.files.items():
            wanted = self.opened[name].metadata.get(key)
            if wanted is not None and checksum("xxh3-128", self.opened[name].data(key)) != wanted:
                raise ValueError(f"{self.path / name}: {key} is damaged: its checksum is another")
