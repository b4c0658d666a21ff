"""A test kit: checks your own compressor, memory or communicator against the laws of compression.

    from grace.testing import check_compressor

    def test_my_compressor():
        check_compressor(MyCompressor())

Every law runs on every installed toolkit but JAX (see `installed`), in this process, without a network.
NumPy runs all shapes and communicators; the other toolkits, which are slower, run some of them.
`compressor_laws` and its siblings return single checks, for `pytest.mark.parametrize`. GRACE's own methods obey the
same laws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

from grace.backends import get_backend, toolkits
from grace.core import Compressor, Memory, name_of
from grace.core.communicator import Communicator
from grace.testing import communicators, compressors, memories
from grace.testing.cases import SHAPE, fully

__all__ = [
    "Check",
    "check_communicator",
    "check_compressor",
    "check_memory",
    "communicator_laws",
    "compressor_laws",
    "memory_laws",
]


class Check(NamedTuple):
    """One law on one toolkit; `run` checks it."""

    law: str
    backend: str
    run: Callable[[], None]

    def __str__(self) -> str:
        return f"{self.law}-{self.backend}"


def installed() -> list[str]:
    """The installed toolkits; NumPy always is one. JAX is left out: it compiles each operation for each shape.

    Laws on JAX take about a minute for a method: name "jax" to run them.
    """
    names = {toolkit.name: toolkit.modules[0] for toolkit in toolkits() if toolkit.name != "jax"}
    return [name for name, module in names.items() if find_spec(module) is not None]


def compressor_laws(compressor: Compressor, backends: Sequence[str] | None = None) -> Iterator[Check]:
    """The laws for a compressor, one check per law and toolkit."""
    return _checks(compressors.LAWS, compressor, backends)


def memory_laws(memory: Memory, compressor: Compressor, backends: Sequence[str] | None = None) -> Iterator[Check]:
    """The laws for a memory, together with a compressor that it accepts."""
    return _checks(memories.LAWS, (memory, compressor), backends)


def communicator_laws(
    communicator: Communicator, compressor: Compressor, backends: Sequence[str] | None = None
) -> Iterator[Check]:
    """The laws for a communicator, with a compressor that it accepts."""
    return _checks(communicators.LAWS, (communicator, compressor), backends)


def check_compressor(compressor: Compressor, backends: Sequence[str] | None = None) -> None:
    """Check a compressor against all laws: declarations, payloads, streams, bounds, exchanges, graphs, checkpoints.

    ``backends``: "numpy", "torch", "tensorflow", "jax"; None: those installed, without JAX. Raises AssertionError,
    naming the law, the toolkit, the shape and the result, for the first violation.
    """
    _run(compressor_laws(compressor, backends))


def check_memory(memory: Memory, compressor: Compressor | None = None, backends: Sequence[str] | None = None) -> None:
    """Check a memory against all laws, as `check_compressor` does.

    ``compressor``: the compressor beside it; None: top-k with ratio 0.1.
    """
    if compressor is None:
        from grace.compressors.measured.topk import TopK

        compressor = TopK(compress_ratio=0.1)
    _run(memory_laws(memory, compressor, backends))


def check_communicator(
    communicator: Communicator,
    compressors: Iterable[Compressor] | None = None,
    backends: Sequence[str] | None = None,
) -> None:
    """Check a communicator against all laws, as `check_compressor` does.

    ``compressors``: compressors to test it with; None: every registered one that it accepts with default parameters.
    The communicator must reject all others by ValueError, which is a law, too. The laws concern whole gradients:
    ValueError for a communicator that reduce-scatters.
    """
    if communicator.reduce_scatters:
        raise ValueError(f"{name_of(communicator)!r} hands out rows, and these laws are about whole gradients")
    from grace.testing.cases import accepted

    for compressor in accepted(communicator) if compressors is None else compressors:
        _run(communicator_laws(communicator, compressor, backends))


def _checks(laws: dict[str, Callable[..., None]], subject: Any, backends: Sequence[str] | None) -> Iterator[Check]:
    for backend in installed() if backends is None else backends:
        for name, law in laws.items():
            if getattr(law, "graphs", False) and backend != "tensorflow":
                continue
            if getattr(law, "reference", False) and backend != "numpy":
                continue
            yield Check(name, backend, partial(_hold, law, subject, backend))


def _hold(law: Callable[..., None], subject: Any, backend: str) -> None:
    parts = subject if isinstance(subject, tuple) else (subject,)
    SHAPE.set(None)
    xp = get_backend(backend)
    try:
        with nullcontext() if fully(xp) else xp.quiet():  # as the engine runs methods
            law(*parts, xp)
    except Exception as error:
        shape = "" if SHAPE.get() is None else f", shape {SHAPE.get()}"
        found = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        who = " with ".join(map(name_of, parts))
        raise AssertionError(f"{who} breaks the law {law.__name__!r} on {backend}{shape}: {found}") from error


def _run(checks: Iterator[Check]) -> None:
    for check in checks:
        check.run()
