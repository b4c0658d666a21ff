"""`grace patch`: compares checkpoints, applies patches, and checks them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from grace.cli import inputs

if TYPE_CHECKING:
    from grace.patch import Patch

app = typer.Typer(
    name="patch", help="Lossless patches of weights, between checkpoints of safetensors files.", no_args_is_help=True
)
NewFolder = Annotated[Path, typer.Argument(help="The newer checkpoint: a folder of safetensors files.")]
BaseFolder = Annotated[Path, typer.Argument(help="The checkpoint that the patch is for.")]
PatchFolder = Annotated[Path, typer.Argument(help="The patch's folder, or the one above it, for its newest patch.")]
Version = Annotated[int | None, typer.Option(help="The version, if the folder has several patches.")]
Threads = Annotated[int, typer.Option(min=1, help="How many tensors are read at once.")]


@app.command("diff")
def diff(
    new: NewFolder,
    base: BaseFolder,
    out: Annotated[Path, typer.Argument(help="The folder to write weight_vVERSION to.", callback=inputs.output_folder)],
    version: Annotated[int, typer.Option(min=1, help="The number of the newer version.")] = 1,
    base_version: Annotated[int, typer.Option("--base", min=0, help="The number of the version before.")] = 0,
    encoding: Annotated[
        str, typer.Option(help="steps is the smallest; xor and overwrite are for other readers.")
    ] = "steps",
    checksum: Annotated[str, typer.Option(help="xxh3-128, adler32, or blake3 with that package.")] = "xxh3-128",
    threads: Threads = 1,
    as_json: inputs.AsJson = False,
) -> None:
    """Write the changes from one checkpoint to another as a patch."""
    import grace

    with _refused(), _progress("Comparing", _size(new)) as step:
        patch = grace.patch.diff(new, base, checksum=checksum, threads=threads, progress=step)
        path = grace.patch.save(patch, out, version, base_version, encoding)
        _show(grace.patch.load(path), path, as_json)


@app.command("apply")
def apply(
    patch: PatchFolder,
    target: Annotated[Path, typer.Argument(help="The checkpoint to change, whole or not at all.")],
    version: Version = None,
    threads: Threads = 1,
    as_json: inputs.AsJson = False,
) -> None:
    """Bring a checkpoint to a patch's version."""
    import grace

    with _refused(), _progress("Checking", _size(target)) as step:
        loaded = grace.patch.load(patch, version)
        grace.patch.apply(loaded, target, threads=threads, progress=step)
    if as_json:
        _show(loaded, patch, as_json)
    else:
        inputs.console().print(f"{target} has version {loaded.version} now")


@app.command("info")
def info(patch: PatchFolder, version: Version = None, as_json: inputs.AsJson = False) -> None:
    """Show a patch's versions, encoding, density and bytes."""
    import grace

    with _refused():
        _show(grace.patch.load(patch, version), patch, as_json)


@app.command("verify")
def verify(
    patch: PatchFolder,
    base: BaseFolder,
    version: Version = None,
    threads: Threads = 1,
    as_json: inputs.AsJson = False,
) -> None:
    """Check a patch and all checksums of its result against a checkpoint, which stays as it is."""
    import grace
    from grace.patch.changes import prepare, source
    from grace.patch.checkpoints import Folder

    with _refused(), _progress("Checking", _size(base)) as step:
        loaded = grace.patch.load(patch, version)
        prepare(loaded, source(base), version=Folder(base).version, threads=threads, progress=step)
    if as_json:
        _show(loaded, patch, as_json)
    else:
        inputs.console().print(f"the patch leads from {base} to version {loaded.version}")


def _size(folder: Path) -> int:
    from grace.patch.changes import source

    with _refused():
        return sum(each.words.nbytes for each in source(folder).values())


@contextmanager
def _refused() -> Iterator[None]:
    # What a user can mend is said in a line.
    try:
        yield
    except (FileExistsError, FileNotFoundError, ModuleNotFoundError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda n: progress.advance(task, n)


def _show(patch: Patch, path: Path, as_json: bool) -> None:
    from rich.table import Table

    found: dict[str, Any] = {
        "path": str(path),
        "version": patch.version,
        "base_version": patch.base_version,
        "encoding": patch.encoding,
        "checksum": patch.checksum_format,
        "tensors": len({each.name for each in patch.entries if each.changed}),
        "density": patch.density,
        "bytes": patch.bytes,
    }
    if as_json:
        print(json.dumps(found, indent=2))
        return
    found["density"] = "not said by this format" if patch.density is None else f"{100 * patch.density:.3g} % changed"
    found["bytes"] = f"{patch.bytes:,}"
    table = Table(box=None, show_header=False)
    for key, value in found.items():
        table.add_row(key.replace("_", " "), str(value))
    inputs.console().print(table)
