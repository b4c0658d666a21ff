"""`Patch`: which elements of named tensors change, and their new values. `diff` makes one, `prepare` checks one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from grace.patch import coding, device
from grace.patch.checkpoints import Folder
from grace.patch.delta import Delta, compare, patched, scatter
from grace.patch.files import hasher
from grace.patch.tensors import Region, View, everything, part, view

Array = Any
Progress = Callable[[int], None]


class Item(NamedTuple):
    """The changed elements of a tensor.

    ``indices``: int64[k], positions in the flat tensor, ascending. ``values``: [k], of the tensor's dtype; unsigned
    integers of the same bits where NumPy lacks it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    indices: Array
    values: Array


@dataclass
class Entry:
    """The changes of a tensor, or of a shard of it. ``delta`` is None if nothing changed, or if ``data`` has it
    encoded. ``dtype`` and ``shape`` are None where the shared format leaves them to the base."""

    name: str
    dtype: str | None
    shape: tuple[int, ...] | None
    region: Region | None
    checksum: str
    delta: Delta | None = None
    data: memoryview | None = None
    tied: tuple[str, ...] = ()
    """Other names of the same memory."""
    count: int | None = None
    """The number of elements that change; None if unknown."""

    @property
    def changed(self) -> bool:
        """Whether it has changes."""
        return self.delta is not None or self.data is not None

    def decoded(self, encoding: str, base: View) -> Delta | None:
        """The changes, for the base."""
        if self.data is not None:
            return coding.decode(self.data, encoding, base.words, base.dtype == "complex128")
        return self.delta


@dataclass
class Patch:
    """The changes from one version of named tensors to the next.

    ``version``, ``base_version``: None for one that `diff` made. ``complete``: whether the entries are all tensors of
    the base, so that `apply` also checks the unchanged ones; the shared format has only the changed ones.
    """

    entries: list[Entry]
    checksum_format: str
    encoding: str = "steps"
    version: int | None = None
    base_version: int | None = None
    complete: bool = True

    @cached_property
    def bytes(self) -> int:
        """The bytes of all changes in the patch's encoding."""
        return sum(len(self.data_of(each)) for each in self.entries if each.changed)

    @property
    def elements(self) -> int | None:
        """The number of elements that were compared; None for a loaded patch in the shared format."""
        sizes = [None if each.region is None else prod(b - a for a, b in each.region) for each in self.entries]
        return None if None in sizes else sum(sizes)  # type: ignore[arg-type]

    @property
    def changed(self) -> int | None:
        """The number of elements that change; None for a loaded patch in the shared format."""
        counts = [each.count for each in self.entries]
        return None if None in counts else sum(counts)  # type: ignore[arg-type]

    @property
    def density(self) -> float | None:
        """The share of elements that change; None for a loaded patch in the shared format, which does not say."""
        if self.changed is None or self.elements is None:
            return None
        return self.changed / max(1, self.elements)

    def data_of(self, entry: Entry, encoding: str | None = None) -> memoryview:
        """A changed entry's encoded changes."""
        encoding = encoding or self.encoding
        if entry.data is not None and encoding == self.encoding:
            return entry.data
        if entry.delta is None or (encoding != "steps" and entry.delta.fresh is None):
            raise ValueError(f"a loaded patch cannot be written as {encoding}: apply it, and make a new one by diff")
        return memoryview(coding.encode(entry.delta, encoding))

    def items(self, base: Any = None) -> Iterator[Item]:
        """The changed elements of each changed tensor.

        ``base``: the tensors or folder that the patch is for; needed for a patch that was loaded, which holds
        differences. Shards of a tensor give one item. Raises ValueError without a base that is needed.
        """
        grouped: dict[str, list[tuple[Array, Array]]] = {}
        heads: dict[str, tuple[tuple[int, ...], str]] = {}
        held = None if base is None else source(base)
        for entry in self.entries:
            if not entry.changed:
                continue
            delta, dtype, shape, region = entry.delta, entry.dtype, entry.shape, entry.region
            if delta is None or delta.fresh is None:
                if held is None:
                    raise ValueError("a loaded patch holds differences: items(base) gives the values")
                here = _target(entry, view(held, entry.name))
                delta = entry.decoded(self.encoding, here)
                dtype, shape, region = here.dtype, here.shape, here.region
                fresh = patched(here.words, delta) if delta is not None and delta.fresh is None else None
            if delta is None or dtype is None or shape is None or region is None:
                continue
            fresh = delta.fresh if delta.fresh is not None else fresh
            positions = delta.positions()
            if dtype == "complex128":
                positions = positions[::2] // 2
            heads[entry.name] = shape, dtype
            grouped.setdefault(entry.name, []).append((_flat(positions, region, shape), _typed(fresh, dtype)))
        for name, pieces in grouped.items():
            indices, values = (np.concatenate(each) for each in zip(*pieces, strict=True))
            if len(pieces) > 1:
                order = np.argsort(indices, kind="stable")
                indices, values = indices[order], values[order]
            yield Item(name, *heads[name], indices, values)


def _flat(positions: Array, region: Region, shape: tuple[int, ...]) -> Array:
    # Positions in a region of a tensor, as positions in the whole.
    if region == everything(shape) or not shape:
        return positions
    local = np.unravel_index(positions, [end - begin for begin, end in region])
    moved = [each + begin for each, (begin, _) in zip(local, region, strict=True)]
    return np.ravel_multi_index(moved, shape)


def _typed(words: Array, dtype: str) -> Array:
    with suppress(TypeError):
        return words.view(np.dtype(dtype))
    with suppress(ImportError, AttributeError):
        import ml_dtypes

        return words.view(getattr(ml_dtypes, dtype))
    return words


# -- sources -----------------------------------------------------------------------------------------------------------
def source(tensors: Any) -> Mapping[str, Any]:
    """A mapping of names to tensors: a mapping, a module's state, or a folder of safetensors files."""
    if isinstance(tensors, (str, os.PathLike)):
        return Folder(Path(tensors)).views()
    if isinstance(tensors, Mapping):
        return tensors
    if hasattr(tensors, "state_dict"):
        found: Mapping[str, Any] = tensors.state_dict()
        return found
    raise TypeError(f"a {type(tensors).__name__} has no named tensors: pass a dict, a module or a folder")


def _names(tensors: Mapping[str, Any]) -> list[str]:
    # The names of tensors. A state_dict may hold others, such as numbers, which are left out.
    return [name for name, each in tensors.items() if hasattr(each, "shape") and hasattr(each, "dtype")]


def diff(
    new: Any,
    base: Any,
    *,
    checksum: str = "xxh3-128",
    threads: int = 1,
    progress: Progress | None = None,
) -> Patch:
    """The changes from ``base`` to ``new``: mappings of names to tensors, modules, or folders of safetensors files.

    Tensors are NumPy's, PyTorch's, JAX's or TensorFlow's, of equal names, shapes and dtypes; they are read where they
    lie, and compared bit by bit. Of a DTensor, this worker's shard is compared: `join` or `save` puts the shards
    together. Names of the same memory are compared once. ``threads``: how many tensors are compared at once.
    ``progress`` gets the number of bytes of ``new`` that have been read. Memory: the patch, and a copy of each tensor
    that is not contiguous or not in the host's memory, while it is compared.

    Raises ValueError for different names, shapes, dtypes or shards.
    """
    one, two = source(new), source(base)
    names = _names(one)
    if missing := sorted(set(names) ^ set(_names(two))):
        raise ValueError(f"new and base differ in their tensors: {_few(missing)}; a patch is between equal names")
    hasher(checksum)
    first: dict[Any, str] = {}
    tied: dict[str, list[str]] = {}

    def compared(name: str) -> Entry:
        near = device.reaches(one[name]) and device.reaches(two[name]) and one[name].dtype == two[name].dtype
        here = view(one, name)
        # Only the shape of a base on the device is needed.
        there = here if near and one[name].shape == two[name].shape else view(two, name)
        if (here.dtype, here.shape, here.region) != (there.dtype, there.shape, there.region):
            raise ValueError(
                f"{name}: new is {here.dtype}{list(here.shape)}, base is {there.dtype}{list(there.shape)}"
                + (f", of which {here.region} and {there.region}" if here.region != there.region else "")
            )
        found, lanes = hasher(checksum), 2 if here.dtype == "complex128" else 1
        if there is here:
            delta = device.compare(one[name], two[name])
            found.update(here.data)
        else:
            delta = compare(here.words, there.words, found.update, lanes == 2)
        if progress is not None:
            progress(here.words.nbytes)
        count = delta.places.size // lanes
        kept = delta if count else None
        return Entry(name, here.dtype, here.shape, here.region, found.hexdigest(), kept, count=count)

    unique = []
    for name in names:
        keys = _memory(one[name]), _memory(two[name])
        if None not in keys and keys in first:
            tied.setdefault(first[keys], []).append(name)
        else:
            first[keys] = name
            unique.append(name)
    entries = _parallel(compared, unique, threads)
    for entry in entries:
        entry.tied = tuple(tied.get(entry.name, ()))
    return Patch(entries, checksum)


def _parallel(function: Callable[[str], Any], names: Sequence[str], threads: int) -> list[Any]:
    if threads <= 1:
        return [function(name) for name in names]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, names))


def _memory(tensor: Any) -> Any:
    # Equal for tensors with the same elements in the same memory; None if unknown.
    if isinstance(tensor, np.ndarray):
        return (tensor.ctypes.data, tensor.shape, tensor.strides, tensor.dtype.str) if tensor.size else None
    if hasattr(tensor, "data_ptr") and not hasattr(tensor, "to_local"):
        pointer = tensor.data_ptr()
        return (pointer, tuple(tensor.shape), tensor.stride(), str(tensor.dtype)) if pointer else None
    return None


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def join(patches: Sequence[Patch]) -> Patch:
    """The patch of whole tensors from the patches that workers made of their shards.

    Raises ValueError for shards that overlap or leave gaps, and for different settings.
    """
    first = patches[0]
    settings = {(each.checksum_format, each.encoding, each.version, each.base_version) for each in patches}
    if len(settings) > 1:
        raise ValueError(f"patches of different versions, encodings or checksums cannot be joined: {sorted(settings)}")
    entries = once([entry for each in patches for entry in each.entries])
    return Patch(
        entries,
        first.checksum_format,
        first.encoding,
        first.version,
        first.base_version,
        all(each.complete for each in patches),
    )


def once(entries: Iterable[Entry]) -> list[Entry]:
    """Entries of all workers, those of replicated tensors once. ValueError unless they are all of each tensor."""
    found: dict[tuple[str, Any], Entry] = {}
    for entry in entries:
        known = found.setdefault((entry.name, entry.region), entry)
        if known.checksum != entry.checksum:
            raise ValueError(f"{entry.name}: workers hold different values of the same part")
    check_regions(list(found.values()))
    return list(found.values())


def check_regions(entries: Sequence[Entry]) -> None:
    """ValueError unless the entries of each tensor have all its elements once."""
    grouped: dict[str, list[Entry]] = {}
    for entry in entries:
        grouped.setdefault(entry.name, []).append(entry)
    for name, parts in grouped.items():
        if len(parts) == 1 and (parts[0].region is None or parts[0].region == everything(parts[0].shape or ())):
            continue
        if len({(each.dtype, each.shape) for each in parts}) > 1:
            raise ValueError(f"{name} has parts of different dtypes or shapes")
        regions = [each.region or () for each in parts]
        held = sum(prod(end - begin for begin, end in region) for region in regions)
        overlap = any(
            all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, two, strict=True))
            for number, one in enumerate(regions)
            for two in regions[:number]
        )
        if overlap or held != prod(parts[0].shape or ()):
            raise ValueError(
                f"{name}: the parts {regions} are not all of {parts[0].shape}: a worker's patch is missing"
            )


# -- apply -------------------------------------------------------------------------------------------------------------
class Refused(ValueError):
    """A patch that does not fit its target, which is unchanged."""


@dataclass
class Prepared:
    """An entry that was checked against its target."""

    entry: Entry
    target: View
    delta: Delta | None
    fresh: Array | None

    def write(self) -> None:
        """Write the new values."""
        if self.delta is None or self.fresh is None:
            return
        if self.target.write is None:
            scatter(self.target.words, self.delta, self.fresh)
        else:
            words = self.target.words.copy()
            scatter(words, self.delta, self.fresh)
            self.target.write(words)

    def restore(self) -> None:
        """Write the values of before."""
        if self.delta is not None and self.fresh is not None:
            Prepared(self.entry, self.target, self.delta, self.fresh - self.delta.steps).write()


def write(prepared: Sequence[Prepared]) -> None:
    """Write all new values; if that is interrupted, write the ones of before, and raise."""
    begun: list[Prepared] = []
    try:
        for each in prepared:
            begun.append(each)
            each.write()
    except BaseException:
        for each in begun:
            with suppress(TypeError, ValueError):
                each.restore()
        raise


def prepare(
    patch: Patch,
    tensors: Mapping[str, Any],
    *,
    version: int | None = None,
    threads: int = 1,
    progress: Progress | None = None,
) -> list[Prepared]:
    """Check a patch against its target, and compute the new values; changes nothing. Raises `Refused`."""
    check_version(patch, version)
    try:
        names = {name for each in patch.entries for name in (each.name, *each.tied)}
        known = set(_names(tensors))
        if missing := sorted(names - known):
            raise Refused(f"the target lacks {_few(missing)}, which the patch changes or checks")
        if patch.complete and (more := sorted(known - names)):
            raise Refused(f"the patch knows nothing of {_few(more)}: it is for other tensors")
        # Regions of a tensor share one view, so that a later one does not overwrite an earlier one.
        held = {name: view(tensors, name) for name in sorted(names)}
        work = partial(_prepared, patch, held, progress)
        return [one for each in _parallel(work, patch.entries, threads) for one in each]  # type: ignore[arg-type]
    except Refused:
        raise
    except (ValueError, OverflowError) as error:
        raise Refused(str(error)) from error


def check_version(patch: Patch, version: int | None) -> None:
    """`Refused` unless a patch is for this version of its target."""
    if version is None or patch.base_version is None or version == patch.base_version:
        return
    what = f"the patch leads from version {patch.base_version} to {patch.version}, and the target has version {version}"
    if patch.version is not None and version >= patch.version:
        raise Refused(f"{what}: it was applied before")
    if version < patch.base_version:
        raise Refused(f"{what}: missing are the patches from {version} to {patch.base_version}")
    raise Refused(what)


def _target(entry: Entry, here: View) -> View:
    # The part of a target that an entry is for.
    if entry.dtype is not None and (entry.dtype, entry.shape) != (here.dtype, here.shape):
        raise Refused(
            f"{entry.name}: the patch is for {entry.dtype}{list(entry.shape or ())}, the target has "
            f"{here.dtype}{list(here.shape)}"
        )
    if entry.region is None:
        if not here.whole:
            raise Refused(f"{entry.name}: the shared format knows whole tensors only, the target is a shard")
        return here
    try:
        return part(here, entry.region)
    except ValueError as error:
        raise Refused(f"{entry.name}: {error}") from error


def _prepared(patch: Patch, views: Mapping[str, View], progress: Progress | None, entry: Entry) -> list[Prepared]:
    found, seen = [], set()
    for name in (entry.name, *entry.tied):
        here = views[name]
        if here.key in seen and here.write is None:
            continue
        seen.add(here.key)
        target = _target(entry, here)
        try:
            delta = entry.decoded(patch.encoding, target)
        except ValueError as error:
            raise Refused(f"{name}: {error}") from error
        total = hasher(patch.checksum_format)
        fresh = None
        if delta is None:
            total.update(target.data)
        else:
            fresh = patched(target.words, delta, total.update)
        if not _equal(total.hexdigest(), entry.checksum):
            raise Refused(
                f"{name}: the checksum of the result is {total.hexdigest()}, not {entry.checksum}: the patch is for "
                f"{'another version' if patch.base_version is None else f'version {patch.base_version}'} of these "
                "tensors, or damaged"
            )
        if progress is not None:
            progress(target.words.nbytes)
        found.append(Prepared(entry, target, delta, fresh))
    return found


def _equal(one: str, other: str) -> bool:
    # Writers differ in leading zeros of adler32.
    return one == other or (len(one) <= 8 and one.lstrip("0") == other.lower().removeprefix("0x").lstrip("0"))
