"""`grace_from_params`: builds a Grace from a dictionary of names and numbers.

Keys and their defaults are those of the registered classes' dataclass fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from grace.core import Transport
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.core.registry import policies, take, three, unknown_key, values
from grace.engine.options import Options
from grace.engine.session import Grace
from grace.transports import get_transport, known_transport

OPTIONS = ("world_size", *(field.name for field in fields(Options)))


def grace_from_params(params: Mapping[str, Any], transport: str | Transport | None = None) -> Grace:
    """Build a Grace from names and numbers.

    ``params``: ``compressor``, ``memory``, ``communicator`` and ``policy`` (names, or instances); the fields of these
    classes (such as ``compress_ratio``); the fields of `grace.engine.options.Options` (such as ``min_numel``);
    ``world_size``, which must be the transport's if given. Defaults: the compressor's default memory, and communicator
    "auto", which chooses the exchange with the fewest bytes for the method and the workers.

    ``compressor="auto"``: the first steps try dense gradients and several methods (``candidates``); training continues
    with the one that is expected to reach a given quality first; see `grace.policies.auto.Auto`.

    ``plan``: a strategy, and optionally a method, for each tensor, instead of a communicator: a file written by
    `grace plan`, or its content. All workers use worker 0's plan; only with a policy does every worker need the file.
    If the plan includes its inputs, it is replanned for another number of workers and for the levels of a policy.

    ``transport``: "horovod", "torch", "local" or a Transport; default: the initialised one. If there is none yet, the
    Grace looks for its workers when it is built or its ``world_size`` is read, and then raises RuntimeError if the
    launcher asks for several workers and there is still no group.

    Raises ValueError for an unknown name, key or value and for an invalid combination, naming a valid one.
    """
    _check_params(params)
    rest = dict(params)
    carrier = known_transport(transport)
    if "world_size" in rest:
        carrier = carrier or get_transport()  # a given world_size implies an existing group
    size = rest.pop("world_size", None)
    if carrier is not None and size not in (None, carrier.size):
        raise ValueError(
            f"world_size={size!r}, but the transport has {carrier.size} worker(s): initialise Horovod or "
            "torch.distributed before grace_from_params, launch with horovodrun or torchrun, or leave world_size out"
        )
    if "plan" in rest:
        communicator = _planned(rest)
        rest = {"min_numel": 0, **rest, "communicator": communicator}
    if rest.get("compressor") == "auto":
        rest = _automatic(rest)
    compressor, memory, communicator = three(rest)
    policy = rest.pop("policy", None)
    policy = None if policy is None else take(policies, policy, rest)
    options = Options(**values(Options, rest))
    if rest:
        parts = [part for part in (compressor, memory, communicator, policy) if part is not None]
        raise ValueError(unknown_key(next(iter(rest)), *parts, others=OPTIONS))
    return Grace(Method(compressor, memory), communicator, carrier, options, policy)


def _check_params(params: Any) -> None:
    if isinstance(params, Mapping):
        if odd := [key for key in params if not isinstance(key, str)]:
            raise TypeError(f"the keys of params are names, but {odd[0]!r} is {type(odd[0]).__name__}")
        return
    example = {"compressor": params if isinstance(params, str) else "topk"}
    raise TypeError(f"params is a dictionary, not {params!r:.80}: grace_from_params({example!r})")


def _automatic(rest: dict[str, Any]) -> dict[str, Any]:
    # Compressor "auto" is implemented as a policy that switches between whole methods.
    if odd := sorted({"memory", "communicator", "policy", "plan"} & rest.keys()):
        raise ValueError(f"compressor 'auto' chooses whole methods: give {odd[0]!r} to its candidates, as in "
                         f"candidates=[{{'compressor': 'topk', {odd[0]!r}: {rest[odd[0]]!r}}}]")  # fmt: skip
    return {**rest, "compressor": "none", "policy": "auto"}


def _planned(rest: dict[str, Any]) -> Communicator:
    # Returns the communicator for a plan, which is a file name or the content of a file. Without a policy, only worker
    # 0 needs the file.
    from grace.communicators.planned import Planned
    from grace.communicators.planned.table import PlanTable, leveled_params
    from grace.planner.plan import from_dict

    if "communicator" in rest:
        raise ValueError("a plan says how tensors travel: leave communicator out, or plan")
    if rest.get("fuse", "tensor") != "tensor":
        raise ValueError(f"a plan names tensors, but fuse={rest['fuse']!r} makes one of several: use fuse='tensor'")
    plan, policy = rest.pop("plan"), rest.get("policy")
    if isinstance(plan, Mapping):
        text = json.dumps(plan)
    else:
        text = Path(plan).read_text() if Path(plan).exists() else ""
    if policy is not None:
        kind: Any = policies.find(policy) if isinstance(policy, str) else policy
        if kind.switches_methods:
            raise ValueError(f"a plan has one method, and policy {policy!r} changes methods: leave out one of them")
        rest |= leveled_params(text, rest)
    return Planned(ways=PlanTable(text, leveled=policy is not None, load=from_dict), node_size=rest.pop("node_size", 0))
