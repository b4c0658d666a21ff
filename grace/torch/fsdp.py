"""PyTorch's sharded training: compressed gradients and parameters of models under `fully_shard`, by FSDP2's hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from grace.core import Compressor, name_of
from grace.core.collectives import Reduce
from grace.engine.session import Grace
from grace.torch.parameters import Mode, ParameterGather, parameter_compressor
from grace.torch.watch import Watch

__all__ = ["fsdp"]


def fsdp(
    model: nn.Module,
    grace: Grace | None = None,
    replicas: Grace | None = None,
    parameters: Mapping[str, Any] | Compressor | None = None,
    compress_no_grad: bool = False,
    rollback: str = "keep",
) -> nn.Module:
    """Compress the gradients, the parameters or both that FSDP sends for a `fully_shard` model. Returns the model.

    ``grace``: for the reduce-scatter among the workers that shard the parameters; it needs communicator "reducescatter"
    and the transport of these workers. The parameters of one `fully_shard` call, which FSDP reduces together, form one
    tensor [workers, elements of a shard], whose rows are compressed separately. Error feedback takes 8 bytes per
    unsharded element and worker: the residual, and its copy from before an exchange that may be discarded.
    ``rollback``: "keep", or "drop" to keep no second residual: then a discarded exchange loses the feedback of its
    tensors, which the report notes.
    ``replicas``: for hybrid sharding, averages each shard over its copies: shard over a mesh of one dimension, and
    use the transport of the other dimension's group. It accepts any communicator except "reducescatter". If you
    compress only one of the two, compress this average, because links between machines are slow.

    ``parameters``: for the all-gather before forward and backward passes: a compressor, or a dictionary such as
    ``{"compressor": "blockint", "bits": 8, "block_size": 1024}``. Needs ``grace`` or ``replicas``; a Grace of
    ``{"compressor": "none", "communicator": "reducescatter"}`` leaves gradients exact. The compressor must be
    stateless, have payloads of fixed length and lose at most 20 % of the norm of normally distributed values. Every
    worker computes with the decoded values, also of its own shard; the optimizer and checkpoints keep exact shards, so
    errors do not add up. Each parameter is compressed separately; vectors are sent exactly. Gathers are exact for
    dtypes other than float32, float16 and bfloat16, and among the fewer workers of ``reshard_after_forward=int``.
    Stochastic rounding draws the same numbers in the forward and backward passes of a step. `Report.parameters` counts
    the bytes.
    ``compress_no_grad``: compress parameters in forward passes under `torch.no_grad`, too, which by default use exact
    values.
    Markov, Vladu, Guo and Alistarh, "Quantized Distributed Training of Large Models with Convergence Guarantees", ICML
    2023, arXiv:2302.02390.

    A parameter's means are applied when an optimizer that holds the parameter steps with them as its gradient, and this
    step changes a parameter or the state of the optimizer. Manual clamping, decay or averaging does not count as a
    step. A step decides only for the parameters of its own optimizer. If no optimizer has stepped a parameter yet, its
    means are applied when its weights are written, or when an optimizer over copies of the parameter steps. Means that
    were removed, zeroed or replaced earlier are discarded, which restores the state from before the exchange. A pass
    that adds to undecided means is applied or discarded with them. If the outcome is unknown, means count as applied,
    with one warning; `Grace.commit` and `Grace.discard` decide explicitly. The parameters of one `fully_shard` call
    share a decision. For passes without an exchange call FSDP's ``set_requires_gradient_sync(False)``; inside
    `Grace.no_sync` a backward pass raises RuntimeError.

    Both of FSDP's reductions, mean and sum, are supported (as is its scaling for fp16); they are computed in float32.
    Every worker must make this call, after `fully_shard` and before the first backward pass; with ``parameters``,
    after moving the model to its device. Raises TypeError for a model without FSDP2 modules, ValueError for an
    unsuitable Grace or compressor, and for different ``parameters`` on different workers; in the first forward pass
    RuntimeError if FSDP does not gather through GRACE.

    Parameters may be unused in a step, on some or all workers: a missing gradient counts as zeros. If no worker has
    one, ``p.grad`` stays as it is, except with error feedback, where it may receive residuals of earlier steps. At the
    end of each backward pass the workers compare which parameters they used; this takes 4 bytes per parameter, which
    the report does not count.
    Parameters unfrozen later form another tensor, with a "+" in its name; before loading a checkpoint that has such a
    tensor, unfreeze them and run one backward pass. Raises RuntimeError, on all workers, if only some workers used a
    parameter and gradients are reduced in float16.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"a model is needed, not {type(model).__name__}: grace.torch.fsdp(model, grace=grc)")
    for each in (grace, replicas):
        if each is not None and not isinstance(each, Grace):
            raise TypeError(
                f"a Grace is needed, not {type(each).__name__}: make one with grace_from_params({{'compressor': ..., "
                "'communicator': 'reducescatter'})"
            )
    calls = _calls(model)
    if not calls:
        raise TypeError("the model has no FSDP2 module: call torch.distributed.fsdp.fully_shard on it first")
    if grace is None and replicas is None:
        raise ValueError(
            "give a Grace for the reduce-scatter (grace=), for copies of shards (replicas=), or both; compressor "
            "'none' leaves gradients exact"
        )
    compressor = None if parameters is None else parameter_compressor(parameters)
    if grace is not None and not grace.communicator.reduce_scatters:
        raise ValueError(
            f"grace= has communicator {name_of(grace.communicator)!r}, but each worker wants its own shard: use "
            "communicator 'reducescatter'"
        )
    if replicas is not None and replicas.communicator.reduce_scatters:
        raise ValueError("replicas= wants the whole mean on all workers: leave its communicator out")
    if rollback not in ("keep", "drop"):
        raise ValueError(f'rollback={rollback!r} must be "keep" or "drop"')
    exchanges = []
    if grace is not None:
        exchanges.append(grace)
    if replicas is not None:
        exchanges.append(replicas)
    managed = {name or "(root)": list(_managed(modules)) for name, modules in calls.items()}
    for name, places in managed.items() if compressor is not None else ():
        if any(p.device.type == "meta" for _, _, p in places):
            raise ValueError(
                f"the parameters of {name!r} are on the meta device: call model.to_empty(device=...) and initialise "
                "them before grace.torch.fsdp"
            )
    step = _Step(exchanges, rollback == "keep")
    groups = [_Group(name, found, step) for name, found in managed.items()]
    for group, modules in zip(groups, calls.values(), strict=True):
        group.extend()
        for module in modules:
            module.register_forward_pre_hook(group.watch)
        if group.managed and all(p.device.type != "meta" for _, _, p in group.managed):
            # Methods registered by `register_fsdp_forward_method` do not run the module's hooks.
            modules[0].unshard()
            group.watch(modules[0], ())
            modules[0].reshard()
    if compressor is not None:
        firsts = [first for first, *_ in calls.values()]
        gathers = _gathers(firsts, managed, compressor, exchanges[0], None if compress_no_grad else Mode())
        exchanges[0].report_parameters(lambda: [gather.report() for gather in gathers])
    for group, (module, *_) in zip(groups, calls.values(), strict=True):
        if group.managed and grace is not None:
            module.set_custom_reduce_scatter(_ReduceScatter(group, grace))
        if group.managed and replicas is not None:
            module.set_all_reduce_hook(_Replicas(group, replicas))
    for each in exchanges:
        settings = each.transport.exchange(f"{compressor!r}, compress_no_grad={compress_no_grad}")
        for worker, other in enumerate(settings):
            if other != settings[0]:
                raise ValueError(
                    f"parameters= must be the same on all workers: worker 0 has {settings[0]}, worker {worker} has "
                    f"{other}"
                )
    return model


def _gathers(
    modules: Iterable[nn.Module], managed: dict[str, Any], compressor: Compressor, grace: Grace, mode: Mode | None
) -> list[ParameterGather]:
    found = []
    for module, (name, places) in zip(modules, managed.items(), strict=True):
        if places:
            rows = [(p, _row(p)) for _, _, p in places]
            found.append(ParameterGather(name, module, rows, compressor, grace))
            found[-1].mode = mode
    return found


def _calls(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    # The modules of each `fully_shard` call, by the name of the first; a call may shard several together.
    named = {module: name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    calls = [tuple(getattr(module._get_fsdp_state(), "_modules", (module,))) for module in named]
    return {named[call[0]]: call for call in calls}


def _managed(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, Any]]:
    # (owner module, attribute name, parameter) of the parameters that FSDP reduces with these modules, in FSDP's order
    # (children first), without those of nested modules that are sharded separately.
    found: set[Any] = set()
    visited: set[nn.Module] = set()

    def visit(owner: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
        visited.add(owner)
        for child in owner.children():
            if child not in visited and not isinstance(child, FSDPModule):
                yield from visit(child)
        for name, p in owner.named_parameters(recurse=False):
            if isinstance(p, DTensor) and p not in found:
                found.add(p)
                yield owner, name, p

    return (place for module in modules if module not in visited for place in visit(module))


def _row(p: Any) -> int:
    # Number of elements of one worker's padded shard of a parameter.
    if len(p.placements) != 1:
        raise TypeError(
            f"a parameter of shape {list(p.shape)} is placed as {p.placements}: shard over a mesh of one dimension, "
            "such as mesh['shards'], and give replicas= for the other"
        )
    (place,) = p.placements
    if not isinstance(place, Shard):
        raise TypeError(f"a parameter of shape {list(p.shape)} is placed as {place}: only shards are reduced")
    size = p.shape[place.dim]
    return -(-size // p.device_mesh.size()) * (p.numel() // size if size else 0)


class _Step:
    """The current backward pass over all groups; its end is also the end of each Grace's step."""

    def __init__(self, graces: list[Grace], keeps_base: bool):
        self.graces = graces
        self.members: dict[str, list[torch.Tensor]] = {}
        """For each Grace tensor, its parameters, sharded."""
        self._watches = [Watch(each, self.members, agree=partial(_sums, each)) for each in graces]
        for each in graces:
            each.defer_commit, each.setup.keeps_base = True, keeps_base
        self._task: int | None = None
        self._groups: list[_Group] = []

    def joined(self, group: _Group) -> None:
        """Register that a group is reduced in the current pass."""
        if any(grace.paused for grace in self.graces):
            raise RuntimeError(
                "Grace.no_sync cannot keep FSDP from reducing gradients: call model.set_requires_gradient_sync(False) "
                "before the pass, and (True) after it"
            )
        task = torch._C._current_graph_task_id()
        if task != self._task:
            if self._groups:  # the last pass failed
                for grace in self.graces:
                    grace.abandon()
            self._task, self._groups = task, []
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
            for watch, grace in zip(self._watches, self.graces, strict=True):
                watch.settle()
                grace.tune()
        if group not in self._groups:
            group.late.clear()
            self._groups.append(group)

    def _end(self) -> None:
        groups, self._task, self._groups = self._groups, None, []
        for group in groups:
            group.used.clear()
        flags = [float(i in group.present) for group in groups for i in group.laid]
        counts = torch.tensor(flags, device=groups[0].example.device)
        for grace in self.graces:
            (found,) = grace.transport.start([Reduce((counts,), "sum")], "used")()
            counts = found[0]
        size = math.prod(grace.world_size for grace in self.graces)
        feedback = any(grace.method.memory.feedback for grace in self.graces)
        at = 0
        for group in groups:
            if group.late or group.summed:  # else skip, as reading counts waits for the device
                group.settle(counts[at : at + len(group.laid)].tolist(), feedback, size)
            at += len(group.laid)
        names = [name for group in groups for name in group.tensors]
        for grace, watch in zip(self.graces, self._watches, strict=True):
            grace.land()
            watch.exchanged(names)


def _sums(grace: Grace, numbers: list[Any]) -> Callable[[], list[float]]:
    # Sum numbers over the workers; return a function that returns the sums, and waits for a device that holds them.
    mine = torch.stack([grace.xp.cast(torch.as_tensor(each), "float32") for each in numbers])
    ((found,),) = grace.transport.start([Reduce((grace.xp.asarray(mine, "float32"),), "sum")], "applied")()
    fetched = grace.xp.buffers.fetch(found)
    return lambda: list(fetched().tolist())


class _Group:
    """The parameters of one `fully_shard` call, which FSDP reduces together: one Grace tensor or several."""

    def __init__(self, name: str, managed: list[tuple[nn.Module, str, Any]], step: _Step):
        self.name, self.managed, self._step = name, managed, step
        example = managed[0][2].to_local() if managed else torch.zeros(())
        self.example = torch.zeros((), dtype=torch.promote_types(example.dtype, torch.float32), device=example.device)
        self.sizes = [_row(p) if p.requires_grad else 0 for _, _, p in managed]
        self.tensors: dict[str, list[int]] = {}
        """For each Grace tensor, the indices of its parameters in the group."""
        self.used: set[int] = set()  # indices of parameters with a gradient since the last reduction
        self.present: list[int] = []  # indices of parameters whose gradients are being reduced
        self.late: dict[int, torch.Tensor] = {}  # this worker's shards of the means of parameters not in `present`
        self.summed = False  # whether FSDP reduces scaled sums, as for float16
        self._watched: dict[int, Any] = {}

    @property
    def laid(self) -> list[int]:
        """Indices of all parameters in Grace tensors."""
        return [i for places in self.tensors.values() for i in places]

    def extend(self) -> None:
        """Build a Grace tensor for parameters that have begun to require gradients."""
        known = set(self.laid)
        new = [i for i, (_, _, p) in enumerate(self.managed) if p.requires_grad and i not in known]
        if not new:
            return
        for i in new:
            self.sizes[i] = _row(self.managed[i][2])
        name = f"{self.name}+{len(self.tensors)}" if self.tensors else self.name
        self.tensors[name] = new
        self._step.members[name] = [self.managed[i][2] for i in new]
        row = sum(self.sizes[i] for i in new)
        for grace in self._step.graces:
            size = (grace.world_size,) if grace.communicator.reduce_scatters else ()
            grace.build({name: self.example.expand(*size, row)})  # only shapes count

    def watch(self, module: nn.Module, inputs: Any) -> None:
        """Before each forward pass: hook the unsharded parameters, to record in `used` which get gradients."""
        for i, (owner, name, _) in enumerate(self.managed):
            p = getattr(owner, name)
            if p.requires_grad and self._watched.get(i) is not p and not isinstance(p, DTensor):
                self._watched[i] = p
                p.register_post_accumulate_grad_hook(lambda _, i=i: self.used.add(i))

    def reduce(self, grace: Grace, x: torch.Tensor) -> torch.Tensor:
        """Return means [k] of this worker's shards from concatenated gradients [..., k] of parameters that have one."""
        self._step.joined(self)
        self.extend()
        self.present = self._present(x.shape[-1])
        whole = [places for places in self.tensors.values() if places == self.present]
        if whole and len(self.tensors) == 1:
            return self._means(grace, {self.name: x})[self.name]
        ends = list(accumulate((self.sizes[i] for i in self.present), initial=0))
        parts = {i: x[..., a:b] for i, (a, b) in zip(self.present, pairwise(ends), strict=True)}
        given = {}
        for name, places in self.tensors.items():
            lead = x.shape[:-1]
            filled = [parts[i] if i in parts else self._missing(i, lead, x) for i in places]
            given[name] = torch.cat(filled, -1)
        means: dict[int, torch.Tensor] = {}
        for name, mean in self._means(grace, given).items():
            means.update(zip(self.tensors[name], mean.split([self.sizes[i] for i in self.tensors[name]]), strict=True))
        self.late = {i: mean for i, mean in means.items() if i not in parts}
        return torch.cat([means[i] for i in self.present])

    def _missing(self, i: int, lead: Any, x: torch.Tensor) -> torch.Tensor:
        if i in self.late and not lead:  # the mean over the shard group, still to be averaged over the copies
            return self.late[i].to(x.dtype)
        return x.new_zeros((*lead, self.sizes[i]))

    def _means(self, grace: Grace, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        grace.launch(given, spent=True)
        grace.land(last=False)
        found = {name: grace.mean(name) for name in given}
        return {name: mean for name, mean in found.items() if mean is not None}

    def _present(self, n: int) -> list[int]:
        # Indices of the parameters that FSDP passes: those with a gradient, or all trained ones, depending on n.
        for places in (sorted(self.laid), sorted(self.used), [i for i in sorted(self.laid) if self._trained(i)]):
            if sum(self.sizes[i] for i in places) == n:
                return places
        raise RuntimeError(
            f"FSDP reduces {n} elements for each worker of {self.name!r}, but these are not those of known parameters: "
            "call the module itself, not a method of it, and keep its parameters"
        )

    def _trained(self, i: int) -> bool:
        return bool(self.managed[i][2].requires_grad)

    def settle(self, counts: list[float], feedback: bool, size: int) -> None:
        """Set the gradients of parameters that only other workers used.

        ``counts``: for each parameter in `laid`, how many of all ``size`` workers used it.
        """
        count = dict(zip(self.laid, counts, strict=True))
        late, self.late = self.late, {}
        if self.summed and any(0 < each < size for each in count.values()):
            raise RuntimeError(
                f"some workers have not used all parameters of {self.name!r} in this step, and gradients are reduced "
                "in float16: call model.set_reduce_scatter_unused_params(True), or reduce in bfloat16 or float32"
            )
        for i, mean in late.items():
            p = self.managed[i][2]
            if not count[i] and not feedback:
                continue
            local = p.to_local()
            part = mean[: local.numel()].reshape(local.shape).to(local.dtype)
            if p.grad is None:
                p.grad = DTensor.from_local(
                    part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
                )
            else:
                p.grad.to_local().add_(part)


class _ReduceScatter:
    """FSDP's reduce-scatter (`torch.distributed.fsdp.FSDPModule.set_custom_reduce_scatter`)."""

    def __init__(self, group: _Group, grace: Grace):
        self._group, self._grace = group, grace

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        size = dist.get_world_size(group)
        if size != self._grace.world_size:
            raise ValueError(
                f"the shards of {self._group.name!r} lie on {size} workers, but grace has {self._grace.world_size}: "
                "make it with transport=TorchDistributedTransport(mesh.get_group())"
            )
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ValueError(
                "FSDP asks for neither mean nor sum: leave set_gradient_divide_factor alone and scale the loss"
            )
        self._group.late, self._group.summed = {}, op == dist.ReduceOp.SUM
        mean = self._group.reduce(self._grace, input_tensor.reshape(size, -1))
        if op == dist.ReduceOp.SUM:
            mean = mean * size
        output_tensor.copy_(mean.reshape(output_tensor.shape))


class _Replicas:
    """FSDP's all-reduce of a shard over its copies (`torch.distributed.fsdp.FSDPModule.set_all_reduce_hook`)."""

    def __init__(self, group: _Group, grace: Grace):
        self._group, self._grace = group, grace

    def __call__(self, reduce_output: torch.Tensor) -> None:
        if reduce_output.dtype == torch.float16:
            self._group.summed = True
        reduce_output.copy_(self._group.reduce(self._grace, reduce_output.reshape(-1).clone()))
