"""Folders: checkpoints of safetensors files, and patches in them.

A patch is a folder ``weight_v000007`` with safetensors files and ``model.safetensors.index.json``, which is written
last and names version, base version, encoding, compression and checksums. Each changed tensor is a uint8 tensor of
encoded bytes. "xor" and "overwrite" are the format that SGLang, slime, Miles, vime and ModelExpress read; its files
hold each changed tensor's checksum as metadata. With "steps", metadata are a JSON text for each tensor, changed or not:
name, dtype, shape, region, checksum, tied names, number of changes; the index has a checksum of each file and of
itself.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from grace.patch.changes import (
    Entry,
    Patch,
    Prepared,
    Progress,
    Refused,
    check_regions,
    once,
    prepare,
    source,
    write,
)
from grace.patch.checkpoints import Folder, number, read_index, write_index
from grace.patch.coding import ENCODINGS
from grace.patch.files import INDEX, SINGLE, Safetensors, checksum, hasher, remove_parts, write_safetensors
from grace.patch.tensors import View, everything, part, view, words_of

PATCH = re.compile(r"weight_v(\d{6,})")
ANCHOR = re.compile(r"anchor_v(\d{6,})")
MADE = re.compile(r"\.v(\d{6,}|[0-9a-f]{12})\.safetensors$")
"""The end of the name of a file that `apply` wrote."""
SHARD = 1 << 30
"""Bytes after which a patch goes on in another file."""


def patch_folder(folder: str | os.PathLike[str], version: int) -> Path:
    """The folder of a patch."""
    return Path(folder) / f"weight_v{version:06d}"


def versions(folder: str | os.PathLike[str], pattern: re.Pattern[str] = PATCH) -> list[int]:
    """The versions that are there completely, ascending."""
    here = Path(folder)
    named = [(pattern.fullmatch(each.name), each) for each in here.iterdir()] if here.is_dir() else []
    return sorted(int(match[1]) for match, each in named if match and (each / INDEX).exists())


# -- patches -----------------------------------------------------------------------------------------------------------
def save(
    patch: Patch,
    folder: str | os.PathLike[str],
    version: int,
    base: int,
    encoding: str = "steps",
    *,
    rank: int = 0,
    workers: int = 1,
) -> Path:
    """Write a patch from version ``base`` to ``version`` below ``folder``; returns its own folder, weight_vVERSION.

    ``encoding``: "steps" is the smallest, "xor" and "overwrite" are for other readers (`grace.patch.coding`). Files
    appear whole, the index last: a killed writer leaves no version, or a complete one. ``workers``: how many of them
    save patches of their own shards (only "steps"); once all have, one calls `finish`.

    Raises FileExistsError if the version is there, and ValueError for a patch that the encoding cannot hold; then
    nothing is written.
    """
    if encoding not in ENCODINGS:
        raise ValueError(f"encoding {encoding!r}: choose one of {', '.join(ENCODINGS)}")
    if not 0 <= base < version:
        raise ValueError(f"a patch leads from an earlier version to a later one, not from {base} to {version}")
    here = patch_folder(folder, version)
    if (here / INDEX).exists():
        raise FileExistsError(f"{here} is there already: remove it first, or choose another version")
    partial_ = [each.name for each in patch.entries if each.region not in (None, everything(each.shape or ()))]
    if workers > 1 and encoding != "steps":
        raise ValueError(f"{encoding} has no shards of tensors: use steps, or gather the tensors first")
    if partial_ and encoding != "steps":
        raise ValueError(f"{encoding} needs a checksum of all of {partial_[0]}: use steps, or gather the tensors first")
    if partial_ and workers == 1:
        check_regions(patch.entries)
    files: list[list[tuple[Entry, memoryview | None]]] = [[]]
    size = 0
    for entry in patch.entries:
        data = patch.data_of(entry, encoding) if entry.changed else None
        if data is not None:
            if size and size + len(data) > SHARD and workers == 1:
                files.append([])
                size = 0
            size += len(data)
        files[-1].append((entry, data))
    here.mkdir(parents=True, exist_ok=True)
    remove_parts(here)
    for shard, members in enumerate(files):
        name = f"model-{rank + shard:05d}-of-{max(workers, len(files)):05d}.safetensors"
        listed, metadata = [], {}
        for entry, data in members:
            key = _key(entry)
            if encoding == "steps":
                metadata[key] = _described(entry)
            elif data is not None:
                metadata[key] = entry.checksum
            if data is not None:
                listed.append((key, "uint8", (len(data),), lambda data=data: data))
        write_safetensors(here / name, listed, metadata)
    if workers == 1:
        _finish(here, version, base, encoding, patch.checksum_format, len(files))
    return here


def finish(folder: str | os.PathLike[str], version: int, base: int, workers: int, checksum: str = "xxh3-128") -> Path:
    """Write the index of a patch whose ``workers`` shards have all been saved; returns its folder.

    One worker calls this, after a barrier. Raises ValueError if a shard is missing, or if shards overlap.
    """
    here = patch_folder(folder, version)
    _finish(here, version, base, "steps", checksum, workers)
    return here


def _finish(here: Path, version: int, base: int, encoding: str, kind: str, count: int) -> None:
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(count)]
    if missing := [name for name in names if not (here / name).exists()]:
        raise ValueError(f"{here} lacks {', '.join(missing)}: each worker saves its patch first")
    opened = {name: Safetensors(here / name) for name in names}
    metadata: dict[str, Any] = {
        "version": f"{version:06d}",
        "base_version": f"{base:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": kind,
    }
    if encoding == "steps":
        once([entry for file in opened.values() for entry in _entries(file)])
        metadata["files"] = {name: checksum("xxh3-128", file.content) for name, file in opened.items()}
    write_index(here, metadata, {key: name for name, file in opened.items() for key in file.slots})


def _key(entry: Entry) -> str:
    if entry.region in (None, everything(entry.shape or ())):
        return entry.name
    return f"{entry.name}[{','.join(f'{begin}:{end}' for begin, end in entry.region or ())}]"


def _described(entry: Entry) -> str:
    return json.dumps([entry.name, entry.dtype, entry.shape, entry.region, entry.checksum, entry.tied, entry.count])


def _entries(file: Safetensors) -> list[Entry]:
    # The entries of a file of "steps".
    found = []
    for key, text in file.metadata.items():
        name, dtype, shape, region, total, tied, count = json.loads(text)
        where = tuple((begin, end) for begin, end in region)
        data = file.data(key) if key in file.slots else None
        found.append(Entry(name, dtype, tuple(shape), where, total, None, data, tuple(tied), count))
    return found


def load(folder: str | os.PathLike[str], version: int | None = None, base: int | None = None) -> Patch:
    """Read a patch: of any encoding, ours or another writer's.

    ``folder``: the patch's own, or the one above it, of which ``version`` names the patch, by default the newest.
    ``base``: the version that the patch must be for. Raises FileNotFoundError if there is none, and `Refused`, a
    ValueError, for a damaged one or one of another base.
    """
    here = Path(folder)
    if version is not None or not (here / INDEX).exists():
        known = versions(here)
        if not known or version not in (None, *known):
            wanted = "patch" if version is None else f"version {version}"
            raise FileNotFoundError(f"{folder} has no complete {wanted}; versions there: {known}")
        here = patch_folder(here, known[-1] if version is None else version)
    try:
        found = _load(here)
    except (AttributeError, KeyError, TypeError, RecursionError, ValueError) as error:
        if isinstance(error, Refused):
            raise
        raise Refused(f"{here}: {error}") from error
    if base is not None and found.base_version != base:
        raise Refused(f"{here} is for version {found.base_version}, not {base}")
    return found


def _load(here: Path) -> Patch:
    metadata, files = read_index(here)
    encoding = metadata.get("delta_encoding")
    if encoding is None:
        raise ValueError("it holds a checkpoint, not a patch")
    if encoding not in ENCODINGS:
        raise ValueError(f"encoding {encoding!r} is none of {', '.join(ENCODINGS)}")
    if metadata["compression_format"] != "zstd":
        raise ValueError(f"compression {metadata['compression_format']!r} is not zstd")
    version, base, kind = number(metadata["version"]), number(metadata["base_version"]), metadata["checksum_format"]
    hasher(kind)
    if (named := PATCH.fullmatch(here.name)) and int(named[1]) != version:
        raise ValueError(f"it holds version {version}: it was moved, or damaged")
    if base >= version:
        raise ValueError(f"it leads from version {base} to {version}")
    names = list(metadata["files"]) if encoding == "steps" else sorted(set(files.values()))
    opened = {}
    for name in names:
        try:
            opened[name] = Safetensors(here / name)
        except FileNotFoundError as error:
            raise ValueError(f"{name} is missing") from error
    held = {key: name for name, file in opened.items() for key in file.slots}
    if held != files:
        odd = sorted(key for key in held.keys() | files.keys() if held.get(key) != files.get(key))
        raise ValueError(f"the index and the files differ in {', '.join(odd[:3])}: the patch is damaged")
    if any(slot.dtype != "uint8" or len(slot.shape) != 1 for file in opened.values() for slot in file.slots.values()):
        raise ValueError("its tensors are not all bytes")
    if encoding != "steps":
        entries = []
        for key, name in files.items():
            if key not in opened[name].metadata:
                raise ValueError(f"{name} lacks the checksum of {key}")
            entries.append(Entry(key, None, None, None, opened[name].metadata[key], None, opened[name].data(key)))
        return Patch(entries, kind, encoding, version, base, complete=False)
    for name, file in opened.items():
        if checksum("xxh3-128", file.content) != metadata["files"][name]:
            raise ValueError(f"{name} is damaged: its checksum is another")
    entries = once([entry for file in opened.values() for entry in _entries(file)])
    return Patch(entries, kind, encoding, version, base)


# -- checkpoints -------------------------------------------------------------------------------------------------------
def apply(
    patch: Patch,
    target: Any,
    *,
    version: int | None = None,
    threads: int = 1,
    progress: Progress | None = None,
) -> None:
    """Bring ``target`` from the patch's base to its new version, in place: all of it, or nothing.

    ``target``: a mapping of names to tensors, a module, or a folder of safetensors files, whose changed files are
    written anew and exchanged together. JAX's arrays and TensorFlow's tensors cannot change: new ones take their place
    in the dictionary. ``version``: the version that the target has, if known; a folder knows its own. First each
    tensor's result is computed part by part and its checksum compared; nothing is written before all agree.
    ``threads``: how many tensors are checked at once. ``progress`` gets the number of bytes that have been checked.
    Memory: the decoded patch.

    Raises `Refused`, a ValueError, if the patch is damaged, or is for another version or other tensors; the target is
    unchanged then.
    """
    if isinstance(target, (str, os.PathLike)):
        _apply_to_folder(patch, Folder(Path(target)), version, threads, progress)
    else:
        write(prepare(patch, source(target), version=version, threads=threads, progress=progress))


def _apply_to_folder(
    patch: Patch, folder: Folder, version: int | None, threads: int, progress: Progress | None
) -> None:
    # New files beside the old ones, then one rename.
    remove_parts(folder.path)
    version = folder.version if version is None else version
    changes: dict[str, list[Prepared]] = {}
    for each in prepare(patch, folder.views(), version=version, threads=threads, progress=progress):
        if each.delta is not None:
            for name in (each.entry.name, *each.entry.tied):
                changes.setdefault(name, []).append(each)
    mark = os.urandom(6).hex() if patch.version is None else f"{patch.version:06d}"
    label = {} if patch.version is None else {"version": f"{patch.version:06d}"}
    if folder.index is None:
        _rewrite(folder, SINGLE, SINGLE, changes, label)
        return
    stems = {name: MADE.sub("", name).removesuffix(".safetensors") for name in folder.opened}
    renamed = {name: f"{stems[name]}.v{mark}.safetensors" for name in sorted({folder.files[key] for key in changes})}
    for name, fresh in renamed.items():
        _rewrite(folder, name, fresh, changes, {})
    files = {key: renamed.get(name, name) for key, name in folder.files.items()}
    write_index(folder.path, {**folder.index, **label}, files)
    for path in folder.path.glob("*.safetensors"):  # the old ones, and those of killed writers
        ours = MADE.search(path.name) and MADE.sub("", path.name) in stems.values()
        if path.name not in files.values() and (ours or path.name in renamed):
            path.unlink(missing_ok=True)


def _rewrite(
    folder: Folder, name: str, fresh: str, changes: Mapping[str, Sequence[Prepared]], label: Mapping[str, str]
) -> None:
    file = folder.opened[name]
    # Checksums of the tensors before are no longer true.
    metadata = {key: text for key, text in file.metadata.items() if key not in changes}
    tensors = [
        (key, slot.dtype, slot.shape, partial(_content, file, key, changes.get(key, ())))
        for key, slot in file.slots.items()
    ]
    write_safetensors(folder.path / fresh, tensors, {**metadata, **label})


def _content(file: Safetensors, key: str, changes: Sequence[Prepared]) -> memoryview:
    if not changes:
        return file.data(key)
    slot = file.slots[key]
    held = View(words_of(bytearray(file.data(key)), slot.dtype), slot.dtype, slot.shape, everything(slot.shape))
    for each in changes:
        Prepared(each.entry, part(held, each.target.region), each.delta, each.fresh).write()
    return held.data


def save_whole(tensors: Any, folder: Path, version: int, progress: Callable[[int], None] = lambda n: None) -> None:
    """Write a checkpoint with checksums and a version, the index last. Raises ValueError for shards of tensors."""
    held = source(tensors)
    views = {name: view(held, name) for name in held if hasattr(held[name], "shape")}
    if shards := [name for name, each in views.items() if not each.whole]:
        raise ValueError(f"{shards[0]} is a shard: gather the tensors first")
    folder.mkdir(parents=True, exist_ok=True)
    remove_parts(folder)
    name = "model-00000-of-00001.safetensors"
    metadata = {key: checksum("xxh3-128", each.data) for key, each in views.items()}
    listed = [(key, each.dtype, each.shape, lambda each=each: each.data) for key, each in views.items()]
    write_safetensors(folder / name, listed, metadata, progress)
    total = sum(each.words.nbytes for each in views.values())
    write_index(folder, {"total_size": total, "version": f"{version:06d}"}, dict.fromkeys(views, name))
