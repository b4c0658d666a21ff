"""The tensors of a Grace by name, grouped into units and buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from grace.engine.buckets import Bucket, Tensor, Unit

KEPT = 256
"""Maximum number of sets of tensors whose messages are cached."""


class TensorTable:
    """Tensors, units and buckets, in the order in which they were built."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.buckets: list[Bucket] = []
        self._units: dict[str, Unit] = {}
        self._messages: dict[Any, list[tuple[str, tuple[Unit, ...]]]] = {}
        self.number: int | None = None
        """The number in the names of this Grace's messages, if it has one."""

    def add(self, tensors: Mapping[str, Tensor], buckets: Iterable[Bucket]) -> None:
        """Append tensors with the buckets that hold them."""
        self.tensors.update(tensors)
        self._messages.clear()
        for bucket in buckets:
            self.buckets.append(bucket)
            self._units.update({tensor.name: unit for unit in bucket.units for tensor in unit.tensors})

    def clear(self) -> None:
        """Remove all tensors."""
        self.tensors, self.buckets, self._units, self._messages = {}, [], {}, {}

    def unit(self, name: str) -> Unit:
        """The unit of a tensor."""
        return self._units[name]

    def messages(self, names: tuple[str, ...], together: str) -> list[tuple[str, tuple[Unit, ...]]]:
        """The units of these tensors by message: one for each bucket, or a single one named ``together``.

        A single message keeps the order of the names, which must be equal on all workers.
        """
        found = self._messages.get((names, together))
        if found is None:
            wanted = dict.fromkeys(self.unit(name) for name in names)
            found = [(each.name, tuple(unit for unit in each.units if unit in wanted)) for each in self.buckets]
            found = [(together, tuple(wanted))] if together else [(label, units) for label, units in found if units]
            if len(self._messages) >= KEPT:
                self._messages.clear()
            self._messages[names, together] = found
        return found

    @property
    def units(self) -> list[Unit]:
        """All units, in the order of their first tensors."""
        return list(dict.fromkeys(self._units[name] for name in self.tensors))

    def by_name(self) -> dict[str, Unit]:
        """All units by their own names."""
        return {unit.name: unit for unit in self.units}

    def compressed(self) -> Iterator[Unit]:
        """Units that are compressed."""
        return (unit for unit in self.units if not unit.dense)

    def contents(self, message: str) -> str:
        """The names of a message's tensors, for errors; empty for another Grace's message."""
        for bucket in self.buckets:
            if message.startswith(f"grace.{bucket.name}{f'.of{self.number}' if self.number else ''}."):
                first, *rest = (repr(tensor.name) for tensor in bucket.tensors)
                return f"{first} and {len(rest)} more" if rest else first
        return ""
