"""Trainings through each integration and in loops of many kinds on a device, compared with plain ones on the CPU.

The loss is linear in the parameters, so its gradients have the same bits on every device and in every loop: any
difference comes from GRACE.
"""

from __future__ import annotations

import importlib.util
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import grace
from grace.factory import grace_from_params
from grace_bench.processes import Measurement

STEPS = 6
TOLERANCE = 1e-3
"""Largest difference of parameters in units of their change, by the 2-norm: sums may have another order."""
SHAPES = ((512, 300), (300,), (64, 3, 3, 3), (7,))
METHODS: dict[str, dict[str, Any]] = {
    "none": {"compressor": "none"},
    "fp16": {"compressor": "fp16"},
    "blockint, 4 bits": {"compressor": "blockint", "bits": 4},
    "blockint, 8 bits, stochastic": {"compressor": "blockint", "bits": 8, "rounding": "stochastic"},
    "eden, 2 bits": {"compressor": "eden", "bits": 2},
    "efsignsgd": {"compressor": "efsignsgd", "block_size": 512},
    "qsgd": {"compressor": "qsgd"},
    "topk, 1 %": {"compressor": "topk", "compress_ratio": 0.01},
    "dgc, 1 %": {"compressor": "dgc", "compress_ratio": 0.01, "memory": "dgc"},
    "powersgd, rank 4": {"compressor": "powersgd", "compress_rank": 4},
}
SHARDED = ("none", "blockint, 4 bits", "efsignsgd", "topk, 1 %")
FEW = ("none", "blockint, 4 bits", "eden, 2 bits")
"""The methods of loops that differ outside of GRACE."""


class Linear(torch.nn.Module):
    """Parameters w; the loss is the sum of w * x, whose gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        numbers = torch.Generator().manual_seed(0)
        self.weights = torch.nn.ParameterList([torch.randn(shape, generator=numbers) for shape in SHAPES])

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        """The loss, a scalar."""
        return torch.stack([(w * x).sum() for w, x in zip(self.weights, xs, strict=True)]).sum()


class Products(Linear):
    """`Linear` by matrix products, which autocast computes in bfloat16: the gradient is x, rounded."""

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        """The loss, a scalar."""
        pairs = zip(self.weights, xs, strict=True)
        return sum(torch.nn.functional.linear(x.reshape(1, -1), w.reshape(1, -1)).float().sum() for w, x in pairs)


class Checkpointed(Linear):
    """`Linear` whose products are computed again in the backward pass."""

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        """The loss, a scalar."""
        return torch.utils.checkpoint.checkpoint(super().forward, *xs, use_reentrant=False)


def _inputs(device: str, dtype: torch.dtype = torch.float32) -> Iterator[list[torch.Tensor]]:
    for step in range(STEPS):
        numbers = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        yield [torch.randn(shape, generator=numbers).to(device, dtype) for shape in SHAPES]


def _hooked(model: torch.nn.Module, params: dict[str, Any]) -> Any:
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    grc = grace_from_params(params, "torch")
    grace.torch.name_parameters(grc, ddp)
    ddp.register_comm_hook(grc, grace.torch.ddp_hook)
    return ddp


def _trained(
    model: Any, xs: Iterator[list[torch.Tensor]], loss: Callable[..., torch.Tensor] | None = None, passes: int = 2
) -> list[torch.Tensor]:
    # Train with DistributedDataParallel, micro-batches and clipping. ``loss``: the compiled model, or under autocast.
    loss = model if loss is None else loss
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for each in xs:
        for number in range(passes):
            with nullcontext() if number == passes - 1 else model.no_sync():
                loss(*each).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        optimizer.step()
        optimizer.zero_grad()
    return _whole(model)


def ddp(device: str, params: dict[str, Any]) -> list[torch.Tensor]:
    """DistributedDataParallel with the hook, two micro-batches per step, clipping."""
    return _trained(_hooked(Linear().to(device), params), _inputs(device))


def autocast(device: str, params: dict[str, Any]) -> list[torch.Tensor]:
    """`ddp` with products in bfloat16."""
    model = _hooked(Products().to(device), params)

    def loss(*xs: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            found: torch.Tensor = model(*xs)
        return found

    return _trained(model, _inputs(device), loss)


def rounded(device: str, params: dict[str, Any]) -> list[torch.Tensor]:
    """`ddp` with the gradients of `autocast`."""
    xs = ([x.bfloat16().float() for x in each] for each in _inputs(device))
    return _trained(_hooked(Linear().to(device), params), xs)


def compiled(device: str, params: dict[str, Any]) -> list[torch.Tensor]:
    """`ddp` with a compiled model; on a CPU without code generation."""
    model = _hooked(Linear().to(device), params)
    loss = torch.compile(model, backend="aot_eager" if device == "cpu" else "inductor")
    return _trained(model, _inputs(device), loss)


def checkpointed(device: str, params: dict[str, Any]) -> list[torch.Tensor]:
    """`ddp` with checkpoints of activations in both micro-batches."""
    return _trained(_hooked(Checkpointed().to(device), params), _inputs(device))


def bf16(device: str, params: dict[str, Any]) -> list[torch.Tensor]:
    """`ddp` with parameters in bfloat16."""
    return _trained(_hooked(Linear().to(device, torch.bfloat16), params), _inputs(device, torch.bfloat16))


def channels_last(device: str, params: dict[str, Any]) -> list[torch.Tensor]:
    """`ddp` with the weights of convolutions in another order in memory."""
    model = Linear().to(device, memory_format=torch.channels_last)
    return _trained(_hooked(model, params), _inputs(device))


def side_stream(device: str, params: dict[str, Any]) -> list[torch.Tensor]:
    """`ddp` on a CUDA stream of the user."""
    if device == "cpu":
        return ddp(device, params)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = ddp(device, params)
    torch.cuda.current_stream().wait_stream(stream)
    return found


def single(device: str, params: dict[str, Any]) -> list[torch.Tensor]:
    """`ddp` with one pass per step."""
    return _trained(_hooked(Linear().to(device), params), _inputs(device), passes=1)


def trainer(device: str, params: dict[str, Any]) -> list[torch.Tensor]:
    """`single` by transformers.Trainer."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = Linear()

        def forward(self, **xs: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.linear(*(xs[f"x{number}"][0] for number in range(len(SHAPES))))}

    class InOrder(Trainer):  # type: ignore[misc, unused-ignore]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    rank, size = dist.get_rank(), dist.get_world_size()
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    os.environ |= {name: str(place) for name, place in places.items()}  # as torchrun; the process group is there
    rows: list[Any] = [None] * size
    dist.all_gather_object(rows, [[x.numpy() for x in each] for each in _inputs("cpu")])
    data = [{f"x{number}": torch.from_numpy(x) for number, x in enumerate(rows[w][step])}
            for step in range(STEPS) for w in range(size)]  # fmt: skip
    model = Loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {"per_device_train_batch_size": 1, "max_steps": STEPS, "max_grad_norm": 1e6}
        settings |= {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
        arguments = TrainingArguments(folder, use_cpu=device == "cpu", remove_unused_columns=False, **settings)
        training = InOrder(model, arguments, train_dataset=data, optimizers=(optimizer, constant))
        training.remove_callback(PrinterCallback)  # keeps the Trainer's log out of the command's output
        grace.torch.trainer(training, params)
        training.train()
    return _whole(model.linear)


def scaled(device: str, params: dict[str, Any]) -> list[torch.Tensor]:
    """The wrapped optimizer with a GradScaler, an overflow on one worker, and a checkpoint in the middle."""
    model = Linear().to(device)

    def wrap() -> Any:
        grc = grace_from_params(params, "torch")
        inner = torch.optim.SGD(model.parameters(), lr=0.25)
        return grc, grace.torch.DistributedOptimizer(inner, grc, named_parameters=model.named_parameters())

    grc, optimizer = wrap()
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    for step, xs in enumerate(_inputs(device)):
        if step == 2 and dist.get_rank() == 0:
            xs[1][3] = torch.inf
        if step == 4:
            state, inner = grc.state_dict(), optimizer.state_dict()
            grc, optimizer = wrap()
            grc.load_state_dict(state)
            optimizer.load_state_dict(inner)
        optimizer.zero_grad()
        scaler.scale(model(*xs)).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    return _whole(model)


def fsdp(device: str, params: dict[str, Any]) -> list[torch.Tensor]:
    """FSDP2 with a compressed reduce-scatter of gradients and 8-bit gathers of parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Linear().to(device)
    fully_shard(model, mesh=init_device_mesh(device, (dist.get_world_size(),)))
    grc = grace_from_params({**params, "communicator": "reducescatter"}, "torch")
    grace.torch.fsdp(model, grace=grc, parameters={"compressor": "blockint", "bits": 8})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for xs in _inputs(device):
        optimizer.zero_grad()
        model(*xs).backward()
        optimizer.step()
    return _whole(model)


Train = Callable[[str, dict[str, Any]], list[torch.Tensor]]


class Loop(NamedTuple):
    """A kind of training."""

    train: Train
    """Trains on a device with a Grace's parameters; returns the parameters of the model."""
    expected: Train
    """The training on the CPU that has to end equally."""
    methods: tuple[str, ...] = FEW


LOOPS = {
    "ddp": Loop(ddp, ddp, tuple(METHODS)),
    "scaled": Loop(scaled, scaled, tuple(METHODS)),
    "autocast": Loop(autocast, rounded),
    "checkpointed": Loop(checkpointed, ddp),
    "bf16": Loop(bf16, bf16),
    "channels_last": Loop(channels_last, channels_last),  # the blocks of both runs follow the order in memory
    "side stream": Loop(side_stream, ddp),
    "compiled": Loop(compiled, ddp),
    "fsdp": Loop(fsdp, fsdp, SHARDED),
    "trainer": Loop(trainer, single),
}
"""At the end those that may stop the processes: FSDP2 over gloo on a device with some versions of PyTorch, and Trainer,
which sets up the process its own way."""


def absent(loop: str, device: str, size: int) -> str:
    """Why a loop cannot run here; empty if it can."""
    if loop != "trainer":
        return ""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    return "Trainer gives each process a GPU of its own" if device != "cpu" and size > 1 else ""


def methods_of(loop: str, quick: bool) -> tuple[str, ...]:
    """The methods of a loop."""
    return tuple(name for name in LOOPS[loop].methods if not quick or name in SHARDED)


def measurements(device: str, quick: bool) -> Iterator[Measurement]:
    """All loops that can run here; ``quick``: with the methods of `SHARDED` only."""
    for loop in LOOPS:
        if not absent(loop, device, dist.get_world_size()):
            for method in methods_of(loop, quick):
                yield f"{loop}, {method}", partial(_row, loop, method, device)


def _row(loop: str, method: str, device: str) -> dict[str, Any]:
    differences: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(differences, compare(loop, method, device))
    largest = max(differences, key=lambda each: (math.isnan(each), each))
    return {"loop": loop, "method": method, "difference": largest}


def compare(loop: str, method: str, device: str) -> float:
    """Train on the CPU and on ``device``: the difference of the parameters relative to their change; may be NaN."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "gradients were exchanged and then thrown away")
        expected = LOOPS[loop].expected("cpu", METHODS[method])
        found = LOOPS[loop].train(device, METHODS[method])
    start = [w.detach() for w in Linear().weights]
    difference = _norm([a - b for a, b in zip(found, expected, strict=True)])
    return difference / _norm([a - b for a, b in zip(expected, start, strict=True)])


def _whole(model: torch.nn.Module) -> list[torch.Tensor]:
    # The shards travel as CPU tensors: `DTensor.full_tensor` on a device ends the process over gloo (PyTorch 2.11).
    found = []
    for p in model.parameters():
        parts = [(p.to_local() if isinstance(p, DTensor) else p).detach().cpu()]
        if isinstance(p, DTensor):
            own, parts = parts[0], [None] * dist.get_world_size()
            dist.all_gather_object(parts, own)
        found.append(torch.cat(parts))
    return found


def _norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.cat([each.double().flatten() for each in tensors]).norm())
