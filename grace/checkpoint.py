"""Checkpoint files of a Grace: one per worker, written atomically, read without executing anything.

    grace.checkpoint.save(grc, "checkpoints")           # every worker, as often as you like
    step = grace.checkpoint.load(grc, "checkpoints")    # also with another number of workers

A file is a zip archive of NumPy arrays and one JSON text. Nothing in it is executed, and damaged files are rejected.
"""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

from grace.core.files import replacing
from grace.engine.reshard import host

if TYPE_CHECKING:
    from grace.engine.session import Grace

__all__ = ["from_bytes", "load", "save", "steps", "to_bytes"]

META = "state.json"
ARRAY = "$array"
DAMAGED = (zipfile.BadZipFile, SyntaxError, TokenError)  # NumPy's parser of array headers raises the last two
KINDS = "fiub"  # floats, integers, bools: the dtypes allowed in a state
FILE = re.compile(r"worker-(\d{5,})-of-(\d{5,})\.grace")
FOLDER = re.compile(r"step-(\d{9,})")


def save(grace: Grace, folder: str | os.PathLike[str], keep: int = 2) -> Path:
    """Write this worker's state below ``folder`` and return its file. Every worker calls this at the same step.

    The file appears under its name, in a folder per step, once it is completely on disk. Then this worker's oldest
    files are removed, so that the newest ``keep`` remain; 0 keeps all. With ``keep`` of 2 or more, a complete
    checkpoint of all workers exists at any time. Raises ValueError for ``keep`` = 1, which cannot guarantee that,
    and OSError if writing fails.
    """
    if keep == 1 or keep < 0:
        raise ValueError(f"keep={keep!r} must be 0 (keep all) or at least 2: the last one may be incomplete elsewhere")
    state = grace.state_dict()
    here = Path(folder) / f"step-{state['step']:09}"
    here.mkdir(parents=True, exist_ok=True)
    path = here / _name(grace.rank, grace.world_size)
    with replacing(path) as file:
        _write(file, state)
    if keep:
        _prune(folder, path.name, keep)
    return path


def load(grace: Grace, folder: str | os.PathLike[str], step: int | None = None) -> int:
    """Load files of `save` from ``folder``; returns their step. Every worker must make this call.

    Takes ``step``, or by default the last step that all workers have. With an unchanged number of workers, each reads
    only its own file; otherwise each reads the files of all previous workers, and resizes every array by its rule
    (`grace.core.Resize`).
    Raises FileNotFoundError without a checkpoint, ValueError for files that are damaged, or belong to other settings or
    another model: then nothing is changed, on any worker. Before the tensors are known (a DDP hook learns them in its
    first pass), a worker takes the last step with files of all workers in ``folder``, or else its own last one; if
    workers loaded different steps, all raise ValueError when the tensors are built.
    """
    found = _available(folder, grace.rank, grace.world_size)
    common = set(found).intersection(*map(json.loads, _exchange(grace, json.dumps(sorted(found)))))
    if not grace.names:  # the workers cannot exchange messages yet
        common = common.intersection(steps(folder)) or common
    chosen = max(common, default=None) if step is None else step
    if chosen not in common:
        wanted = "" if step is None else f" of step {step} (but of {sorted(common)})"
        raise FileNotFoundError(
            f"{folder} has no checkpoint{wanted} that all {grace.world_size} workers can read: each needs its own "
            "file, or all files of a run with another number of workers"
        )
    problem = ""
    try:
        states = [_read_file(path, chosen) for path in found[chosen]]
        grace.check_state(*states)
    except (OSError, ValueError) as error:
        others = sorted(common - {chosen})
        problem = f"{error}" + (
            f". Whole checkpoints are there of steps {others}: load(..., step=...)" if others else ""
        )
    if failed := [text for text in _exchange(grace, problem) if text]:
        raise ValueError(problem or failed[0])
    grace.load_state_dict(*states)
    return chosen


def steps(folder: str | os.PathLike[str]) -> list[int]:
    """The steps with files of all workers in ``folder``, ascending."""
    return [number for number, here in _numbered(folder) if _whole(here)]


def numbers(folder: str | os.PathLike[str]) -> list[int]:
    """The steps with files of any worker in ``folder``, ascending."""
    return [number for number, _ in _numbered(folder)]


def left_behind(
    folder: str | os.PathLike[str], step: int, here: Sequence[int], world_size: int
) -> list[dict[str, Any]]:
    """States that ranks of ``world_size`` workers saved at a step, except ranks ``here``; skips unreadable files."""
    found = []
    for rank in set(range(world_size)) - set(here):
        path = Path(folder) / f"step-{step:09}" / _name(rank, world_size)
        with suppress(OSError, ValueError):
            found.append(_read_file(path, step))
    return found


def to_bytes(state: Mapping[str, Any]) -> bytes:
    """A `Grace.state_dict` as bytes, as `save` writes them."""
    file = io.BytesIO()
    _write(file, state)
    return file.getvalue()


def from_bytes(data: bytes) -> dict[str, Any]:
    """The inverse of `to_bytes`. Raises ValueError for damaged data."""
    return _read(io.BytesIO(data))


# -- files -------------------------------------------------------------------------------------------------------------
def _name(rank: int, size: int) -> str:
    return f"worker-{rank:05}-of-{size:05}.grace"


def _listed(here: Path) -> list[Path]:
    # Returns the folder's contents, which are empty if there is no folder, or if another worker has just removed it.
    try:
        return list(here.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _numbered(folder: str | os.PathLike[str]) -> list[tuple[int, Path]]:
    named = [(FOLDER.fullmatch(each.name), each) for each in _listed(Path(folder))]
    return sorted((int(match[1]), each) for match, each in named if match)


def _prune(folder: str | os.PathLike[str], name: str, keep: int) -> None:
    # Workers prune concurrently: whoever removes the last file removes the folder.
    folders = [here for _, here in _numbered(folder)]
    mine = [here for here in folders if (here / name).exists()]
    for old in folders[: folders.index(mine[-keep])] if len(mine) > keep else []:
        for file in _listed(old):
            if file.name.lstrip(".").startswith(name):  # also the partial file of a killed worker
                file.unlink(missing_ok=True)
        with suppress(OSError):  # not empty, or already removed
            old.rmdir()


def _whole(here: Path) -> list[Path]:
    # Returns the files of all workers of a run; none if some are missing.
    for size in sorted({int(match[2]) for each in _listed(here) if (match := FILE.fullmatch(each.name))}):
        paths = [here / _name(rank, size) for rank in range(size)]
        if all(path.exists() for path in paths):
            return paths
    return []


def _available(folder: str | os.PathLike[str], rank: int, size: int) -> dict[int, list[Path]]:
    # Returns the files that this worker would read, by step.
    found = {}
    for number, here in _numbered(folder):
        own = here / _name(rank, size)
        if paths := [own] if own.exists() else _whole(here):
            found[number] = paths
    return found


def _exchange(grace: Grace, text: str) -> list[str]:
    # Before the tensors are known, workers cannot exchange messages; `Grace.build` compares the loaded steps.
    return grace.transport.exchange(text) if grace.names else [text]


# -- contents ----------------------------------------------------------------------------------------------------------
def _write(file: Any, state: Mapping[str, Any]) -> None:
    import numpy as np

    arrays: list[Any] = []

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(each) for each in value]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        arrays.append(host(value))
        return {ARRAY: len(arrays) - 1}

    text = json.dumps(plain(state))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(META, text)
        for number, array in enumerate(arrays):
            with archive.open(f"{number}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _read_file(path: Path, step: int) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            state = _read(file)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if state.get("step") != step:
        raise ValueError(f"{path} holds step {state.get('step')!r}: it was moved from another folder")
    return state


def _read(file: Any) -> dict[str, Any]:
    # Raises ValueError for any error in the data.
    try:
        with zipfile.ZipFile(file) as archive:
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise ValueError("its members are compressed, which GRACE never does")
            state = json.loads(archive.read(META), object_hook=lambda value: _filled(value, archive))
    except (KeyError, EOFError, RuntimeError, OSError, *DAMAGED) as error:
        raise ValueError(f"it is no whole checkpoint ({error})") from error
    if not isinstance(state, dict):
        raise ValueError("it holds no state")
    return state


def _filled(value: dict[str, Any], archive: zipfile.ZipFile) -> Any:
    import numpy as np

    if list(value) != [ARRAY]:
        return value
    data = archive.read(f"{value[ARRAY]}.npy")  # verifies its checksum
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    if version != (1, 0):
        raise ValueError(f"an array has format {version}")
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    size = dtype.itemsize
    for length in shape:
        size *= length
    if dtype.kind not in KINDS or size != len(data) - stream.tell():
        raise ValueError(f"an array of shape {shape} and dtype {dtype} does not fit its {len(data)} bytes")
    stream.seek(0)
    return np.lib.format.read_array(stream, allow_pickle=False)
