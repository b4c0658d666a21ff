"""Average payloads on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from grace.core import Array, Combine, Compressor, Context, Program, State, name_of
from grace.core.collectives import Reduce
from grace.core.communicator import Communicator
from grace.core.method import Method
from grace.core.registry import register


@register("allreduce")
@dataclass(frozen=True)
class Allreduce(Communicator):
    """Average linear payloads on the wire, or use the payload that the workers agreed on while compressing.

    Traffic does not grow with the number of workers.
    """

    def check(self, method: Method, world_size: int) -> None:
        compressor = method.compressor
        if compressor.traits.combine is Combine.GATHER:
            other = "; or set packed=False to send votes that can be summed" if compressor.traits.majority_vote else ""
            raise ValueError(
                f"communicator 'allreduce' cannot carry {name_of(compressor)!r}, whose payloads cannot be summed. "
                f"Leave communicator out, or use 'allgather'{other}"
            )
        dtype, largest = compressor.traits.wire_sum or ("float32", 0)
        if largest and largest * world_size > LIMITS[dtype]:
            other = "communicator 'allgather'"
            if compressor.traits.combine is Combine.AGREED:
                other = "fewer levels" if dtype == "int32" else "dtype='int32' or fewer levels"
            raise ValueError(
                f"{name_of(compressor)!r} sums {dtype} on the wire: {world_size} workers times {largest} exceed "
                f"{LIMITS[dtype]}. Use {other}"
            )

    def reduce(self, x: Array, method: Method, state: State, ctx: Context) -> Program[tuple[Array, State]]:
        compressor = method.compressor
        agreed = compressor.traits.combine is Combine.AGREED
        payload, state = yield from method.encode(x, state, ctx)
        if not agreed:
            payload = yield Reduce(payload, "sum" if compressor.traits.wire_sum else "mean")
            if type(compressor).reduced is not Compressor.reduced:
                return method.finish(compressor.reduced(payload, ctx), state, ctx)
        return method.finish(method.mean([payload], ctx, agreed=True), state, ctx)


LIMITS = {"int8": 2**7 - 1, "uint8": 2**8 - 1, "int32": 2**31 - 1, "int64": 2**63 - 1}
