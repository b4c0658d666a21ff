"""`Publisher` writes a chain of patches with anchors, whole checkpoints; `Receiver` follows it.

A folder has ``weight_v000000``, a checkpoint, then a patch for each version, and ``anchor_v000050`` and so on, further
checkpoints, from which receivers start, or go on if patches that they missed are gone.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grace.patch.changes import Refused, diff, source
from grace.patch.checkpoints import Folder, number, read_index
from grace.patch.delta import scatter
from grace.patch.files import INDEX
from grace.patch.folders import ANCHOR, apply, load, patch_folder, save, save_whole, versions
from grace.patch.tensors import View, view

CHAIN = 64
"""The longest chain of patches in the shared format."""


def anchors(folder: Path) -> dict[int, Path]:
    """The folders of checkpoints by version."""
    found = {each: folder / f"anchor_v{each:06d}" for each in versions(folder, ANCHOR)}
    for version in versions(folder):
        here = patch_folder(folder, version)
        if "delta_encoding" not in read_index(here)[0]:
            found[version] = here
    return found


class Publisher:
    """Publishes versions of named tensors in a folder: a checkpoint first, then patches.

    It keeps a copy of the last version in the host's memory. ``anchor_every``: after how many patches a further
    checkpoint is written, at most 64. ``keep``: how many checkpoints stay, with the patches since the oldest of them; 0
    keeps all. In a folder with versions it goes on after the newest one, with the same tensors.

    Raises ValueError for settings out of range, and `Refused` for a damaged folder.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        anchor_every: int = 50,
        *,
        encoding: str = "steps",
        checksum: str = "xxh3-128",
        keep: int = 2,
        threads: int = 1,
    ):
        if not 1 <= anchor_every <= CHAIN:
            raise ValueError(f"anchor_every={anchor_every}: chains have 1 to {CHAIN} patches")
        if keep < 0:
            raise ValueError(f"keep={keep} must be 0 (keep all) or the number of checkpoints to keep")
        self.folder, self.anchor_every, self.keep = Path(folder), anchor_every, keep
        self.encoding, self.checksum, self.threads = encoding, checksum, threads
        self._last: dict[str, View] | None = None
        self.version: int | None = max([*versions(self.folder), *versions(self.folder, ANCHOR)], default=None)
        """The newest version; None if there is none."""

    def publish(self, tensors: Any) -> Path:
        """Write the next version; returns its folder. Readers see it once it is complete.

        Raises ValueError if names, shapes or dtypes differ from those of the version before.
        """
        tensors = source(tensors)
        if self.version is None:
            path = patch_folder(self.folder, 0)
            save_whole(tensors, path, 0)
            self._last, self.version = _copied(tensors), 0
            return path
        if self._last is None:
            receiver = Receiver(self.folder)
            self._last = receiver.tensors()
            if receiver.version != self.version:
                raise Refused(f"{self.folder} leads to version {receiver.version}, not {self.version}")
        patch = diff(tensors, self._last, checksum=self.checksum, threads=self.threads)
        version = self.version + 1
        path = save(patch, self.folder, version, self.version, self.encoding)
        for entry in patch.entries:
            if entry.delta is not None and entry.delta.fresh is not None:
                for name in (entry.name, *entry.tied):
                    scatter(self._last[name].words, entry.delta, entry.delta.fresh)
        self.version = version
        known = anchors(self.folder)
        if version - max(known, default=-CHAIN) >= self.anchor_every:
            save_whole(tensors, self.folder / f"anchor_v{version:06d}", version)
            self._prune()
        return path

    def _prune(self) -> None:
        known = anchors(self.folder)
        if not self.keep or len(known) <= self.keep:
            return
        oldest = sorted(known)[-self.keep]
        for version in {*versions(self.folder), *known}:
            for path in {patch_folder(self.folder, version), known.get(version)}:
                # The patch that led to the oldest checkpoint goes too: nothing before it is left.
                old = version < oldest or (version == oldest and path != known[oldest])
                if path is not None and old and path.exists():
                    (path / INDEX).unlink(missing_ok=True)  # first: a folder without it does not count
                    shutil.rmtree(path, ignore_errors=True)


class Receiver:
    """Follows a `Publisher`, or another writer of the shared format.

    ``version``: the version that the receiver's tensors have; None for unknown ones, which then begin with a
    checkpoint.
    """

    def __init__(self, folder: str | os.PathLike[str], version: int | None = None, *, threads: int = 1):
        self.folder, self.version, self.threads = Path(folder), version, threads

    def update(self, target: Any) -> int | None:
        """Bring ``target`` to the newest version and return it; None if nothing was published yet.

        ``target``: as in `grace.patch.apply`, always the same one; of a folder, which need not exist, the version it
        has counts. Missed patches are applied in turn; if some are gone, a checkpoint replaces the tensors. Each patch
        is applied whole or not at all, so that after an error the target has version `version`.

        Raises `Refused` for damaged or missing patches, and for tensors of other names, shapes or dtypes.
        """
        folder = isinstance(target, (str, os.PathLike))
        if folder:
            self.version = Folder(Path(target)).version if Path(target).exists() else None
        start, path = self._route()
        if start is not None:
            checkpoint = Folder(anchors(self.folder)[start])
            checkpoint.check()
            if folder:
                _copy_folder(checkpoint.path, Path(target))
            else:
                _fill(checkpoint.views(), target)
            self.version = start
        for version in path:
            patch = load(self.folder, version, base=self.version)
            apply(patch, target, version=self.version, threads=self.threads)
            self.version = version
        return self.version

    def tensors(self) -> dict[str, View]:
        """The newest version's tensors, as flat words in the host's memory."""
        known = anchors(self.folder)
        if not known:
            raise FileNotFoundError(f"{self.folder} has no checkpoint yet")
        self.version = max(known)
        checkpoint = Folder(known[self.version])
        checkpoint.check()
        found = _copied(checkpoint.views())
        self.update(found)
        return found

    def _route(self) -> tuple[int | None, list[int]]:
        # The checkpoint to begin with, if one is needed, and the patches to apply then.
        whole = anchors(self.folder)
        there = [each for each in versions(self.folder) if whole.get(each) != patch_folder(self.folder, each)]
        newest = max([*there, *whole], default=None)
        if newest is None or newest == self.version:
            return None, []
        if self.version is not None and newest < self.version:
            raise Refused(f"{self.folder} ends at version {newest}, before the receiver's {self.version}")
        path: list[int] = []
        at, choice = newest, None
        while at != self.version:
            if at in whole and choice is None:
                choice = at, len(path)
            if at not in there:
                break
            path.append(at)
            at = number(read_index(patch_folder(self.folder, at))[0]["base_version"])
        if at == self.version:
            return None, path[::-1]
        if choice is None:
            raise Refused(f"{self.folder} lacks version {at}, which the patches up to {newest} build on")
        return choice[0], path[: choice[1]][::-1]


def _copied(tensors: Mapping[str, Any]) -> dict[str, View]:
    views = {name: view(tensors, name) for name in tensors if hasattr(tensors[name], "shape")}
    return {name: View(each.words.copy(), each.dtype, each.shape, each.region) for name, each in views.items()}


def _fill(checkpoint: Mapping[str, View], target: Any) -> None:
    # Write a checkpoint's tensors: all checks come first.
    tensors = source(target)
    views = {name: view(tensors, name) for name in tensors if hasattr(tensors[name], "shape")}
    if odd := sorted(views.keys() ^ checkpoint.keys()):
        raise Refused(f"the target and the checkpoint differ in their tensors: {', '.join(odd[:3])}")
    for name, each in views.items():
        other = checkpoint[name]
        if (each.dtype, each.shape, each.region) != (other.dtype, other.shape, other.region):
            raise Refused(
                f"{name}: the checkpoint has {other.dtype}{list(other.shape)}, the target "
                f"{each.dtype}{list(each.shape)}"
            )
    for name, each in views.items():
        if each.write is None:
            each.words[...] = checkpoint[name].words
        else:
            each.write(checkpoint[name].words)


def _copy_folder(checkpoint: Path, target: Path) -> None:
    if target.exists():
        raise Refused(f"{target} is too old for the patches that are left: remove it, and it will be made anew")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(checkpoint, part)
    part.replace(target)
