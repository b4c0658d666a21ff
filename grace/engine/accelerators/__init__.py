"""Native kernels and in-place versions of methods, in a table keyed by the method's exact type."""

from grace.engine.accelerators.base import Accelerator, MemoryAccelerator
from grace.engine.accelerators.table import accelerator_of, decode, encode, mean, memory_accelerator_of

__all__ = [
    "Accelerator",
    "MemoryAccelerator",
    "accelerator_of",
    "decode",
    "encode",
    "mean",
    "memory_accelerator_of",
]
