"""`PipelineStage`: PyTorch's pipeline stage with compressed messages."""

from __future__ import annotations

import weakref
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

from grace.backends import get_backend
from grace.core.version import VERSION
from grace.stages import INT8, End, Report, directions
from grace.stages.settings import Choice, Direction
from grace.torch.boundary import host_ids, to_tensors

NEEDED = (
    "get_fwd_send_ops",
    "get_fwd_recv_ops",
    "get_bwd_send_ops",
    "get_bwd_recv_ops",
    "clear_runtime_states",
    "_retrieve_recv_activations",
    "_retrieve_recv_grads",
)
"""Methods of torch's stage that are overridden; the last two are private."""


OLDEST = "2.13"
"""The oldest torch whose stages were tested with compression. With torch 2.6, a pipeline test hangs."""


def check_torch(stage: type = TorchStage, version: str = torch.__version__) -> None:
    """Raise RuntimeError if this torch is too old, or if its stage lacks a method that compression overrides."""
    lost = [name for name in NEEDED if not callable(getattr(stage, name, None))]
    if lost or TorchVersion(version) < OLDEST:
        reason = f"has no {', '.join(lost)}, which compression needs" if lost else "is too old for compression"
        raise RuntimeError(
            f"the PipelineStage of torch {version} {reason}; torch {OLDEST} has what it needs: install that version or "
            "a later one, or use torch.distributed.pipelining.PipelineStage without compression"
        )


_STAGES: list[weakref.ref[PipelineStage]] = []
"""Stages whose settings the ranks have not compared yet."""


class PipelineStage(TorchStage):
    """torch.distributed.pipelining.PipelineStage that sends activations and gradients compressed.

    ``submodule``, ``stage_index``, ``num_stages``, ``device``, and other keywords such as ``group`` and ``input_args``:
    as for torch's stage. Use it with torch's schedules. All stages of a pipeline must be of this class, with the same
    settings. ``forward``, ``backward``: {"compressor": ..., its parameters}, a name, a Compressor, or None for no
    compression; the default is `blockint` with 8 bits. Each example, a row of a micro-batch, is compressed by itself.
    Integer tensors are not compressed, nor are tensors between stages on the same rank.
    ``feedback``: "none", "ef", "ef21" or "aq"; ``same_mask``, ``samples``, ``storage``, ``stored``, ``seed``,
    ``debug``: as for `grace.stages.directions`; ``storage`` gets a folder for each rank. ``compress_in_eval``:
    `schedule.eval` compresses activations too, without feedback.

    With "aq", set ``sample_ids`` on every rank before each ``schedule.step``: the IDs of the whole local batch, in the
    order of its examples, without repeats.

    Raises ValueError for settings that conflict, or differ between stages (on all ranks, in the first step);
    RuntimeError for a version of torch whose stage lacks a method that this class overrides; TypeError for DTensors.
    """

    def __init__(
        self,
        submodule: torch.nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        forward: Choice = INT8,
        backward: Choice = INT8,
        feedback: str = "none",
        same_mask: bool = False,
        compress_in_eval: bool = True,
        samples: int = 0,
        storage: str | Path | None = None,
        stored: str = "float16",
        seed: int = 0,
        debug: bool = False,
        **torch_arguments: Any,
    ):
        check_torch()
        where = None if storage is None else Path(storage) / f"rank{dist.get_rank()}"
        ahead, back = directions(forward, backward, feedback, same_mask, seed, debug, samples, where, stored)
        for how, what in ((ahead, "forward"), (back, "backward")):
            if how.compressor.traits.variable_length:
                raise ValueError(
                    f"{what}: payloads of {how.compressor} have no fixed length, but the receiver must know it: use a "
                    "method that sends as much each time, such as 'blockint' or 'topk' with selector='exact'"
                )
        super().__init__(submodule, stage_index, num_stages, device, **torch_arguments)
        self.compress_in_eval = compress_in_eval
        self._how = (ahead, back)
        self._xp = get_backend("torch", str(torch.device(device)))
        self._ends: dict[tuple[str, bool], End] = {}
        # The activation and its gradient share one mask on the same side of an edge.
        before: dict[str, Any] | None = {} if same_mask else None
        after: dict[str, Any] | None = {} if same_mask else None
        if stage_index > 0:
            edge = f"{stage_index - 1}-{stage_index}"
            self._ends["forward", False] = End(ahead, edge, "forward", False, before)
            self._ends["backward", True] = End(back, edge, "backward", True, before)
        if stage_index < num_stages - 1:
            edge = f"{stage_index}-{stage_index + 1}"
            self._ends["forward", True] = End(ahead, edge, "forward", True, after)
            self._ends["backward", False] = End(back, edge, "backward", False, after)
        self._owned: list[torch.Tensor] = []
        self._arriving: dict[str, dict[int, list[tuple[int, torch.Tensor]]]] = {"forward": {}, "backward": {}}
        self._next_ids: Any = None
        self._ids: Any = None
        self._disagreement: str | None = None
        _STAGES.append(weakref.ref(self))

    # -- for users -----------------------------------------------------------------------------------------------------
    @property
    def sample_ids(self) -> Any:
        """int64[batch]: the IDs of the next step's examples, for "aq"; None until they are set."""
        return self._next_ids

    @sample_ids.setter
    def sample_ids(self, ids: Any) -> None:
        self._next_ids = host_ids(ids)

    def report(self) -> Report:
        """Bytes that this stage sent and received, by edge and direction."""
        return Report(tuple(end.report() for end in self._ends.values()))

    def state_dict(self) -> dict[str, Any]:
        """Buffers of all ends of this stage; save them for each stage, between steps, next to the module's state."""
        return {self._key(*key): to_tensors(end.state_dict()) for key, end in self._ends.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned for the same stage. ValueError for another stage's state."""
        if state.keys() != {self._key(*key) for key in self._ends}:
            raise ValueError(f"this state is of another stage than {self.stage_index} of {self.num_stages}")
        for key, end in self._ends.items():
            end.load_state_dict(state[self._key(*key)])

    @staticmethod
    def _key(direction: str, sender: bool) -> str:
        return f"{direction}/{'sends' if sender else 'receives'}"

    # -- what torch's schedules call -----------------------------------------------------------------------------------
    def clear_runtime_states(self) -> None:
        """Begin a step: compare settings (first step only), and take the batch's IDs."""
        super().clear_runtime_states()
        if self._disagreement is None:
            _agree(self.group)
        if self._disagreement:
            raise ValueError(self._disagreement)
        self._owned.clear()  # all sends of the last step are complete
        for arriving in self._arriving.values():
            arriving.clear()
        self._ids, self._next_ids = self._next_ids, None
        if self.has_backward and self._how[0].feedback == "aq":
            self._check_ids()

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Torch's method, but the operations send compressed activations."""
        if hasattr(self, "_forward_chunk_states"):  # from PyTorch 2.15 on
            outputs = self._forward_chunk_states[fwd_chunk_id].live_outputs
        else:
            outputs = self.fwd_cache[fwd_chunk_id][0]
        if any(isinstance(out, DTensor) for out in outputs):
            raise TypeError(
                f"stage {self.stage_index} returns a DTensor, but compression is of plain tensors: return .to_local() "
                "and make the DTensor again behind the edge, or use torch's own stages"
            )
        return self._sends("forward", super().get_fwd_send_ops(fwd_chunk_id), fwd_chunk_id)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Torch's method, but the operations send compressed gradients."""
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        if ops and self._how[1].masked and len(ops) != len(self.args_recv_info[bwd_chunk_id]):
            raise ValueError(
                f"stage {self.stage_index}: only {len(ops)} inputs have a gradient, so that masks do not match: "
                "use same_mask=False"
            )
        return self._sends("backward", ops, bwd_chunk_id)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Torch's method, but the operations receive compressed messages."""
        return self._receives("forward", super().get_fwd_recv_ops(fwd_chunk_id), fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Torch's method, but the operations receive compressed messages."""
        return self._receives("backward", super().get_bwd_recv_ops(bwd_chunk_id), bwd_chunk_id)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        self._decode("forward", self.args_recv_info[fwd_chunk_id], fwd_chunk_id)
        return super()._retrieve_recv_activations(fwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        self._decode("backward", self.grad_recv_info[bwd_chunk_id], bwd_chunk_id)
        return super()._retrieve_recv_grads(bwd_chunk_id)

    # -- messages ------------------------------------------------------------------------------------------------------
    def _compresses(self, how: Direction, tensor: torch.Tensor) -> bool:
        there = self.has_backward or self.compress_in_eval
        return there and not how.plain and tensor.is_floating_point() and tensor.numel() > 0

    @torch.no_grad()
    def _sends(self, direction: str, ops: list[dist.P2POp], chunk: int) -> list[dist.P2POp]:
        end = self._ends.get((direction, True))
        for number, op in enumerate(ops):
            assert end is not None
            x = op.tensor
            if self._compresses(end.how, x):
                message, _ = end.send(x.detach(), number, chunk, self._ids_of(end, chunk), self.has_backward)
                # keep the message until the next step: a schedule drops send operations before they complete
                self._owned.append(message)
                op.tensor = message
            else:
                end.count(x.nbytes, x.nbytes)
        return ops

    def _receives(self, direction: str, ops: list[dist.P2POp], chunk: int) -> list[dist.P2POp]:
        end = self._ends.get((direction, False))
        arriving = []
        for number, op in enumerate(ops):
            assert end is not None
            x = op.tensor
            if self._compresses(end.how, x):
                dtype = self._xp.dtype(x)
                ids = self._ids_of(end, chunk)
                size = end.size(self._xp, tuple(x.shape), dtype, number, ids, self.has_backward)
                op.tensor = torch.empty(size, dtype=torch.uint8, device=x.device)
                arriving.append((number, op.tensor))
            else:
                end.count(x.nbytes, x.nbytes)
        self._arriving[direction][chunk] = arriving
        return ops

    @torch.no_grad()
    def _decode(self, direction: str, infos: Any, chunk: int) -> None:
        # Decode into the buffers that torch allocated. Between stages on the same rank no message arrives.
        arrived = self._arriving[direction].pop(chunk, [])
        if not arrived:
            return
        buffers = [info.buffer for info in infos if not info.is_root_arg and info.buffer is not None]
        end = self._ends[direction, False]
        for number, message in arrived:
            buffer = buffers[number]
            value = end.receive(
                message,
                tuple(buffer.shape),
                self._xp.dtype(buffer),
                number,
                chunk,
                self._ids_of(end, chunk),
                self.has_backward,
            )
            buffer.copy_(value.view(buffer.shape))

    def _ids_of(self, end: End, chunk: int) -> Any:
        if end.how.feedback != "aq" or not self.has_backward:
            return None
        return np.array_split(self._ids, len(self.args_recv_info))[chunk]  # split as torch splits a batch

    def _check_ids(self) -> None:
        ids, samples = self._ids, self._how[0].samples
        if ids is None:
            raise ValueError(
                "feedback='aq' needs the ids of each batch's examples: set stage.sample_ids before schedule.step, on "
                "every rank"
            )
        if len(np.unique(ids)) < len(ids):
            raise ValueError("sample_ids has an id twice: draw each example once per batch, or use feedback='none'")
        if len(ids) and not 0 <= ids.min() <= ids.max() < samples:
            raise ValueError(f"sample_ids are 0 .. {samples - 1}, by samples={samples}, but {ids.max()} is among them")

    @property
    def _settings(self) -> str:
        ahead, back = self._how
        words = {
            "GRACE": VERSION,
            "forward": ahead.compressor,
            "backward": "the forward mask" if back.masked else back.compressor,
            "feedback": ahead.feedback,
            "samples": ahead.samples,
            "stored": ahead.stored,
            "seed": ahead.seed,
            "debug": ahead.debug,
            "compress_in_eval": self.compress_in_eval,
        }
        return ", ".join(f"{name} {value}" for name, value in words.items())


def _agree(group: Any) -> None:
    """Compare the settings of all new stages of a group over its ranks, which all get the same result."""
    new = [stage for reference in _STAGES if (stage := reference()) is not None and stage.group is group]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, [(s.stage_index, s.num_stages, s._settings) for s in new], group)
    # A group may have several new pipelines: compare sets of settings.
    settings: dict[int, set[tuple[int, str]]] = defaultdict(set)
    for index, count, text in (each for rank in gathered for each in rank):
        settings[index].add((count, text))
    for stage in new:
        stage._disagreement = _difference(settings)
    _STAGES[:] = [reference for reference in _STAGES if (stage := reference()) is not None and stage not in new]


def _difference(settings: dict[int, set[tuple[int, str]]]) -> str:
    first = min(settings)
    for index, texts in sorted(settings.items()):
        if odd := sorted(settings[first] ^ texts):
            (count, text) = odd[0]
            return (
                f"stages {first} and {index} have other settings: only one of them has {count} stages and {text}. Give "
                "all stages of a pipeline the same arguments"
            )
    if lost := set(range(max(count for count, _ in settings[first]))) - set(settings):
        return f"stage {min(lost)} is no grace.torch.PipelineStage: make all stages of the pipeline such"
    return ""
