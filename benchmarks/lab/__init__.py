"""Training across a network of several hosts on one machine, which `grace_bench.lab` builds.

``python -m benchmarks.lab --help``. Figures measured here are of an *emulated* network.
"""
