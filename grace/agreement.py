"""What all workers must have alike, compared when they begin."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from grace.core import Transport
from grace.layout import Tensor


def agree(transport: Transport, settings: Mapping[str, Any], tensors: Iterable[Tensor]) -> None:
    """Compare settings and tensors with the other workers'. Raises ValueError on all of them, naming the difference."""
    if transport.size == 1:
        return
    texts = transport.exchange(json.dumps([settings, [asdict(tensor) for tensor in tensors]]))
    # Every worker compares the same texts with worker 0's, so all of them raise together.
    for rank, text in enumerate(texts):
        if text != texts[0]:
            raise ValueError(
                f"worker 0 and worker {rank} differ: {_difference(json.loads(texts[0]), json.loads(text))}"
            )


def _difference(first: Any, other: Any) -> str:
    (settings, tensors), (other_settings, other_tensors) = first, other
    for key, value in settings.items():
        if other_settings[key] != value:
            return (
                f"{key} is {value} on the one and {other_settings[key]} on the other. Use the same settings everywhere"
            )
    names, other_names = [t["name"] for t in tensors], [t["name"] for t in other_tensors]
    if only := [name for name in names if name not in other_names]:
        return f"only worker 0 has {only[:3]}. Make the same model on every worker"
    if only := [name for name in other_names if name not in names]:
        return f"worker 0 lacks {only[:3]}. Make the same model on every worker"
    for one, two in zip(tensors, other_tensors, strict=True):
        if one != two:
            return (
                f"{one['name']!r} is {one['dtype']}{one['shape']} on the one where the other has {two['name']!r}, "
                f"{two['dtype']}{two['shape']}. Make the same model, in the same order, on every worker"
            )
    return "their settings"
