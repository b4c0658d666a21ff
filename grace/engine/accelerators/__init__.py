"""Native kernels and in-place forms of methods, in a table by the exact type of the method."""

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
