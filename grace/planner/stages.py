"""Predicts the step of a pipeline whose edges compress activations and their gradients."""

from __future__ import annotations

from dataclasses import dataclass

from grace.planner.costs import Codec, Link
from grace.planner.profile import Profile


@dataclass(frozen=True)
class Edge:
    """The cost of one message of an edge, in one direction."""

    nbytes: float
    wire: float
    """Seconds on the link."""
    codec: float
    """Seconds to encode at one end and decode at the other."""


def edge_seconds(stage_bytes: float, link: Link, codec: Codec | None = None) -> Edge:
    """The cost of sending a micro-batch's activations or gradients over a link; ``stage_bytes`` in float32."""
    size = stage_bytes / 4
    nbytes = stage_bytes if codec is None else codec.wire(size)
    spent = 0.0 if codec is None else codec.encode(size) + codec.decode(size)
    return Edge(nbytes, link.latency + nbytes / link.bandwidth, spent)


def step_seconds(profile: Profile, stages: int, microbatches: int, edge: Edge) -> float:
    """Seconds of a step under GPipe, for a model cut into stages of equal work.

    In each direction the first micro-batch passes all stages and edges; each further one arrives after the time of a
    stage or of an edge, whichever is longer. Encoding and decoding take the stage's own time, while messages overlap
    with computation.
    """
    total = 0.0
    for seconds in (profile.forward, profile.backward):
        work = seconds / (stages * microbatches)
        stage = work + (edge.codec if stages > 1 else 0.0)
        wire = edge.wire if stages > 1 else 0.0
        total += stages * stage + (stages - 1) * wire + (microbatches - 1) * max(stage, wire)
    return total
