"""Checks a policy's plain data, which come from another worker or a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from grace.core.policy import Policy, number


def check_plain(plain: Any, policy: Policy, count: int, names: Collection[str]) -> None:
    """Raise ValueError unless ``plain`` is plain data of a policy with ``count`` levels for the tensors ``names``."""

    def whole(value: Any, least: int, most: float = math.inf) -> bool:
        return type(value) is int and least <= value <= most

    def level(value: Any) -> bool:
        return whole(value, 0, count - 1)

    def past(value: Any) -> bool:
        pairs = isinstance(value, (list, tuple)) and value
        return bool(pairs) and all(
            isinstance(pair, (list, tuple)) and len(pair) == 2 and whole(pair[0], 0) and level(pair[1])
            for pair in value
        )

    rules: dict[str, Callable[[Any], bool]] = {
        "epoch": lambda value: whole(value, 0, 2**31 - 1),
        "step": lambda value: whole(value, 0, 2**63 - 1),
        "lr": lambda value: value is None or number(value),
        "levels": lambda value: isinstance(value, Mapping) and all(map(level, value.values())),
        "micro_steps": lambda value: whole(value, 1),
        "lr_scale": number,
        "memo": lambda value: isinstance(value, Mapping) and policy.remembers(value),
        "history": lambda value: isinstance(value, Mapping) and all(map(past, value.values())),
    }
    for key, rule in rules.items():
        if not isinstance(plain, Mapping) or key not in plain or not rule(plain[key]):
            value = plain.get(key) if isinstance(plain, Mapping) else plain
            raise ValueError(f"this is no state of a policy: its {key!r} is {value!r}")
    for key in ("levels", "history"):
        if sorted(plain[key]) != sorted(names):
            raise ValueError(
                f"the policy's state has {key} of {sorted(plain[key])}, but the model compresses "
                f"{sorted(names)}: use the same model and settings"
            )
