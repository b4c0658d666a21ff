"""Exchange the same gradients by every method of the table: OUT TOOLKIT TRANSPORT."""

import os
import sys

import numpy as np
from exchanges import ROWS, STEPS, gradients, rows
from launch import leave_gloo, save

out, toolkit, transport = sys.argv[1:]
os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # for the groups of hierarchical exchanges
if transport == "torch":
    import torch.distributed as dist

    dist.init_process_group("gloo")
elif toolkit == "torch":
    import horovod.torch as hvd

    hvd.init()
else:
    import horovod.tensorflow as hvd

    hvd.init()

import grace

if toolkit == "tensorflow":
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)

    def exchange(grc):
        graph = tf.function(grc.step, autograph=False)
        for step in range(STEPS):
            tensors = {name: tf.constant(array) for name, array in gradients(step, grc.rank).items()}
            if step == 0:
                grc.build(tensors)
            yield {name: mean.numpy() for name, mean in graph(tensors).items()}
        assert graph.experimental_get_tracing_count() == 1

else:
    import torch

    def exchange(grc):
        for step in range(STEPS):
            tensors = {name: torch.from_numpy(array.copy()) for name, array in gradients(step, grc.rank).items()}
            if step == 0:
                grc.build(tensors)
            # Gradients become ready in a different order on each worker.
            order = np.random.default_rng(1000 * grc.rank + step).permutation(sorted(tensors))
            jobs = {str(name): grc.start(str(name), tensors[str(name)]) for name in order}
            yield {name: grc.finish(job).numpy() for name, job in jobs.items()}


found = {}
for index in rows(toolkit, transport, hvd.size() if transport == "horovod" else dist.get_world_size()):
    grc = grace.grace_from_params(ROWS[index])
    means = list(exchange(grc))
    report = grc.report()
    tensors = sum(tensor.bytes_sent for tensor in report.tensors)
    headers = report.bytes_sent - tensors  # the simulation has no headers, as its workers run in lockstep
    found[index] = (means, tensors, report.bytes_received - headers, report.bytes_dense, report.steps, headers)
save(out, grc.rank, found)
if transport == "torch":
    leave_gloo()
else:
    grc.transport.exchange("done")  # the first worker that ends would shut Horovod down while other groups still work
