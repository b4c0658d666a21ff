"""`grace methods`: lists the registered compressors, memories and communicators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grace.cli.catalog import Entry, classes, guarantee, literal
from grace.planner.measured import RECOMMENDED

if TYPE_CHECKING:
    from rich.console import Console

NARROW = 80  # columns


def render(found: dict[str, list[Entry]], console: Console) -> None:
    """Print one table per kind."""
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    console.print(
        "Recommended: in all tasks they kept the quality of dense gradients. grace advise compares their speed."
    )
    for params in RECOMMENDED:
        console.print(Text(f"  {{{', '.join(f'{literal(key)}: {literal(value)}' for key, value in params.items())}}}"))
    console.print()
    for kind, entries in found.items():
        gap = 2 if console.width > NARROW else 1
        table = Table(title=kind, title_justify="left", box=None, pad_edge=False, padding=(0, gap, 0, 0))
        table.add_column("name", no_wrap=True)
        if kind == "compressors":
            table.add_column("bits/\nelement", justify="right", no_wrap=True)
            table.add_column("memory", no_wrap=True)
        table.add_column("what it does")
        for entry in entries:
            bits = "" if entry.bits_per_element is None else f"{entry.bits_per_element:.4g}"
            measured = [bits, entry.memory or ""] if kind == "compressors" else []
            table.add_row(*map(escape, [entry.name, *measured, entry.summary]))
        console.print(table, "")
    console.print("grace methods NAME shows one of them with its parameters, guarantee and paper.")


def render_one(kind: str, entry: Entry, console: Console) -> None:
    """Print all details of one entry."""
    from rich.table import Table
    from rich.text import Text

    also = f" (also {', '.join(entry.aliases)})" if entry.aliases else ""
    console.print(Text(f"{entry.name}{also}: {entry.summary}", style="bold"))
    example = ", ".join(f'"{key}": {literal(value)}' for key, value in entry.example.items())
    console.print(Text(f"  grace_from_params({{{example}}})"), soft_wrap=True)
    parameters = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    for key in dict.fromkeys([*entry.meanings, *entry.parameters]):
        parameters.add_row(Text(f"{key}={literal(entry.parameters[key])}"), Text(entry.meanings.get(key, "")))
    if parameters.rows:
        console.print("", parameters, "")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    rows: list[tuple[str, str]] = []
    if kind == "compressors":
        rows += [
            ("class", entry.family or ""),
            ("bits per element", "" if entry.bits_per_element is None else f"{entry.bits_per_element:.4g} (measured)"),
            ("guarantee", guarantee(entry)),
            ("classes", classes(entry)),
            ("on the wire", "allreduce" if entry.allreduce else "each worker's payload is needed"),
            ("memory", entry.memory or ""),
            ("communicators", ", ".join(entry.communicators or [])),
        ]
    for name, value in [*rows, ("paper", entry.citation)]:
        if value:
            table.add_row(name, Text(value))
    console.print(table)
