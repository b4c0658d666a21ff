"""An emulated network of several hosts on one machine: namespaces, shaped links, and the real launchers."""

from grace_bench.lab.network import Lab, LabError, Loopback

__all__ = ["Lab", "LabError", "Loopback"]
