"""FSDP2's all-gather of parameters, compressed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from grace.backends import backend_of, get_backend
from grace.core import Combine, Compressor, Context, Payload, name_of
from grace.core.collectives import Gather
from grace.core.program import run_local
from grace.core.registry import compressors, memories, take, unknown_key
from grace.engine.codecs import TensorCodec
from grace.engine.groups.exchanges import FLOAT, addresses
from grace.engine.groups.native import Decoder, Encoder, Message, Point
from grace.engine.groups.recipes import recipe
from grace.engine.report import TensorReport
from grace.engine.session import Grace
from grace.kernels import Library
from grace.kernels.host import HostKernels
from grace.transports.torch_distributed import ALL_GATHER, TorchDistributedTransport

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
"""Dtypes whose gathers are compressed, with their names in a `Context`."""
LARGEST_ERROR = 0.2
"""Largest accepted |x - x̂| / |x| for normally distributed x. blockint has 0.14 with 4 bits, 0.82 with 2 bits."""
USE = "use {'compressor': 'blockint', 'bits': 8, 'block_size': 1024}"


def parameter_compressor(given: Any) -> Compressor:
    """The compressor for `fsdp`'s argument ``parameters``. TypeError for other types, ValueError if unsuitable."""
    if isinstance(given, Compressor):
        compressor = given
    elif isinstance(given, Mapping):
        rest = dict(given)
        if (memory := rest.pop("memory", "none")) != "none":
            raise ValueError(
                f"parameters= has memory {memory!r}, but shards stay exact, so there is no error to feed back: leave "
                "memory out"
            )
        compressor = take(compressors, rest.pop("compressor", "none"), rest)
        if rest:
            raise ValueError(f"parameters=: {unknown_key(next(iter(rest)), compressor)}")
    else:
        raise TypeError(f"parameters= is a dictionary or a compressor, not {type(given).__name__}: {USE}")
    if reason := _unsuitable(compressor):
        raise ValueError(f"compressor {name_of(compressor)!r} does not suit parameters: {reason}. Instead, {USE}")
    return compressor


def _unsuitable(compressor: Compressor) -> str:
    # Returns why a compressor cannot compress parameters; empty if it can.
    traits = compressor.traits
    if traits.combine is Combine.AGREED:
        return "all workers agree on one payload, but each sends its own shard"
    if traits.majority_vote:
        return "its result is a majority vote"
    if traits.variable_length:
        return "the length of its payload depends on the values"
    if traits.needs_shape:
        return "it compresses matrices, but a shard is a vector"
    xp = get_backend("torch", "cpu")
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    ctx = Context(xp, "parameters", x.shape)
    if compressor.init(ctx):
        return "it keeps state between steps"
    try:
        payload, _ = run_local(compressor.compress(xp.asarray(x.copy(), "float32"), {}, ctx), compressor)
    except ValueError:
        return "workers agree on a scale inside it, but each sends its own shard"
    error = np.linalg.norm(x - xp.to_numpy(compressor.decompress(payload, ctx))) / np.linalg.norm(x)
    if error > LARGEST_ERROR:
        return f"it loses {error:.0%} of the norm of normal values, and no later step sends that"
    return ""


Part = tuple[slice, Callable[..., Context] | None]
"""A parameter's slice of a flat shard, and a function that makes a worker's context; None: it is not compressed."""


class Together:
    """A group of parameters: one call of native kernels encodes them, another decodes those of all workers."""

    def __init__(self, library: Library, points: Sequence[Sequence[Point]], places: Sequence[slice], rank: int):
        """``points``: each worker's shards of the parameters; ``places``: their slices of a worker's flat shard."""
        xp, workers = points[0][0].ctx.xp, len(points)
        self._xp, self._places, self._message = xp, places, Message(points[rank])
        self._starts = FLOAT * np.array([place.start for place in places], np.int64)
        self._encoder = Encoder(library, points[rank], self._message, xp.threads)
        at = {array: np.tile(starts, workers) for array, starts in self._message.places.items()}
        senders = np.repeat(np.arange(workers), len(places))[:, None]
        self._decoder = Decoder(library, [point for each in points for point in each], at, senders, xp.threads)

    @classmethod
    def of(cls, parts: Sequence[Part], compressor: Compressor, xp: Any, rank: int, workers: int) -> Together | None:
        """The group of these parts; None if native kernels cannot encode them all."""
        points: list[list[Point]] = [[] for _ in range(workers)]
        for _, of_worker in parts:
            for worker, mine in enumerate(points):
                ctx = cast(Any, of_worker)(rank=worker)
                if (found := recipe(compressor, ctx)) is None or found.coded is not None:
                    return None
                mine.append(Point(ctx, found))
        return cls(xp.kernels.library, points, [place for place, _ in parts], rank) if parts else None

    def encode(self, x: torch.Tensor, step: int) -> Payload:
        """Encode this worker's message. x: the worker's shards of all parameters."""
        values, message = x.float(), torch.empty(self._message.size, dtype=torch.uint8)
        self._encoder.encode(values.data_ptr() + self._starts, 0, 0, message.data_ptr(), step)
        return (message,)

    def decode(self, messages: Sequence[Payload], rows: torch.Tensor, step: int) -> None:
        """Write the parameters of each worker to its row of ``rows``."""
        values = rows if rows.dtype == torch.float32 else torch.empty(rows.shape)
        starts = values.data_ptr() + FLOAT * values.shape[1] * np.arange(len(rows))[:, None] + self._starts
        self._decoder.mean(addresses(self._xp, messages), starts.reshape(-1), step)
        for place in self._places if values is not rows else ():
            rows[:, place] = values[:, place]


class Mode:
    """Whether the latest forward pass of a model records gradients."""

    gradients = True


class ParameterGather:
    """FSDP's all-gather (`torch.distributed.fsdp.FSDPModule.set_custom_all_gather`) of one module's parameters.

    Each worker compresses its shard of each parameter separately, and decodes the shards of all workers, its own
    included, so that all workers compute with the same values. Vectors (biases, norms) are sent as they are.
    """

    def __init__(
        self, name: str, module: nn.Module, parameters: list[tuple[Any, int]], compressor: Compressor, grace: Grace
    ):
        """``parameters``: pairs of a parameter and its padded shard's number of elements, in FSDP's order."""
        self._name, self._compressor, self._grace = name, compressor, grace
        self._method = TensorCodec(compressor, memories["none"]())
        self._parameters, self._workers = parameters, parameters[0][0].device_mesh.size()
        self._transports: dict[Any, TorchDistributedTransport] = {}
        self._layouts: dict[Any, tuple[list[Part], Together | None]] = {}
        self.mode: Mode | None = None
        """If set, gathers are exact in forward passes without gradients; if None, these gathers are compressed, too."""
        self._gathers, self._sent, self._plain = 0, 0, 0
        self._exact: dict[str, int] = {}
        try:
            cast(FSDPModule, module).set_custom_all_gather(cast(Any, self))
        except ValueError as error:  # several groups of parameters
            raise ValueError(
                f"the parameters of {name!r} are sharded over several meshes (shard_placement_fn), so one gather "
                "cannot stand for them: leave parameters= out, or shard them over one mesh"
            ) from error
        cast(FSDPModule, module).reshard()  # so that the next forward pass gathers
        module.register_forward_pre_hook(self._entered, prepend=True)
        module.register_forward_pre_hook(self._unsharded)

    def _entered(self, module: nn.Module, inputs: Any) -> None:
        if self.mode is not None:
            self.mode.gradients = torch.is_grad_enabled()

    def _unsharded(self, module: nn.Module, inputs: Any) -> None:
        # FSDP's own hook has already run, and should have gathered.
        if not self._gathers and self._workers > 1:
            raise RuntimeError(
                f"FSDP gathered the parameters of {self._name!r} without compression: something replaced the hook of "
                "grace.torch.fsdp. Call it last, after all other set_... calls"
            )

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self._gathers += 1
        self._plain += input_tensor.nbytes
        if reason := self._as_it_is(input_tensor, group):
            self._exact[reason] = self._exact.get(reason, 0) + 1
            self._sent += input_tensor.nbytes
            return ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)
        if group not in self._transports:
            transport = TorchDistributedTransport(group)
            transport.timeout = self._grace.options.timeout
            transport.bind(backend_of(input_tensor))
            self._transports[group] = transport
        self._gather(output_tensor, input_tensor, self._transports[group])
        return None

    def _as_it_is(self, x: torch.Tensor, group: Any) -> str:
        # Returns the reason to gather without compression; empty to compress.
        if x.dtype not in DTYPES:
            return f"{str(x.dtype).removeprefix('torch.')} gathers"
        if dist.get_world_size(group) != self._workers:
            # these gathers exchange values that the forward pass has already decoded
            return "gathers within a machine (reshard_after_forward=int)"
        backward = torch._C._current_graph_task_id() != -1
        if self.mode is not None and not self.mode.gradients and not backward:
            return "passes without gradients"
        if x.numel() != (known := sum(row for _, row in self._parameters)):
            raise RuntimeError(
                f"FSDP gathers {x.numel()} elements from each worker for {self._name!r}, but its parameters "
                f"have {known}: call grace.torch.fsdp again after you replace parameters"
            )
        return ""

    def _gather(self, out: torch.Tensor, x: torch.Tensor, transport: TorchDistributedTransport) -> None:
        rank, rows, step = transport.rank, out.view(transport.size, -1), self._grace.steps
        alone, together = self._layout(transport, DTYPES[x.dtype])
        payloads = [
            self._payload(x[place], of_worker and of_worker(rank=rank, step=step)) for place, of_worker in alone
        ]
        if together is not None:
            payloads.append(together.encode(x, step))
        self._sent += sum(array.nbytes for payload in payloads for array in payload)
        gathered = list(transport.start([Gather(payload) for payload in payloads], f"parameters of {self._name}")())
        if together is not None:
            together.decode(gathered.pop(), rows, step)
        for (place, of_worker), found in zip(alone, gathered, strict=True):
            for worker, row in enumerate(rows):
                if of_worker is not None:
                    self._decode(found[worker], row[place], of_worker(rank=worker, step=step))
                elif worker != rank:
                    row[place].copy_(found[worker][0])

    def _layout(self, transport: TorchDistributedTransport, wire: str) -> tuple[list[Part], Together | None]:
        # Returns the parts of a shard that are sent one by one, compressed or not, and those that are encoded together.
        if (transport, wire) not in self._layouts:
            parts, xp = list(self._parts(transport.xp, wire, transport.size)), transport.xp
            coded = [part for part in parts if part[1] is not None]
            together = None
            if isinstance(xp.kernels, HostKernels):
                together = Together.of(coded, self._compressor, xp, transport.rank, transport.size)
            alone = parts if together is None else [part for part in parts if part[1] is None]
            self._layouts[transport, wire] = alone, together
        return self._layouts[transport, wire]

    def _parts(self, xp: Any, wire: str, size: int) -> Iterator[Part]:
        ends = accumulate((row for _, row in self._parameters), initial=0)
        for i, ((p, row), (a, b)) in enumerate(zip(self._parameters, pairwise(ends), strict=True)):
            if row:
                of_worker = partial(
                    Context, xp, f"{self._name}/parameter{i}", (row,), world_size=size, wire=wire,
                    seed=self._grace.options.seed,
                )  # fmt: skip
                yield slice(a, b), of_worker if p.dim() > 1 and self._compressor.applies(of_worker()) else None

    def _payload(self, x: torch.Tensor, ctx: Context | None) -> Payload:
        if ctx is None:
            return (x,)
        # x is a part of FSDP's output.
        values = x if x.dtype == torch.float32 else x.float()  # donated: decoding overwrites x
        program: Any = self._method.encode(values, {}, ctx)
        payload: Payload = run_local(program, self._compressor)[0]
        return payload

    def _decode(self, payload: Payload, out: torch.Tensor, ctx: Context) -> None:
        mean = self._method.mean([payload], ctx, agreed=True)
        if out.dtype == torch.float32:
            mean.array(out)
        else:
            out.copy_(mean.array())

    def report(self) -> TensorReport:
        """Bytes of all gathers so far: sent by GRACE, and what FSDP itself would have sent."""
        reason = ", ".join(f"{count} of {self._gathers} exact: {why}" for why, count in self._exact.items())
        row = sum(row for _, row in self._parameters)
        return TensorReport(
            self._name, (self._workers, row), name_of(self._compressor), reason, self._sent, self._plain, None
        )
