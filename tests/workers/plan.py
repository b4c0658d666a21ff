"""Four workers, as two machines of two, use every strategy in one step: OUT TOOLKIT TRANSPORT COUNT."""

import json
import os
import sys
from pathlib import Path

from launch import leave_gloo, save
from strategies import LOSSLESS, gradients, plan_of

out, toolkit, transport, count = sys.argv[1:]
os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
if transport == "torch":
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
elif toolkit == "torch":
    import horovod.torch as hvd

    hvd.init()
    rank = hvd.rank()
else:
    import horovod.tensorflow as hvd

    hvd.init()
    rank = hvd.rank()
if toolkit == "tensorflow":
    import tensorflow as tf

    def exchange(grc, given):
        tensors = {name: tf.constant(array) for name, array in given.items()}
        grc.build(tensors)
        return {name: mean.numpy() for name, mean in tf.function(grc.step, autograph=False)(tensors).items()}
else:
    import torch

    torch.set_num_threads(1)

    def exchange(grc, given):
        tensors = {name: torch.from_numpy(array.copy()) for name, array in given.items()}
        grc.build(tensors)
        return {name: mean.numpy() for name, mean in grc.step(tensors).items()}


from grace import grace_from_params
from grace.communicators.planned.strategy import options

chosen = options(devices=("gpu",))
chosen = chosen[:: -(-len(chosen) // int(count))]
given = gradients(chosen, rank)
found = {"tensors": len(chosen)}
if rank == 0:
    Path(out, "plan.json").write_text(json.dumps(plan_of(chosen)["plan"]))
path = str(Path(out, "plan.json" if rank == 0 else "not here.json"))
for number, params in enumerate(LOSSLESS[: 1 if toolkit == "tensorflow" else 2]):  # tracing graphs takes long
    grc = grace_from_params({**params, "plan": path, "node_size": 2})
    found[f"exact {number}"] = exchange(grc, given)

grc = grace_from_params({"compressor": "topk", "compress_ratio": 0.2, "plan": path, "node_size": 2})
for step in range(1 if toolkit == "tensorflow" else 3):
    found["lossy"] = exchange(grc, gradients(chosen, rank, step))
report = grc.report()
found["bytes"] = {tensor.name: tensor.bytes_sent for tensor in report.tensors}, report.bytes_received
try:
    exchange(grace_from_params({"plan": path, "node_size": 2}), {"unknown": given["0"]})
except ValueError as error:
    found["unknown"] = str(error)
save(out, rank, found)
if transport == "torch":
    leave_gloo()
