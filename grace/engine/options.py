"""Settings that all methods share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """What is common to all methods."""

    min_numel: int = 1024
    """Tensors of fewer elements go dense, all in one message; 0: compress everything."""
    fuse: str = "tensor"
    """What a method sees as one tensor: "tensor", "bucket" (all of a bucket, flat) or "model"."""
    bucket_mb: float = 25.0
    """Gradients that travel together: a bucket is closed once it holds so many MiB, the first one once it holds 1."""
    nonfinite: str = "poison"
    """When a mean is not finite, the tensor's state stays as it was, and the mean is handed on ("poison": every
    worker's loss scaler sees it), replaced by zeros ("zero"), or FloatingPointError is raised on all workers ("raise").
    """
    seed: int = 0
    """Of all random numbers. The same on every worker."""
    compile: bool = False
    """On PyTorch's CPU tensors, blockwise methods run as `torch.compile` compiles them, with the same results, where no
    native kernel does them. What cannot be compiled runs as ever, and a warning says so."""
    timeout: float = 600.0
    """Seconds that a worker waits for the others before it raises TimeoutError; float("inf"): for ever. Horovod inside
    TensorFlow graphs, and NCCL, have time limits of their own."""
    record: str = ""
    """A file to which worker 0 adds a line of what `Grace.report` gives every ``record_every`` steps, for `grace
    report`; empty: none."""
    trace: int = 0
    """Of how many of the last steps `Grace.report` can write a timeline; 0: none is kept. Each worker's own choice."""
    record_every: int = 100
    """Steps. Norms of residuals are computed for each line; on a GPU that is when the host waits for it."""

    def __post_init__(self) -> None:
        for key, choices in (("fuse", ("tensor", "bucket", "model")), ("nonfinite", ("poison", "zero", "raise"))):
            if getattr(self, key) not in choices:
                raise ValueError(f"{key}={getattr(self, key)!r}: choose one of {', '.join(map(repr, choices))}")
        if self.min_numel < 0:
            raise ValueError(f"min_numel={self.min_numel!r} must be 0 or more")
        if not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb={self.bucket_mb!r} must be positive")
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout!r} must be positive, in seconds")
        if self.trace < 0:
            raise ValueError(f"trace={self.trace!r} must be 0 or more, in steps")
        if self.record_every < 1:
            raise ValueError(f"record_every={self.record_every!r} must be 1 or more")
