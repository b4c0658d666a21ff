"""Lossless patches of weights: what changed from one version to the next, in a fraction of the bytes.

    patch = grace.patch.diff(new, base)                   # dicts of tensors, modules, DTensors, safetensors folders
    grace.patch.save(patch, "patches", version=7, base=6)
    patch = grace.patch.load("patches", 7)
    grace.patch.apply(patch, tensors)                     # in place, whole or not at all

`Publisher` and `Receiver` keep a chain of versions. Needs `pip install '.[patch]'`, and no toolkit.
"""

from __future__ import annotations

from grace.patch.chain import Publisher, Receiver
from grace.patch.changes import Item, Patch, Refused, diff, join
from grace.patch.folders import apply, finish, load, save

__all__ = ["Item", "Patch", "Publisher", "Receiver", "Refused", "apply", "diff", "finish", "join", "load", "save"]
