"""A task's training in PyTorch: DistributedDataParallel with a hook that averages the gradients; or local training."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import grace.torch
from grace import Grace, grace_from_params
from grace.local import DiLoCo, from_params
from grace_bench.tasks.data import Arrays
from grace_bench.tasks.plan import CHOICE, LIMIT
from grace_bench.tasks.tasks import Scale, Task
from grace_bench.tasks.torch_models import MODELS, loss_of, optimizer_of, predict


class Trainer:
    """One worker's model and its training.

    ``params``: a dictionary of `grace_from_params` or `grace.local.from_params`, or a baseline's name.
    """

    def __init__(self, task: Task, scale: Scale, sizes: dict[str, int], params: dict[str, Any] | str, seed: int):
        torch.set_num_threads(1)
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        self._task, self._counted = task, 0
        self._grace: Grace | None = None
        self._local: DiLoCo | None = None
        self._model = task.builder("torch", MODELS)(**sizes, **scale.model)
        self.tensors = [p.numel() for p in self._model.parameters()]
        momentum = 0.9
        if isinstance(params, dict) and "local" in params:
            self._net, self._local = self._model, from_params(params)
        else:
            self._net = self._ddp(params)
            if self._grace is not None and self._grace.method.memory.includes_momentum:
                momentum = 0.0
        self._optimizer = optimizer_of(task, self._model.parameters(), scale.lr, momentum)
        if self._local is not None:
            named, buffers = self._model.named_parameters(), self._model.named_buffers()
            grace.torch.local(self._optimizer, self._local, named, buffers)

    def _ddp(self, params: dict[str, Any] | str) -> nn.Module:
        if params == LIMIT:
            return self._model
        # Each worker keeps its own BatchNorm statistics: only gradients are sent.
        with warnings.catch_warnings():
            # Newer versions of PyTorch rename broadcast_buffers; older ones lack the new name.
            warnings.simplefilter("ignore", FutureWarning)
            ddp = nn.parallel.DistributedDataParallel(self._model, broadcast_buffers=False)
        if isinstance(params, str):
            ddp.register_comm_hook(None, self._baseline(params))
        else:
            self._grace = grace_from_params(params)
            grace.torch.name_parameters(self._grace, ddp)
            ddp.register_comm_hook(self._grace, grace.torch.ddp_hook)
        return ddp

    def _baseline(self, name: str) -> Any:
        hook: Any = {"dense": default_hooks.allreduce_hook, "fp16": default_hooks.fp16_compress_hook}[name]

        def counted(state: Any, bucket: Any) -> Any:
            self._counted += bucket.buffer().numel() * (2 if name == "fp16" else bucket.buffer().element_size())
            return hook(state, bucket)

        counted.__annotations__.clear()  # DDP checks that annotations are certain types, but here they are strings
        return counted

    def step(self, inputs: Arrays, targets: Any, lr: float) -> None:
        """Train on one batch."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.zero_grad()
        loss_of(self._task, self._net, inputs, targets).backward()
        self._optimizer.step()

    def finish(self) -> None:
        """End the training: workers that trained their own models now get the same one."""
        if self._local is not None:
            self._local.finish()

    def predict(self, inputs: Arrays) -> Any:
        """Return logits, as a NumPy array."""
        return predict(self._model, inputs)

    @property
    def sent(self) -> int:
        """Bytes that this worker has passed to collectives so far."""
        source = self._local or self._grace
        return self._counted if source is None else source.report().bytes_sent

    @property
    def choice(self) -> dict[str, Any]:
        """What method "auto" measured, predicted and chose, by `CHOICE`; empty values for other methods."""
        if self._grace is None:
            return {}
        report = self._grace.report()
        return {key: getattr(report, key) for key in CHOICE}

    def agree(self, number: int) -> int:
        """Return worker 0's number on all workers; also a barrier."""
        value = torch.tensor([number if self.rank == 0 else 0])
        dist.all_reduce(value)
        return int(value)
