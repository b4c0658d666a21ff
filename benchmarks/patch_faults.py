"""Faults of grace.patch: damaged patches, and processes killed while they save or apply.

python -m benchmarks.patch_faults --json benchmarks/results/patch-faults.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import grace
from grace.patch.checkpoints import Folder
from grace.patch.files import INDEX
from grace.patch.folders import save_whole

ENCODINGS = ("steps", "xor", "overwrite")


def tensors(seed: int, n: int = 3000) -> tuple[dict[str, Any], dict[str, Any]]:
    """Two versions of three tensors."""
    rng = np.random.default_rng(seed)
    base = {"a": rng.normal(size=n).astype("f4"), "b": rng.integers(0, 9, (7, 9)), "c": rng.normal(size=n).astype("f2")}
    new = {name: each.copy() for name, each in base.items()}
    for each in new.values():
        flat = each.reshape(-1)
        where = rng.random(flat.size) < 0.05
        flat[where] += np.array(1, flat.dtype)
    return base, new


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether all bits are equal."""
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def hurt(rng: np.random.Generator, data: bytes) -> bytes:
    """Bytes with a flipped bit, cut off, with other bytes in between, or with zeros."""
    found, at = bytearray(data), int(rng.integers(0, len(data)))
    kind = int(rng.integers(0, 4))
    if kind == 0:
        found[at] ^= 1 << int(rng.integers(0, 8))
    elif kind == 1:
        del found[at:]
    elif kind == 2:
        found[at : at + int(rng.integers(1, 9))] = rng.bytes(int(rng.integers(0, 12)))
    else:
        end = min(len(found), at + int(rng.integers(1, 200)))
        found[at:end] = bytes(end - at)
    return bytes(found)


def fuzz(folder: Path, encoding: str, count: int, seed: int = 0) -> dict[str, int]:
    """Apply ``count`` damaged patches. Counts those that were refused; those whose damage made no difference; wrong
    results; other errors than `Refused`; targets that a refused patch has changed."""
    base, new = tensors(seed)
    here = grace.patch.save(grace.patch.diff(new, base), folder, 7, 6, encoding)
    files = {path: path.read_bytes() for path in sorted(here.iterdir())}
    rng = np.random.default_rng(seed)
    found = dict.fromkeys(("refused", "harmless", "wrong", "crashed", "changed"), 0)
    while sum(found.values()) < count:
        path = list(files)[int(rng.integers(0, len(files)))]
        damaged = hurt(rng, files[path])
        if damaged == files[path]:
            continue
        path.write_bytes(damaged)
        target = {name: each.copy() for name, each in base.items()}
        try:
            grace.patch.apply(grace.patch.load(here), target, version=6)
        except grace.patch.Refused:
            found["refused" if equal(target, base) else "changed"] += 1
        except Exception as error:
            print(f"{encoding}: {type(error).__name__}: {error}", file=sys.stderr)
            found["crashed"] += 1
        else:
            found["harmless" if equal(target, new) else "wrong"] += 1
        path.write_bytes(files[path])
    return found


def work(kind: str, folder: Path) -> None:
    """What a process does that may be killed: save a patch, or apply one to a folder."""
    if kind == "save":
        base, new = tensors(0, 400_000)
        grace.patch.save(grace.patch.diff(new, base), folder / "patches", 7, 6)
    else:
        grace.patch.apply(grace.patch.load(folder / "patches"), folder / "target")


def child(kind: str, folder: Path) -> int:
    """Start a process that does the work; returns its id."""
    pid = os.fork()
    if not pid:
        try:
            work(kind, folder)
        finally:
            os._exit(0)
    return pid


def kills(folder: Path, kind: str, count: int, seed: int = 0) -> dict[str, int]:
    """Kill ``count`` processes at random moments of their work, then look at what they left."""
    base, new = tensors(0, 400_000)
    pristine = folder / "pristine"
    # Two files, so that one of them alone may be new.
    save_whole({"a": base["a"], "b": base["b"]}, pristine, 6)
    save_whole({"c": base["c"]}, folder / "other", 6)
    (pristine / "second.safetensors").write_bytes((folder / "other" / "model-00000-of-00001.safetensors").read_bytes())
    index = json.loads((pristine / INDEX).read_text())
    index["weight_map"]["c"] = "second.safetensors"
    (pristine / INDEX).write_text(json.dumps(index))
    if kind == "apply":
        grace.patch.save(grace.patch.diff(new, base), folder / "patches", 7, 6)

    def reset() -> None:
        shutil.rmtree(folder / ("patches" if kind == "save" else "target"), ignore_errors=True)
        if kind == "apply":
            shutil.copytree(pristine, folder / "target")

    def state() -> str:
        if kind == "save":
            try:
                patch = grace.patch.load(folder / "patches", 7)
            except FileNotFoundError:
                return "old"
            except grace.patch.Refused:
                return "between"
            target = {name: each.copy() for name, each in base.items()}
            grace.patch.apply(patch, target, version=6)
            return "new" if equal(target, new) else "between"
        here = Folder(folder / "target")
        held = {name: np.array(each.words) for name, each in here.views().items()}
        version = {6: base, 7: new}.get(here.version or 0, {})
        return "between" if not equal(held, version) else "old" if here.version == 6 else "new"

    reset()
    began = time.perf_counter()
    os.waitpid(child(kind, folder), 0)
    whole = time.perf_counter() - began
    rng = np.random.default_rng(seed)
    found = dict.fromkeys(("old", "new", "between", "went on"), 0)
    for _ in range(count):
        reset()
        pid = child(kind, folder)
        time.sleep(float(rng.random()) * whole)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found[state()] += 1
        # What was left behind does not disturb the next one.
        if state() == "old":
            os.waitpid(child(kind, folder), 0)
            found["went on"] += state() == "new"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--damaged", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--only", choices=("damaged", "killed"), help="do this part anew")
    parser.add_argument("--json", type=Path, help="where to store the result")
    options = parser.parse_args()
    found: dict[str, Any] = {"damaged": {}, "killed": {}}
    if options.json and options.json.exists():
        found |= json.loads(options.json.read_text())
    for number, encoding in enumerate(ENCODINGS if options.only != "killed" else ()):
        with tempfile.TemporaryDirectory() as folder:
            count = options.damaged // 3 + (number < options.damaged % 3)
            found["damaged"][encoding] = fuzz(Path(folder), encoding, count, number)
            print(encoding, found["damaged"][encoding], flush=True)
    for kind in ("save", "apply") if options.only != "damaged" else ():
        with tempfile.TemporaryDirectory() as folder:
            found["killed"][kind] = kills(Path(folder), kind, options.kills)
            print(kind, found["killed"][kind], flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    bad = [each[key] for each in found["damaged"].values() for key in ("wrong", "crashed", "changed")]
    return int(any(bad) or any(each["between"] for each in found["killed"].values()))


if __name__ == "__main__":
    sys.exit(main())
