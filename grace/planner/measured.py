"""Recommended methods, and stored measurements: the quality that methods reached, and their times on some devices.

``measured.json`` is made by ``docs/generate_measured.py`` from the files in benchmarks/results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from grace.core.registry import triple
from grace.planner.codecs import Codec, codec

RECOMMENDED: tuple[Mapping[str, Any], ...] = (
    {"compressor": "blockint", "bits": 4},
    {"compressor": "eden", "bits": 3, "block_size": 64},
    {"compressor": "powersgd", "compress_rank": 16},
    {"compressor": "fp16"},
)
"""Methods that `grace methods` and `grace advise` recommend: they kept the quality of dense gradients in all tasks."""


@dataclass(frozen=True)
class Quality:
    """The results of trainings with a method, each compared with a training with dense gradients."""

    kept: tuple[str, ...]
    """Tasks in which all trainings ended at most 3 % below the quality of dense gradients."""
    lost: Mapping[str, float | None]
    """The other tasks, with the largest loss, as a share of the quality of dense gradients; None: it diverged."""

    @property
    def everywhere(self) -> bool:
        """Whether the quality was kept in all tasks."""
        return not self.lost and set(self.kept) >= set(_stored()["tasks"])

    def __str__(self) -> str:
        return f"{len(self.kept)} of {len(_stored()['tasks'])}"


def label(params: Mapping[str, Any]) -> str:
    """A method as the commands write it, such as ``blockint:bits=4``."""
    rest = ",".join(f"{key}={value}" for key, value in params.items() if key != "compressor")
    return f"{params['compressor']}:{rest}" if rest else str(params["compressor"])


def quality(params: Mapping[str, Any]) -> Quality | None:
    """The stored quality of a method, whatever its communicator; None if no training of it is stored.

    ``params``: as for `grace.grace_from_params`.
    """
    method = triple(params)[0]
    for known in _stored()["quality"]:
        if triple(known["params"])[0] == method:
            return Quality(tuple(known["kept"]), known["lost"])
    return None


def devices() -> tuple[str, ...]:
    """Names of the devices with stored costs."""
    return tuple(_stored()["costs"])


def costs(device: str) -> list[Codec]:
    """The stored costs of compression on one of `devices`."""
    return [codec(each) for each in _stored()["costs"][device]]


@cache
def _stored() -> Any:
    return json.loads((files("grace.planner") / "measured.json").read_text(encoding="utf-8"))
