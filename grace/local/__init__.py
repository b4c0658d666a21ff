"""Local training: workers step their own optimizers, and a Grace averages pseudo-gradients every H steps.

    local = grace.local.DiLoCo(grc, sync_every=100)
    # or grace.tensorflow.LocalCallback(local)
    grace.torch.local(optimizer, local, model.named_parameters())
    ...
    local.finish()  # before evaluation and export

LocalSGD, SlowMo, Streaming DiLoCo and SparseLoCo are settings of one class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grace.core import Transport
from grace.core.local_training import Settings
from grace.core.registry import pair
from grace.engine.session import Grace
from grace.factory import grace_from_params
from grace.local.diloco import DiLoCo, in_turn
from grace.local.model import Access
from grace.local.peers import PeerMean

__all__ = [
    "PRESETS",
    "Access",
    "DiLoCo",
    "LocalSGD",
    "PeerMean",
    "Settings",
    "SlowMo",
    "SparseLoCo",
    "Streaming",
    "from_params",
    "in_turn",
]

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "localsgd": {"outer_lr": 1.0, "outer_momentum": 0.0},
    "slowmo": {"outer_lr": 1.0, "nesterov": False},
    "diloco": {},
    "streaming": {"fragment_sync_delay": 1, "fragment_update_alpha": 0.5},
    "sparseloco": {"sync_every": 30, "outer_lr": 1.0, "outer_momentum": 0.0},
}
"""By preset: the settings that differ from the defaults of `DiLoCo`."""
SPARSE: Mapping[str, Any] = {"compressor": "chunktopk", "memory": "residual", "beta": 0.95}
"""The parameters of SparseLoCo's Grace."""
PLAIN = {"average": "workers", "clip": "none"}
"""The values of "average" and "clip" for a plain mean, which needs no `PeerMean`."""


def LocalSGD(grace: Grace, sync_every: int, **settings: Any) -> DiLoCo:
    """Average parameters every H steps: `DiLoCo` with outer_lr=1 and no momentum.

    Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, arXiv:1805.09767, algorithm 1.
    """
    return DiLoCo(grace, sync_every, **{**PRESETS["localsgd"], **settings})


def SlowMo(grace: Grace, sync_every: int, outer_momentum: float, **settings: Any) -> DiLoCo:
    """Average parameters every H steps, with heavy-ball momentum: `DiLoCo` with outer_lr=1 and nesterov=False.

    Equals the paper's algorithm for a constant inner learning rate: the paper divides momentum by this rate, `SlowMo`
    does not.
    Wang et al., "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum", ICLR 2020,
    arXiv:1910.00643, algorithm 1.
    """
    return DiLoCo(grace, sync_every, **{**PRESETS["slowmo"], "outer_momentum": outer_momentum, **settings})


def Streaming(grace: Grace, sync_every: int, fragments: Any, fragment_sync_delay: int = 1, **settings: Any) -> DiLoCo:
    """Exchange fragments in turn, overlapped with training: `DiLoCo` with a delay and fragment_update_alpha=0.5.

    Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch", 2025,
    arXiv:2501.18512, section 2. The paper's fragments are layers at equal distances: to use these, list their names. If
    ``fragments`` is a number, fragments are contiguous.
    """
    schedule = {"fragments": fragments, "fragment_sync_delay": fragment_sync_delay}
    return DiLoCo(grace, sync_every, **{**PRESETS["streaming"], **schedule, **settings})


def SparseLoCo(sync_every: int = 30, transport: str | Transport | None = None, **settings: Any) -> DiLoCo:
    """Send the 64 largest of 4096 elements of a pseudo-gradient in two bits each, with decaying error feedback.

    The Grace is ``{"compressor": "chunktopk", "memory": "residual", "beta": 0.95}``; outer_lr=1, no momentum.
    Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv:2508.15706. Departures: chunks
    are consecutive elements, not tiles of 64 x 64; each chunk has two magnitudes. For the authors' average over senders
    and median clip use `from_params` with ``average="senders"`` and ``clip="median"``.
    """
    return from_params({"local": {"preset": "sparseloco", "sync_every": sync_every, **settings}}, transport)


def from_params(params: Mapping[str, Any], transport: str | Transport | None = None) -> DiLoCo:
    """A DiLoCo from a dictionary: its settings under "local", and the keys of `grace.grace_from_params`.

    ``{"local": {"sync_every": 100}, "compressor": "chunktopk", "beta": 0.95}``. More keys of "local": "preset", one
    of `PRESETS`, "diloco" by default ("sparseloco" has a compressor of its own); "average" and "clip", as in
    `PeerMean`, which need communicator "allgather" and make it the default. Raises as `grace_from_params` and `DiLoCo`,
    and ValueError for other presets, averages and clips.
    """
    rest = dict(params)
    given = rest.pop("local", None)
    settings = dict(given) if isinstance(given, Mapping) else {}
    preset = settings.pop("preset", "diloco")
    if preset not in PRESETS:
        raise ValueError(f"no preset {preset!r} of local training: choose from {', '.join(PRESETS)}")
    settings = {**PRESETS[preset], **settings}
    if "sync_every" not in settings:
        raise ValueError('params says how often workers exchange: {"local": {"sync_every": 100}, "compressor": ...}')
    rest = {**(SPARSE if preset == "sparseloco" else {}), **rest}
    means = {key: settings.pop(key, off) for key, off in PLAIN.items()}
    if means != PLAIN:
        compressor, memory = pair(rest)
        rest = {"communicator": "allgather", **rest, "compressor": PeerMean(compressor, **means), "memory": memory}
    return DiLoCo(grace_from_params(rest, transport), **settings)
