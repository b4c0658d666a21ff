"""The vocabulary of methods: abstract classes, contexts, programs and collectives.

A method is the pair (compressor, memory): pure functions with explicit state, written over a backend ``xp`` instead of
a toolkit. This package uses the standard library alone and imports no toolkit.
"""

from grace.core.compressor import Compressor
from grace.core.context import Context
from grace.core.memory import Memory
from grace.core.program import MaybeProgram, Program, Steps, as_program, at_once, run, run_local
from grace.core.state import Array, Payload, Resize, State, apart, join, name_of, scope
from grace.core.traits import Combine, Traits
from grace.core.transport import Transport

__all__ = [
    "Array",
    "Combine",
    "Compressor",
    "Context",
    "MaybeProgram",
    "Memory",
    "Payload",
    "Program",
    "Resize",
    "State",
    "Steps",
    "Traits",
    "Transport",
    "apart",
    "as_program",
    "at_once",
    "join",
    "name_of",
    "run",
    "run_local",
    "scope",
]
