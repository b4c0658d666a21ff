"""Local training on real workers: OUT TRANSPORT. Saves bases and momenta, times, and the outcome of a fault."""

import json
import sys
import time
import zlib
from pathlib import Path

import numpy as np
from launch import leave_gloo, save

import grace
from grace.local import DiLoCo, LocalSGD

out, kind = sys.argv[1:]
if kind == "tensorflow":
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    hvd.init()
    rank, size, group = hvd.rank(), hvd.size(), 0
    everybody = pair = "horovod"
else:
    import torch

    torch.set_num_threads(1)
    pairs = [[0, 1], [2, 3]]
    if kind == "torch":
        import torch.distributed as dist

        from grace.transports.torch_distributed import TorchDistributedTransport

        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        groups = [dist.new_group(each) for each in pairs]
        everybody, pair = "torch", TorchDistributedTransport(groups[rank // 2])
    else:
        import horovod.torch as hvd

        from grace.transports.horovod import HorovodTransport

        sets = [hvd.ProcessSet(each) for each in pairs]
        hvd.init(process_sets=sets)
        rank, size = hvd.rank(), hvd.size()
        everybody, pair = "horovod", HorovodTransport(sets[rank // 2])
    group = rank // 2
NONE = {"compressor": "none"}
SHAPES = {"a": (60, 50), "b": (1500,), "c": (30, 60), "d": (7,)}
METHODS = {
    "topk": {"compressor": "topk", "compress_ratio": 0.05},
    "powersgd": {"compressor": "powersgd", "compress_rank": 2},
    "qsgd": {"compressor": "qsgd", "memory": "residual"},
    "none": NONE,
}
found = {"group": group}


# -- a training by hand ------------------------------------------------------------------------------------------------
class Model:
    """Parameters of the toolkit, with hand-made movements."""

    def __init__(self, shapes=SHAPES, differ=False):
        rng = np.random.default_rng(rank if differ else 0)
        values = {name: rng.standard_normal(shape).astype("f") for name, shape in shapes.items()}
        if kind == "tensorflow":
            self.named = {name: tf.Variable(value, name=name) for name, value in values.items()}
        else:
            self.named = {name: torch.nn.Parameter(torch.from_numpy(value)) for name, value in values.items()}
            self.optimizer = torch.optim.SGD(self.named.values(), lr=1.0)

    def train(self, local):
        self.local = local
        if kind == "tensorflow":
            grace.tensorflow.local_variables(local, list(self.named.values()))
        else:
            grace.torch.local(self.optimizer, local, self.named.items())

    def step(self, t):
        rng = np.random.default_rng(100 * t + rank)
        for p in self.named.values():
            change = 0.1 * rng.standard_normal(p.shape).astype("f")
            if kind == "tensorflow":
                p.assign_sub(change)
            else:
                p.grad = torch.from_numpy(change)
        if kind == "tensorflow":
            self.local.step()
        else:
            self.optimizer.step()

    def values(self):
        return {name: np.array(p.numpy() if kind == "tensorflow" else p.detach()) for name, p in self.named.items()}


def checksum(local):
    state = local.global_state()
    return zlib.crc32(b"".join(np.asarray(a).tobytes() for part in state.values() for a in part.values()))


def history(transport, params):
    """Checksums of base and momentum after each of six landings, the last one of `finish`."""
    model = Model()
    settings = {"fragments": 2, "fragment_sync_delay": 2, "fragment_update_alpha": 0.25, "weights": 1.0 + rank}
    model.train(DiLoCo(grace.grace_from_params(params, transport), 6, **settings))
    sums = []
    for t in range(15):
        model.step(t)
        if t % 3 == 2:
            sums.append(checksum(model.local))
    model.local.finish()
    return [*sums, checksum(model.local)]


found["all"] = {name: history(everybody, params) for name, params in METHODS.items()}
found["pair"] = {name: history(pair, METHODS[name]) for name in ("topk", "powersgd")}

# Workers with different initial parameters are refused.
model = Model(differ=True)
model.train(LocalSGD(grace.grace_from_params(NONE, everybody), 2))
try:
    model.step(0)
except ValueError as error:
    found["start"] = str(error)

# Overlap: worker 1 starts the exchange half a second after the others, which continue to train.
model = Model({"w": (200, 200)})
local = LocalSGD(grace.grace_from_params({**NONE, "trace": 9}, everybody), 4, fragment_sync_delay=2)
model.train(local)
for t in range(8):
    if (rank, t) == (1, 5):
        time.sleep(0.5)
    began = time.monotonic()
    model.step(t)
    name = {5: "launch", 6: "step", 7: "land"}.get(t)
    found[f"{name} seconds"] = time.monotonic() - began
    time.sleep(0.05)  # the computation of an inner step
if kind != "tensorflow":
    local.grace.report(trace=f"{out}/trace-{rank}.json")
    events = json.loads(Path(f"{out}/trace-{rank}.json").read_text())["traceEvents"]
    found["under way"] = min(event["dur"] / 1e6 for event in events if event.get("cat") == "communicate")


# -- integrations ------------------------------------------------------------------------------------------------------
def fixture(delay, alpha):
    settings = {"outer_lr": 2.0, "outer_momentum": 0.0, "fragments": 2}
    settings |= {"fragment_sync_delay": delay, "fragment_update_alpha": alpha}
    return DiLoCo(grace.grace_from_params(NONE, everybody), 6, **settings)


def train_torch(local):
    p = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer, values = torch.optim.SGD(p, lr=1.0), [[1.0, 1.0]]
    grace.torch.local(optimizer, local)
    for _ in range(15):
        optimizer.zero_grad()
        (2 * sum(each.sum() for each in p)).backward()
        optimizer.step()
        values.append([each.item() for each in p])
    local.finish()
    base = list(local.global_state()["base"].values())
    return values, [each.item() for each in p] == [each.item() for each in base]


def train_keras(local):
    inputs = keras.Input((1,))
    layers = [keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2)]
    model = keras.Model(inputs, keras.layers.Add()([layer(inputs) for layer in layers]))
    model.compile(keras.optimizers.SGD(1.0), lambda y, prediction: prediction, jit_compile=False)
    values = [[1.0, 1.0]]

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            values.append([float(layer.kernel[0, 0]) for layer in layers])

    x = np.full((15, 1), 2.0, "f")
    callbacks = [grace.tensorflow.BroadcastCallback(), grace.tensorflow.LocalCallback(local), Watch()]
    model.fit(x, x, batch_size=1, shuffle=False, verbose=0, callbacks=callbacks)
    base = list(local.global_state()["base"].values())
    return values, [float(layer.kernel[0, 0]) for layer in layers] == [value.item() for value in base]


found["fixtures"] = [(0, 0.5), (1, 0.0)]
found["finished"] = True
for delay, alpha in found["fixtures"]:
    values, equal = (train_keras if kind == "tensorflow" else train_torch)(fixture(delay, alpha))
    found[f"fixture {delay} {alpha}"] = np.array(values).T
    found["finished"] &= equal

# -- a worker that dies while an exchange is under way -----------------------------------------------------------------
if kind == "torch":
    model = Model()
    params = {**METHODS["topk"], "timeout": 5, "communicator": "allgather"}
    local = DiLoCo(grace.grace_from_params(params, everybody), 4, fragment_sync_delay=2)
    model.train(local)
    for t in range(6):
        model.step(t)
    if rank == size - 1:
        save(out, rank, found)
        leave_gloo()  # while its exchange is in flight

    def own():
        tensors = local.grace.state_dict()["tensors"]
        residuals = {name: {key: np.array(a) for key, a in state.items()} for name, state in tensors.items()}
        return checksum(local), residuals, model.values()

    time.sleep(0.5)
    try:
        for t in range(6, 12):
            before = own()
            model.step(t)
    except (ConnectionError, TimeoutError) as error:
        found["lost"] = str(error)
    after = own()
    same = before[0] == after[0] and str(before[1]) == str(after[1])
    moved = all(np.abs(before[2][name] - after[2][name]).max() > 0.1 for name in SHAPES)  # keeps its inner step
    found["unchanged"] = same and moved and not local.in_flight
    local.reset("local", [local.state_dict()])  # continue alone, without the lost workers
    landed = local.landed
    for t in range(12, 16):
        model.step(t)
    found["goes on"] = local.landed == landed + 1 and np.isfinite(model.values()["a"]).all()
save(out, rank, found)
if kind == "torch":
    leave_gloo()
elif kind == "horovod":
    hvd.barrier()  # the first worker that ends would shut Horovod down for the other group
