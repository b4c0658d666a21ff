"""Inputs and output of the commands: files, numbers and rates, checked before a command runs."""

from __future__ import annotations

import codecs
import contextlib
import importlib.util
import math
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from grace.bench.plan import UNSHAPED
from grace.planner import measured

WIDE = 160  # columns, if the width is unknown
PLAIN = {"→": "->", "←": "<-", "µ": "u", "×": "x", "…": "...", "≤": "<=", "≥": ">=", "–": "-", "—": "-"}
PLAIN |= dict(zip("▁▂▃▄▅▆▇█", "_.-:=+*#", strict=True))  # bars of a sparkline, from low to high
RATE = re.compile(
    r"(?P<number>[0-9.]+(e[+-]?[0-9]+)?)\s*((?P<prefix>[kMGT]?)(bits?|b)(/s|ps)?|(?P<short>[kMGT]))?", re.IGNORECASE
)
PREFIXES = {"": 1e-9, "k": 1e-6, "m": 1e-3, "g": 1.0, "t": 1e3}
RATES = "a number of Gbit/s, or with a unit: 10, 10Gbit, 100Mbit/s"
TOOLKITS = ("torch", "tensorflow", "numpy")
_SEEN = "grace.cli.files"
BENCH = importlib.util.find_spec("grace_bench") is not None
"""Whether the package of `grace bench tasks`, `sidco` and `gpu` is installed."""
INSTALL_BENCH = "pip install ./grace_bench in GRACE's source tree"
WITHOUT_BENCH = f"needs the package of benchmarks, which is not installed: {INSTALL_BENCH}"
ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True}
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output instead of tables.")]


# -- printing ----------------------------------------------------------------------------------------------------------
def plain(error: UnicodeError) -> tuple[str, int]:
    """The encoder error handler "grace-plain": replaces characters that the output's encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = ""
    for character in error.object[error.start : error.end]:
        known = PLAIN.get(character)
        if known is None:
            bare = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
            known = bare or "?"
        found += known
    return found, error.end


def readable_output() -> None:
    """Let the standard streams write any text, whatever their encoding."""
    codecs.register_error("grace-plain", plain)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # the stream was replaced, or closed
            stream.reconfigure(errors="grace-plain")  # type: ignore[union-attr]


def console() -> Console:
    """The output console: as wide as the terminal or COLUMNS, else 160 columns."""
    made = Console()
    if made.is_terminal or os.environ.get("COLUMNS", "").isdigit() or any(map(_is_terminal, (0, 1, 2))):
        return made
    return Console(width=WIDE)


def _is_terminal(number: int) -> bool:
    try:
        return os.isatty(number)
    except OSError:
        return False


# -- numbers -----------------------------------------------------------------------------------------------------------
def finite(unit: str, zero: bool = False) -> Callable[[float | None], float | None]:
    """An option's callback: a finite number above 0, or with ``zero`` also 0. ``unit``: for the message."""

    def check(value: float | None) -> float | None:
        if value is not None and not (0 < value < math.inf or (zero and value == 0)):
            raise typer.BadParameter(f"{value}: write a {'number of at least 0' if zero else 'positive number'} {unit}")
        return value

    return check


def gbit(value: str | float) -> float:
    """An option's parser: Gbit/s from a number of Gbit/s, or with a unit, such as 10Gbit or 100Mbit/s."""
    text = str(value).strip()
    found = RATE.fullmatch(text)
    try:
        number = float(found["number"]) if found else math.nan
    except ValueError:
        number = math.nan
    if not found or not 0 < number < math.inf:
        raise typer.BadParameter(f"{text!r}: write a positive bandwidth, {RATES}")
    if "B" in text and "bit" not in text.lower():
        raise typer.BadParameter(f"{text!r} are bytes: write bits, {RATES}")
    prefix = found["short"] or found["prefix"]
    rate = number * PREFIXES["g" if prefix is None else prefix.lower()]
    if not 1e-9 <= rate < math.inf:
        raise typer.BadParameter(f"{text!r} is less than a bit per second: write {RATES}")
    return rate


def as_tc(value: str) -> str:
    """A rate in the form of Linux's tc: 0.1 or 100Mbit/s -> "100mbit"; "unshaped" is unchanged."""
    if value == UNSHAPED:
        return value
    rate = gbit(value)
    for unit, size in (("gbit", 1.0), ("mbit", 1e-3), ("kbit", 1e-6)):
        if rate >= size:
            return f"{float(f'{rate / size:.12g}'):.12g}{unit}"
    return f"{max(round(rate * 1e9), 1)}bit"


def listed(text: str, allowed: tuple[str, ...], option: str) -> list[str]:
    """Parse a comma-separated list of names from ``allowed``. ``option``: for the message."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in allowed:
            raise typer.BadParameter(f"{option} {name!r}: choose from {', '.join(allowed)}")
    if not names:
        raise typer.BadParameter(f"{option} is empty: choose from {', '.join(allowed)}")
    return list(dict.fromkeys(names))


def numbers(text: str, option: str) -> list[int]:
    """Parse a comma-separated list of positive whole numbers, such as 1e6. ``option``: for the message."""
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or any(not 1 <= each < math.inf or each != int(each) for each in found):
        raise typer.BadParameter(f"{option} {text!r}: write whole numbers of at least 1, such as 1e4,25e6")
    return list(dict.fromkeys(map(int, found)))


# -- files -------------------------------------------------------------------------------------------------------------
def input_file(context: typer.Context, path: Path | None) -> Path | None:
    """An option's callback: a file to read."""
    if path is not None:
        if why := unreadable(path):
            raise typer.BadParameter(why)
        _note(context, path, reads=True)
    return path


def costs_file(context: typer.Context, path: Path | None) -> Path | None:
    """An option's callback: a file to read, or the name of a device with stored costs."""
    return path if str(path) in measured.devices() else input_file(context, path)


def input_files(context: typer.Context, paths: Any) -> list[Path]:  # under Python 3.10, typer fails on list[Path]
    """An argument's callback: files to read, without duplicates."""
    for path in paths:
        input_file(context, path)
    if len({path.resolve() for path in paths}) < len(paths):
        raise typer.BadParameter("a file is named twice")
    return paths


def model_file(context: typer.Context, name: str) -> str:
    """An argument's callback: a name or a file to read."""
    if Path(name).is_file():
        _note(context, Path(name), reads=True)
    return name


def unreadable(path: Path) -> str:
    """Why a file cannot be read, in a sentence; empty if it can."""
    try:
        with path.open("rb"):
            return ""
    except OSError as error:
        return refused(error, path)


def output_file(context: typer.Context, path: Path | None) -> Path | None:
    """An option's callback: a file to write, tested before the command runs, without changing its content."""
    if path is None:
        return None
    folder = path.parent
    if folder.exists() and not folder.is_dir():
        raise typer.BadParameter(f"{str(folder)!r} is a file, not a folder")
    if not folder.exists():
        raise typer.BadParameter(f"No such folder: {str(folder)!r}; make it first")
    try:
        if path.is_dir() or not path.exists() or path.is_file():  # leave devices and pipes alone
            new = not path.exists() and not path.is_symlink()
            with path.open("ab"):
                pass
            if new:
                path.unlink()
    except FileNotFoundError as error:
        raise typer.BadParameter(f"{str(path)!r} cannot be created") from error
    except OSError as error:
        raise typer.BadParameter(refused(error, path)) from error
    _note(context, path, reads=False)
    return path


def chart_file(context: typer.Context, path: Path | None) -> Path | None:
    """An option's callback: a picture to write; also checks for matplotlib and the format."""
    if path is None:
        return None
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise typer.BadParameter(f"a chart needs matplotlib ({error}): {install('cli')}") from error
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise typer.BadParameter(f"{str(path)!r}: a chart's name ends with one of .{', .'.join(sorted(known))}")
    return output_file(context, path)


def output_folder(path: Path) -> Path:
    """An option's callback: a folder to write to, which need not exist yet."""
    there = next((each for each in (path, *path.absolute().parents) if each.exists()), path)
    if not there.is_dir():
        raise typer.BadParameter(f"{str(there)!r} is a file, not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"{str(there)!r} cannot be written to: permission denied")
    return path


def refused(error: OSError, path: Path) -> str:
    """A system error about a file, in plain words."""
    if isinstance(error, FileNotFoundError):
        return f"No such file: {str(path)!r}"
    if isinstance(error, IsADirectoryError):
        return f"{str(path)!r} is a folder, not a file"
    return f"{str(path)!r} cannot be opened: {(error.strerror or str(error)).lower()}"


def _note(context: typer.Context, path: Path, reads: bool) -> None:
    # Reject a file that two options name, since the second would overwrite the first option's output, or an input.
    seen: list[tuple[Path, bool]] = context.meta.setdefault(_SEEN, [])
    if any(path.resolve() == other and not (reads and read) for other, read in seen) and path.name != os.devnull:
        both = any(path.resolve() == other and (reads or read) for other, read in seen)
        raise typer.BadParameter(f"{str(path)!r} is {'read, too' if both else 'named twice'}: name another file")
    if not str(path).startswith("/dev/"):
        seen.append((path.resolve(), reads))


Records = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", callback=output_file, help="Write all records as JSON."),
]


def earlier(
    context: typer.Context, as_json: bool, output: Path | None, words: list[str]
) -> tuple[bool, Path | None, list[str]]:
    """Read ``--json FILE``, the former form of --output, with a notice; returns the options in their current form."""
    files = [word for word in words if word.endswith(".json")]
    if not as_json or output is not None or len(files) != 1:
        return as_json, output, words
    Console(stderr=True).print(f"--json {files[0]} is written --output {files[0]} now; --json alone prints")
    return False, output_file(context, Path(files[0])), [word for word in words if word not in files]


# -- other -------------------------------------------------------------------------------------------------------------
def install(extra: str) -> str:
    """How to install an extra. The package is not on an index yet."""
    return f"pip install '.[{extra}]' in GRACE's source tree"


def installed() -> str:
    """The default toolkit for costs: the first installed one of `TOOLKITS`."""
    return next(name for name in TOOLKITS if importlib.util.find_spec(name) is not None)


def toolkit(name: str | None) -> str | None:
    """An option's callback: a toolkit to measure on."""
    if name is None or name == "numpy":
        return name
    if name not in TOOLKITS:
        raise typer.BadParameter(f"{name!r}: choose from {', '.join(TOOLKITS)}")
    if importlib.util.find_spec(name) is None:
        raise typer.BadParameter(f"{name} is not installed: {install(name)}")
    return name


def given(context: typer.Context) -> Iterator[str]:
    """Names of the parameters given on the command line."""
    for name in context.params:
        source: Any = context.get_parameter_source(name)
        if source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP"):
            yield name


def alone(context: typer.Context, option: str, others: dict[str, str]) -> None:
    """Reject options that have no effect together with ``option``. ``others``: their parameter names and flags."""
    if wrong := [others[name] for name in given(context) if name in others]:
        raise typer.BadParameter(f"{', '.join(wrong)} has no effect with {option}: leave one of them out")
