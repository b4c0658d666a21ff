"""A network of several hosts on one machine, and training across it with the real launchers.

Hosts are network namespaces, links are shaped to a rate: ``python -m benchmarks.lab --help``. Figures measured here
are of an *emulated* network.
"""

from benchmarks.lab.network import Lab, LabError

__all__ = ["Lab", "LabError"]
