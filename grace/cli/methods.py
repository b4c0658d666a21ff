"""The registered compressors, memories and communicators: `grace methods`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


_REQUIRED = "required"


@dataclass(frozen=True)
class Entry:
    """One registered class, as a user sees it."""

    name: str
    aliases: list[str]
    summary: str
    parameters: dict[str, Any]
    combine: str | None = None
    ragged: bool | None = None
    unbiased: bool | None = None
    memory: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; what does not apply to this kind is left out."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}


def collect() -> dict[str, list[Entry]]:
    """All entries of the registry, by kind, in the order of their names."""
    from grace.registry import communicators, compressors, memories

    kinds = {"compressors": compressors, "memories": memories, "communicators": communicators}
    return {
        kind: [describe(name, cls, list(registry.aliases(name))) for name, cls in sorted(registry.items())]
        for kind, registry in kinds.items()
    }


def describe(name: str, cls: type, aliases: list[str]) -> Entry:
    """What the class says about itself: docstring, fields with defaults, declarations."""
    parameters = {f.name: _default(f) for f in dataclasses.fields(cls) if f.init}
    # A declaration may follow from the parameters: then it is asked of the class with its defaults.
    made = cls if _REQUIRED in parameters.values() else cls()
    combine, memory = getattr(made, "combine", None), getattr(made, "memory", None)
    return Entry(
        name=name,
        aliases=aliases,
        summary=(cls.__doc__ or "").strip().partition("\n")[0].replace("``", "`"),
        parameters=parameters,
        combine=combine.value if isinstance(combine, Enum) else None,
        ragged=_flag(made, "ragged"),
        unbiased=_flag(made, "unbiased"),
        memory=memory if isinstance(memory, str) else None,
    )


def render(found: dict[str, list[Entry]], console: Console) -> None:
    """Print one table per kind."""
    from rich.markup import escape
    from rich.table import Table

    for kind, entries in found.items():
        table = Table(title=kind, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for column in ("name", "what it does", "parameters", "properties"):
            table.add_column(column, no_wrap=column == "parameters", min_width=8)
        for entry in entries:
            names = "\n".join([entry.name, *entry.aliases])
            parameters = "\n".join(f"{key}={value!r}" for key, value in entry.parameters.items())
            properties = [
                entry.combine and f"combine: {entry.combine}",
                entry.memory and f"memory: {entry.memory}",
                "ragged" if entry.ragged else "",
                "unbiased" if entry.unbiased else "",
            ]
            table.add_row(*map(escape, (names, entry.summary, parameters, "\n".join(filter(None, properties)))))
        console.print(table, "")


def _default(field: dataclasses.Field[Any]) -> Any:
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if value is dataclasses.MISSING:
        return _REQUIRED
    if isinstance(value, Enum):
        return value.value
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


def _flag(made: object, name: str) -> bool | None:
    value = getattr(made, name, None)
    return value if isinstance(value, bool) else None
