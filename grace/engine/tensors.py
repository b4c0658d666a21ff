"""The tensors of a Grace by name, grouped into units and buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from grace.engine.buckets import Bucket, Tensor, Unit


class TensorTable:
    """Tensors, units and buckets, in the order in which they were built."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.buckets: list[Bucket] = []
        self._units: dict[str, Unit] = {}

    def add(self, tensors: Mapping[str, Tensor], buckets: Iterable[Bucket]) -> None:
        """Append tensors with the buckets that hold them."""
        self.tensors.update(tensors)
        for bucket in buckets:
            self.buckets.append(bucket)
            self._units.update({tensor.name: unit for unit in bucket.units for tensor in unit.tensors})

    def clear(self) -> None:
        """Remove all tensors."""
        self.tensors, self.buckets, self._units = {}, [], {}

    def unit(self, name: str) -> Unit:
        """The unit of a tensor."""
        return self._units[name]

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
