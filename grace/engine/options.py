"""Settings that apply to all methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from grace.core.fields import checked


@dataclass(frozen=True)
class Options:
    """Settings that apply to all methods."""

    min_numel: int = 1024
    """Tensors of fewer elements go dense, all in one message; 0: compress everything."""
    fuse: str = "tensor"
    """The unit that a method compresses: each "tensor", a "bucket" as one flat vector, or the whole "model"."""
    bucket_mb: float = 25.0
    """Bucket size in MiB: a bucket's gradients travel together, and it is closed once full. The first bucket has 1
    MiB."""
    nonfinite: str = "poison"
    """What happens if a mean is not finite. The tensor's state stays unchanged; "poison" returns the mean (every
    worker's loss scaler sees it), "zero" returns zeros, "raise" raises FloatingPointError on all workers.
    """
    seed: int = 0
    """Seed of all random numbers, together with step, worker and the tensor's name: runs that name tensors differently
    draw different numbers. Must be equal on all workers."""
    compile: bool = False
    """Without effect, and warned about: it once compiled blockwise methods with `torch.compile`."""
    timeout: float | None = None
    """Seconds that a worker waits for the others in GRACE's exchanges before it raises TimeoutError; float("inf"):
    forever. None: the timeout of the process group (torch.distributed), or 600 s (Horovod). NCCL, and Horovod inside
    TensorFlow graphs, have their own time limits."""
    record: str = ""
    """A file to which worker 0 appends the `Grace.report` data every ``record_every`` steps, for `grace report`; empty:
    no record."""
    trace: int = 0
    """Number of latest steps in the timeline of `Grace.report`; 0: none. Each worker may choose its own."""
    tracker: Callable[[int, Mapping[str, float]], None] | None = None
    """Called on worker 0 with the step and the numbers of each line of the record (`grace.trackers`)."""
    record_every: int = 100
    """Steps between lines of the record. Each line computes the norms of residuals, for which the host waits for a
    GPU."""

    def __post_init__(self) -> None:
        for key, choices in (("fuse", ("tensor", "bucket", "model")), ("nonfinite", ("poison", "zero", "raise"))):
            if getattr(self, key) not in choices:
                raise ValueError(f"{key}={getattr(self, key)!r}: choose one of {', '.join(map(repr, choices))}")
        if self.min_numel < 0:
            raise ValueError(f"min_numel={self.min_numel!r} must be 0 or more")
        if not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb={self.bucket_mb!r} must be positive")
        if self.timeout is not None and not checked("timeout", self.timeout, 600.0) > 0:
            raise ValueError(f"timeout={self.timeout!r} must be positive, in seconds")
        if self.trace < 0:
            raise ValueError(f"trace={self.trace!r} must be 0 or more, in steps")
        if self.tracker is not None and not callable(self.tracker):
            raise ValueError(f"tracker={self.tracker!r} must be a function of a step and a dictionary of numbers")
        if self.tracker is not None and not self.record:
            raise ValueError("a tracker receives the lines of the record: name its file, too, as 'record': 'run.jsonl'")
        if self.record_every < 1:
            raise ValueError(f"record_every={self.record_every!r} must be 1 or more")
