"""Benchmarks: `grace bench kernels` times methods, `grace bench tasks` trains with them.

`plan` defines the measurements, `kernels` starts the processes and merges their results, `worker` is the program of
these processes, `subjects` and `peers` are the measured objects, `memory` measures memory, `show` prints and plots.
Importing this package imports no toolkit.
"""
