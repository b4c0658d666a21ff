"""`Boundary`: the numerics of an edge between pipeline stages, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from grace.stages import INT8, End, Report, directions
from grace.stages.settings import Choice


class Boundary(torch.nn.Module):
    """Compress activations on their way forward and their gradients on their way back, as `PipelineStage` does.

    For studies in one process, and for inference of a model that was trained with compression. Each example, a row of
    the input, is compressed by itself. Input: a tensor [m, ...] or a tuple of them, of a floating dtype; others pass
    unchanged. Output: the same shapes and dtypes. The gradient of the compressor is taken as the identity (straight
    through), except with ``same_mask``.

    ``forward``, ``backward``: {"compressor": ..., its parameters}, a name, a Compressor, or None for no compression;
    the default is `blockint` with 8 bits. ``feedback``: "none", "ef", "ef21" or "aq"; ``same_mask``, ``samples``,
    ``storage``, ``stored``, ``seed``: as for `grace.stages.directions`. ``compress_in_eval``: compress activations in
    eval mode too, without feedback. ``edge``: the edge's name; its random streams depend on it.
    Attributes to set before a call: ``microbatch``, the index of the input within its step, 0 by default ("ef" and
    "ef21" keep a buffer for each index); ``sample_ids``, the IDs of the input's examples, for "aq".
    Raises ValueError for conflicting settings, TypeError for inputs that are not tensors.
    """

    def __init__(
        self,
        forward: Choice = INT8,
        backward: Choice = INT8,
        feedback: str = "none",
        *,
        same_mask: bool = False,
        compress_in_eval: bool = True,
        samples: int = 0,
        storage: str | Path | None = None,
        stored: str = "float16",
        seed: int = 0,
        edge: str = "0-1",
    ):
        super().__init__()
        ahead, back = directions(forward, backward, feedback, same_mask, seed, False, samples, storage, stored)
        masks: dict[str, Any] | None = {} if same_mask else None
        self._ahead = End(ahead, edge, "forward", True, masks)
        self._back = End(back, edge, "backward", True, masks)
        self.compress_in_eval = compress_in_eval
        self.microbatch = 0
        self.sample_ids: Any = None

    def forward(self, x: Any) -> Any:
        """Return the input as the next stage receives it."""
        if isinstance(x, (tuple, list)):
            found = [self._one(each, number) for number, each in enumerate(x)]
            return type(x)(*found) if hasattr(x, "_fields") else type(x)(found)  # a namedtuple takes separate arguments
        return self._one(x, 0)

    def _one(self, x: Any, number: int) -> Any:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"a Boundary compresses tensors, not {type(x).__name__}: put it between two modules")
        if not x.is_floating_point() or not x.numel() or not (self.training or self.compress_in_eval):
            return x
        ids = None
        if self.training and self._ahead.how.feedback == "aq":
            ids = host_ids(self.sample_ids)
        return _Cross.apply(x, self, number, self.microbatch, ids)

    def report(self) -> Report:
        """Bytes that two stages would have sent, by direction."""
        return Report((self._ahead.report(), self._back.report()))

    def get_extra_state(self) -> dict[str, Any]:
        """The buffers, for ``state_dict``."""
        return {"forward": to_tensors(self._ahead.state_dict()), "backward": to_tensors(self._back.state_dict())}

    def set_extra_state(self, state: Any) -> None:
        """Restore the buffers, for ``load_state_dict``."""
        self._ahead.load_state_dict(state["forward"])
        self._back.load_state_dict(state["backward"])


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, boundary: Boundary, number: int, microbatch: int, ids: Any) -> torch.Tensor:
        ctx.boundary, ctx.key, ctx.training = boundary, (number, microbatch), boundary.training
        return across(boundary._ahead, x, number, microbatch, ids, boundary.training)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        if ctx.training:
            gradient = across(ctx.boundary._back, gradient, *ctx.key)
        return gradient, None, None, None, None


def across(
    end: End, x: torch.Tensor, number: int, microbatch: int, ids: Any = None, training: bool = True
) -> torch.Tensor:
    """Return ``x`` as the receiver sees it, with its shape and dtype; count its bytes in ``end``."""
    if end.how.plain:
        end.count(x.nbytes, x.nbytes)
        return x.clone()
    return end.through(x.detach(), number, microbatch, ids, training).view(x.shape).to(x.dtype)


def host_ids(ids: Any) -> Any:
    """Sample IDs as a NumPy array int64[m]; None stays None. TypeError for numbers other than integers."""
    if ids is None:
        return None
    found = np.asarray(ids.detach().cpu() if isinstance(ids, torch.Tensor) else ids).reshape(-1)
    if not np.issubdtype(found.dtype, np.integer):
        raise TypeError(f"sample_ids are integers, not {found.dtype}")
    return found.astype(np.int64)


def to_tensors(state: Any) -> Any:
    """Convert a state's NumPy arrays to tensors, so that ``torch.load(weights_only=True)`` reads it."""
    if isinstance(state, dict):
        return {key: to_tensors(value) for key, value in state.items()}
    return torch.from_numpy(np.array(state)) if isinstance(state, np.ndarray) else state
