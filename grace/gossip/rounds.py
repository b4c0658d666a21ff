"""Rounds of messages between neighbours."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from grace.backends import Backend, backend_of
from grace.core import Array, Context, State, Transport
from grace.engine.buckets import Tensor
from grace.engine.meter import Meter
from grace.engine.report import Report, TensorReport
from grace.engine.scheduler import RoundScheduler
from grace.engine.trace import Trace
from grace.gossip.mixings import Mixing, PowerGossip
from grace.gossip.topology import Edge, Topology, neighbours, ordered
from grace.transports import get_transport, known_transport


class Gossip:
    """Mixes named parameters between neighbours; one `step` after each optimizer step.

    ``mixing``: default `PowerGossip()`. ``topology``: as for `edges`. ``transport``: "horovod", "torch", "local" or a
    Transport; default: the one that is initialised by the time of `build`. ``seed``: of all random numbers, equal on
    all workers.
    Every worker must make the same calls. Each iteration of the mixing sends the messages of all tensors together.
    """

    def __init__(
        self,
        mixing: Mixing | None = None,
        topology: Topology = "ring",
        transport: str | Transport | None = None,
        seed: int = 0,
    ):
        self.mixing: Mixing = PowerGossip() if mixing is None else mixing
        if not isinstance(topology, str):
            topology = sorted(ordered(*pair) for pair in topology)
        self.topology: Topology = topology
        self._near: tuple[Edge, ...] | None = None
        self._transport = known_transport(transport)
        if self._transport is not None:
            self.near  # noqa: B018 - raises where the topology does not fit the workers
        self.seed = seed
        self._xp: Backend | None = None
        self._tensors: dict[str, Tensor] = {}
        self._state: dict[str, State] = {}
        self._round = 0
        self._flight: RoundScheduler | None = None
        self._before: dict[str, Array] = {}
        self._meter: Any = None

    @property
    def transport(self) -> Transport:
        """The transport, as in `grace.Grace.transport`."""
        if self._transport is None:
            self._transport = get_transport()
        return self._transport

    @property
    def near(self) -> tuple[Edge, ...]:
        """This worker's neighbours."""
        if self._near is None:
            self._near = neighbours(self.topology, self.transport.size, self.transport.rank)
        return self._near

    @property
    def xp(self) -> Backend:
        """The backend; known once `build` has seen a parameter."""
        if self._xp is None:
            raise RuntimeError("call build(named_parameters) first: nothing is known about the parameters yet")
        return self._xp

    @property
    def built(self) -> bool:
        """Whether `build` has been called."""
        return self._xp is not None

    def build(self, named_parameters: Mapping[str, Array] | Iterable[tuple[str, Array]]) -> None:
        """Create the state of all parameters, once. If workers differ, all raise ValueError, naming the difference."""
        named = dict(named_parameters)
        if self.built:
            raise RuntimeError("built already: make one Gossip for all parameters, and build it once")
        if not named:
            raise ValueError("there are no parameters: pass named_parameters")
        xp = backend_of(next(iter(named.values())))
        self._transport = self.transport.bind(xp)
        self._xp = xp
        self._tensors = {name: Tensor(name, xp.shape(array), xp.dtype(array)) for name, array in named.items()}
        settings = [repr(self.mixing), str(self.topology), self.seed, [asdict(t) for t in self._tensors.values()]]
        texts = self.transport.exchange(json.dumps(settings)) if self.transport.size > 1 else []
        for worker, text in enumerate(texts):
            if text != texts[0]:
                pairs = zip(json.loads(texts[0]), json.loads(text), strict=True)
                one, other = next(pair for pair in pairs if pair[0] != pair[1])
                raise ValueError(
                    f"worker 0 and worker {worker} differ: {one} and {other}. Use the same settings and model"
                )
        self._state = {name: self.mixing.init(self._context(t), self.near) for name, t in self._tensors.items()}
        self._meter = Meter(xp)
        self._meter.extend(list(self._tensors))

    def _context(self, tensor: Tensor) -> Context:
        return Context(
            xp=self.xp,
            name=tensor.name,
            shape=tensor.shape,
            rank=self.transport.rank,
            world_size=self.transport.size,
            step=self._round,
            seed=self.seed,
        )

    def step(self, parameters: Mapping[str, Array]) -> dict[str, Array]:
        """Return all parameters after one round of mixing, with their shapes and dtypes; changes no argument."""
        self.launch(parameters)
        while not self.advance():
            pass
        return self.land()

    def launch(self, parameters: Mapping[str, Array]) -> None:
        """Begin a round with the values of all built parameters, by name."""
        if parameters.keys() != self._tensors.keys():
            odd = sorted(parameters.keys() ^ self._tensors.keys())[0]
            raise KeyError(f"a round must mix exactly the parameters that were built, but {odd!r} differs")
        xp, programs = self.xp, {}
        self._before = dict(parameters)
        for name, tensor in self._tensors.items():
            if xp.shape(parameters[name]) != tensor.shape:
                raise ValueError(f"{name!r} has shape {xp.shape(parameters[name])}, but {tensor.shape} was built")
            x = xp.cast(xp.reshape(parameters[name], (-1,)), "float32")
            if self.near and tensor.size:
                programs[name] = self.mixing.mix(x, self._state[name], self._context(tensor), self.near)
        with xp.quiet():
            self._flight = RoundScheduler("gossip", programs, self.transport, Trace())

    def advance(self) -> bool:
        """Wait for one message and begin the next. True when the exchange is complete."""
        assert self._flight is not None
        with self.xp.quiet():
            return self._flight.advance()

    def land(self) -> dict[str, Array]:
        """End the round: store the new state, and return the new parameters."""
        xp, flight, mixed = self.xp, self._flight, {}
        assert flight is not None
        for name, tensor in self._tensors.items():
            before = mixed[name] = self._before[name]
            if name in flight.results:
                x, self._state[name] = flight.results[name]
                # Add the difference, so that float64 parameters keep the digits that float32 lacks.
                change = x - xp.cast(xp.reshape(before, (-1,)), "float32")
                mixed[name] = before + xp.cast(xp.reshape(change, tensor.shape), tensor.dtype)
        self._meter.add(self._meter.count(list(self._tensors), flight.asked, self.transport.group_rank, {}))
        self._round += 1
        self._flight, self._before = None, {}
        return mixed

    def state_dict(self) -> dict[str, Any]:
        """All state of this worker, as NumPy arrays: each worker saves and loads its own."""
        return {
            "rank": self.transport.rank,
            "world_size": self.transport.size,
            "mixing": repr(self.mixing),
            "round": self._round,
            "tensors": {
                name: {key: self.xp.to_numpy(array).copy() for key, array in state.items()}
                for name, state in self._state.items()
            },
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, after `build`. Raises ValueError, changing nothing, if it does not fit."""
        mine = self.state_dict()
        for key in ("rank", "world_size", "mixing"):
            if saved[key] != mine[key]:
                raise ValueError(f"this state has {key} {saved[key]!r}, but here it is {mine[key]!r}: load its own")
        shapes = [
            {(name, key): array.shape for name, arrays in state["tensors"].items() for key, array in arrays.items()}
            for state in (saved, mine)
        ]
        if shapes[0] != shapes[1]:
            odd = sorted(shapes[0].items() ^ shapes[1].items())[0]
            raise ValueError(f"this state belongs to another model or topology: {odd} is in one of them only")
        self._round = saved["round"]
        self._state = {
            name: {key: self.xp.asarray(array, self.xp.dtype(self._state[name][key])) for key, array in arrays.items()}
            for name, arrays in saved["tensors"].items()
        }

    def report(self) -> Report:
        """Bytes sent since this object was made. ``bytes_dense``: bytes that `Full` gossip would have sent."""
        name = self.mixing.title
        topology = self.topology if isinstance(self.topology, str) else "listed edges"
        head = (self._round, self.transport.rank, self.transport.size, f"{name} on {topology}")
        traffic = self._meter.read() if self._meter else {}
        tensors = [
            TensorReport(
                name=tensor.name,
                shape=tensor.shape,
                method=name,
                reason="",
                bytes_sent=traffic[tensor.name][0],
                bytes_dense=traffic[tensor.name][2] * 4 * tensor.size * len(self.near),
                residual_norm=None,
            )
            for tensor in self._tensors.values()
        ]
        sent, received = (sum(counts[column] for counts in traffic.values()) for column in (0, 1))
        return Report(*head, sent, received, sum(tensor.bytes_dense for tensor in tensors), tensors)
