"""Benchmarks: `grace bench kernels` times methods, and `costs` measures for the planner.

`plan` defines the measurements, `kernels` starts the processes and merges their results, `worker` is the program of
these processes, `subjects` are the measured objects, `memory` measures memory, `show` prints and plots. Tasks, the
network lab and other packages' methods are in `grace_bench`. Importing this package imports no toolkit.
"""
