"""Transports carry out collectives: in this process alone, by torch.distributed, or by Horovod."""

from __future__ import annotations

from grace.core import Transport
from grace.transports.launched import initialised, refuse_launched

NAMES = ("local", "torch", "horovod")


def get_transport(name: str | Transport | None = None) -> Transport:
    """Return a transport by name; by default the initialised one, or a single worker's if none is initialised.

    Raises RuntimeError if none is initialised although the name is "torch" or "horovod", or although a launcher asks
    for several workers. A single worker's transport raises RuntimeError if it is used after a group of several workers
    was created.
    """
    if isinstance(name, Transport):
        return name
    if name is None and (name := initialised()) is None:
        refuse_launched()
        from grace.transports.local import SingleWorker

        return SingleWorker()
    if name == "local":
        from grace.transports.local import LocalTransport

        return LocalTransport()
    if name == "torch":
        from grace.transports.torch_distributed import TorchDistributedTransport

        return TorchDistributedTransport()
    if name == "horovod":
        from grace.transports.horovod import HorovodTransport

        return HorovodTransport()
    if not isinstance(name, str):
        raise TypeError(
            f"transport={name!r} is {type(name).__name__}, not a name ({', '.join(NAMES)}) or a Transport. Of a "
            "process group: grace.transports.torch_distributed.TorchDistributedTransport(group); of a Horovod process "
            "set: grace.transports.horovod.HorovodTransport(process_set)"
        )
    raise ValueError(f"unknown transport {name!r}; choose one of {', '.join(NAMES)}")


def known_transport(name: str | Transport | None = None) -> Transport | None:
    """`get_transport`; None for the default transport before a group of workers exists."""
    return None if name is None and initialised() is None else get_transport(name)
