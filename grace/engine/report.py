"""Reports: bytes sent, tensors and methods, times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class TensorReport:
    """Facts and counts of one tensor, or of the vector into which several tensors were fused."""

    name: str
    shape: tuple[int, ...]
    method: str
    """The compressor's name, or "dense"."""
    reason: str
    """Why the tensor went dense, or that its sparse gradients were made dense; empty otherwise."""
    bytes_sent: int
    bytes_dense: int
    residual_norm: float | None
    """L2 norm of the error-feedback memory on this worker; None if there is none."""
    levels: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """With a policy: the history of levels as (first epoch, level), the current one last. With "auto", steps replace
    epochs.
    """

    @property
    def level(self) -> str:
        """The current level as text; empty without a policy."""
        return leveled(self.levels[-1][1]) if self.levels else ""

    strategy: str = ""
    """The tensor's strategy in a plan; empty without a plan."""


@dataclass(frozen=True)
class Report:
    """Totals of one worker since the counts began.

    Bytes are those of the arrays that were passed to the transport, or received from it. The communication library
    decides how often a byte crosses a link: a ring allreduce moves 2(N-1)/N times the bytes, an allgather N-1 times.
    """

    steps: int
    rank: int
    world_size: int
    method: str
    bytes_sent: int
    bytes_received: int
    bytes_dense: int
    """Bytes of the uncompressed gradients, in their own dtypes."""
    tensors: list[TensorReport] = field(default_factory=list)
    times: dict[str, float] = field(default_factory=dict)
    """Seconds: "compress", "wait" for the transport, "decompress". Empty if they all run in a graph."""
    skipped: int = 0
    """Count of non-finite tensor means, each of which left the tensor's state unchanged (0 inside graphs)."""
    discarded: int = 0
    """Exchanges whose means were not applied: their state was rolled back, but their bytes count (0 inside graphs)."""
    trials: dict[str, float] = field(default_factory=dict)
    """With the compressor "auto": seconds of a step, by tried method."""
    noise: dict[str, float] = field(default_factory=dict)
    """With the compressor "auto": the noise that each method adds to the mean, relative to the mean (squared norms)."""
    predicted: dict[str, float] = field(default_factory=dict)
    """With the compressor "auto": seconds that each method takes for the progress of one step with exact means."""
    chosen: str = ""
    """With the compressor "auto": the current choice and its reason; empty during the trials."""
    runs_as: str = ""
    """Which kernels compress: an instruction set of the CPU, "triton", or "plain functions"."""
    exchange: str = ""
    """Why the communicator was chosen; empty if the user named it."""
    plan: str = ""
    """The workers and data for which the plan in force was made; empty if unknown."""
    parameters: list[TensorReport] = field(default_factory=list)
    """With `grace.torch.fsdp(parameters=...)`: a row per `fully_shard` call, its shape [workers, elements of a shard].
    Bytes are those of this worker's shards in all gathers; all other counts are for gradients only."""

    @property
    def ratio(self) -> float:
        """bytes_dense / bytes_sent; 1 before the first step."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def heavier(self) -> str:
        """A warning if this worker received clearly more bytes than it would in a dense ring allreduce; else empty."""
        ring = 2 * (self.world_size - 1) / self.world_size * self.bytes_dense
        if not self.bytes_received > 1.05 * ring > 0:
            return ""
        return (
            f"{self.method} brought each of {self.world_size} workers {self.bytes_received / ring:.1f} times the bytes "
            "of a dense allreduce: gathers grow with the number of workers. Leave communicator out, name 'twostage', "
            "or use a method that sends fewer bits or is summed on the wire"
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain numbers, strings, lists and dictionaries, for JSON."""
        return {**asdict(self), "ratio": self.ratio}

    def __str__(self) -> str:
        steps = max(self.steps, 1)
        head = (
            f"{self.method} | worker {self.rank} of {self.world_size} | {self.steps} steps | per step "
            f"{self.bytes_sent / steps:,.0f} bytes sent, dense {self.bytes_dense / steps:,.0f} | ratio {self.ratio:.1f}"
        )
        leveled = any(tensor.levels for tensor in self.tensors)
        rows = [("tensor", "shape", "method", "bytes/step", "ratio", "residual", *["level"] * leveled, "")]
        for tensor in self.tensors:
            ratio = tensor.bytes_dense / tensor.bytes_sent if tensor.bytes_sent else 1.0
            norm = "" if tensor.residual_norm is None else f"{tensor.residual_norm:.3g}"
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            sent = f"{tensor.bytes_sent / steps:,.0f}"
            rows.append(
                (
                    tensor.name,
                    shape,
                    tensor.method,
                    sent,
                    f"{ratio:.1f}",
                    norm,
                    *[tensor.level] * leveled,
                    tensor.reason or tensor.strategy,
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        times = "  ".join(f"{name} {seconds:.3f} s" for name, seconds in self.times.items())
        trials = "  ".join(f"{level} {seconds * 1e3:.1f} ms" for level, seconds in self.trials.items())
        noise = "  ".join(
            f"{level} {seconds * 1e3:.1f} ms (noise ratio {self.noise[level]:.2g})"
            for level, seconds in self.predicted.items()
        )
        tried = [trials and f"tried: {trials}", noise and f"per effective step: {noise}"]
        tried.append(self.chosen and f"chosen: {self.chosen}")
        ends = [
            times,
            self.runs_as and f"runs as {self.runs_as}",
            *tried,
            self.exchange,
            self.plan and f"plan: {self.plan}",
            self._gathered(steps),
            self.heavier,
        ]
        return "\n".join([head, *lines, *filter(None, ends)])

    def _gathered(self, steps: int) -> str:
        # Returns a line about the traffic of parameters; empty if there is none.
        sent, dense = (sum(getattr(row, key) for row in self.parameters) for key in ("bytes_sent", "bytes_dense"))
        if not sent:
            return ""
        return (
            f"parameters: {self.parameters[0].method} | per step {sent / steps:,.0f} bytes sent, dense "
            f"{dense / steps:,.0f} | ratio {dense / sent:.1f}"
        )


def leveled(level: Mapping[str, Any]) -> str:
    """The text of a policy's level."""
    fields = (f"{key}={value}" for key, value in level.items() if key != "compressor")
    return ", ".join([*filter(None, [level.get("compressor")]), *fields])
