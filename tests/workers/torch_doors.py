"""Use of PyTorch, over two workers: OUT TRANSPORT. Saves a dictionary of findings."""

import copy
import sys

import numpy as np
import torch
from launch import join_torch, leave_gloo, save

out, transport = sys.argv[1:]
rank, size = join_torch(transport)

import grace

found = {}
DENSE = {"compressor": "none"}
TOPK = {"compressor": "topk", "compress_ratio": 0.1, "min_numel": 0}


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5))


def batch(step, worker=rank):
    generator = torch.Generator().manual_seed(100 * step + worker)
    return torch.randn(8, 20, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()]).numpy().copy()


def distribute(net, optimizer, params=DENSE, **options):
    grc = grace.grace_from_params(params)
    return grc, grace.torch.DistributedOptimizer(
        optimizer, grace=grc, named_parameters=net.named_parameters(), **options
    )


def train(net, optimizer, steps=4, passes=1):
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(passes):
            x, y = batch(10 * step + part)
            torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return weights(net)


# Every optimizer of PyTorch, with dense gradients: the weights of one worker that trains on the union of the batches.
for name, make in {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
}.items():
    net = model()
    _, optimizer = distribute(net, make(net.parameters()))
    mine = train(net, optimizer)
    net = model()
    optimizer = make(net.parameters())
    for step in range(4):
        optimizer.zero_grad()
        losses = [torch.nn.functional.cross_entropy(net(x), y) for x, y in (batch(10 * step, w) for w in range(size))]
        (sum(losses) / size).backward()
        optimizer.step()
    found[f"optimizer {name}"] = (mine, weights(net))

# Accumulation: two passes and one exchange.
net = model()
grc, optimizer = distribute(net, torch.optim.SGD(net.parameters(), 0.1), TOPK, backward_passes_per_step=2)
found["accumulation"] = (train(net, optimizer, passes=2), grc.report().steps)

# A closure that is called many times in a step; its line search must decide equally on all workers.
net = model()
_, optimizer = distribute(net, torch.optim.LBFGS(net.parameters(), max_iter=5, line_search_fn="strong_wolfe"))
x, y = batch(0)
losses = []
for _ in range(3):

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()
        return loss

    losses.append(float(optimizer.step(closure)))
found["closure"] = (weights(net), losses)

# A loss scaler: both workers see worker 1's overflow and skip; the memory is unchanged, and training continues.
net = model()
grc, optimizer = distribute(net, torch.optim.SGD(net.parameters(), 0.1), TOPK)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
trace = []
for step in range(4):
    optimizer.zero_grad()
    x, y = batch(step)
    loss = torch.nn.functional.cross_entropy(net(x), y)
    if step == 2 and rank == 1:
        loss = loss * float("inf")
    before, kept = weights(net), copy.deepcopy(grc.state_dict()["tensors"])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    now = grc.state_dict()["tensors"]
    same = all(torch.equal(now[n][k], kept[n][k]) for n in now for k in now[n])
    trace.append((bool((weights(net) == before).all()), same, scaler.get_scale()))
found["scaler"] = (weights(net), trace, grc.report().skipped)

# Layers used in a different order on each worker, one that only worker 0 uses, and one that no worker uses.
torch.manual_seed(0)
net = torch.nn.ModuleDict({name: torch.nn.Linear(40, 40) for name in "abcde"})
grc, optimizer = distribute(net, torch.optim.SGD(net.parameters(), 0.1), {**TOPK, "bucket_mb": 0.005})
for step in range(4):
    optimizer.zero_grad()
    x = torch.randn(4, 40, generator=torch.Generator().manual_seed(step))
    for name in "abc" if rank == 0 else "cba":
        x = net[name](x)
    if rank == 0:
        x = x + net["d"](x)
    x.square().mean().backward()
    optimizer.step()
found["order"] = (weights(net), net["e"].weight.grad is None, net["d"].weight.grad is None)

# Horovod's names: synchronize, clip, skip_synchronize.
net = model()
_, optimizer = distribute(net, torch.optim.SGD(net.parameters(), 0.1))
x, y = batch(rank)
torch.nn.functional.cross_entropy(net(x), y).backward()
optimizer.synchronize()
torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
with optimizer.skip_synchronize():
    optimizer.step()
found["synchronize"] = weights(net)

# A parameter group is added, and a parameter is unfrozen, during the training.
net = model()
net[2].bias.requires_grad_(False)
grc = grace.grace_from_params(TOPK)
optimizer = torch.optim.SGD(net[0].parameters(), 0.1)
optimizer = grace.torch.DistributedOptimizer(optimizer, grace=grc, named_parameters=net.named_parameters())
train(net, optimizer, 2)
optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 0.05})
train(net, optimizer, 2)
net[2].bias.requires_grad_(True)
found["added"] = (train(net, optimizer, 3), sorted(grc.names))

# The initial state of worker 1, tensors and optimizer.
net = model(seed=rank)
optimizer = torch.optim.Adam(net.parameters(), 0.01 * (1 + rank))
if rank == 1:
    x, y = batch(0)
    torch.nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
grace.torch.broadcast_parameters(net.state_dict(), root_rank=1)
grace.torch.broadcast_optimizer_state(optimizer, root_rank=1)
moments = [optimizer.state[p]["exp_avg"].numpy() for p in net.parameters()]
found["broadcast"] = (weights(net), np.concatenate([m.ravel() for m in moments]), optimizer.param_groups[0]["lr"])

# Half-precision and double models.
for dtype in (torch.float16, torch.bfloat16, torch.float64):
    net = model().to(dtype)
    grc, optimizer = distribute(net, torch.optim.SGD(net.parameters(), 0.1), TOPK)
    for step in range(2):
        optimizer.zero_grad()
        net(batch(step)[0].to(dtype)).square().mean().backward()
        optimizer.step()
    found[f"dtype {dtype}"] = (weights(net.float()), grc.report().bytes_dense)

# An embedding's sparse gradients become dense.
torch.manual_seed(0)
net = torch.nn.Embedding(50, 8, sparse=True)
_, optimizer = distribute(net, torch.optim.SGD(net.parameters(), 0.1))
net(torch.tensor([rank, 7])).sum().backward()
optimizer.step()
found["sparse"] = net.weight.grad.to_dense().numpy()

# Different models or settings: both workers raise an error that names the difference, and neither hangs.
for name, params, width in (
    ("parameters", TOPK, 30 + rank),
    ("settings", {**TOPK, "compress_ratio": 0.1 * (rank + 1)}, 30),
):
    net = torch.nn.Linear(20, width)
    try:
        distribute(net, torch.optim.SGD(net.parameters(), 0.1), params)
    except ValueError as error:
        found[f"mismatch {name}"] = str(error)
net = torch.nn.Sequential(torch.nn.Linear(4, 4), *[torch.nn.Linear(4, 4)] * 0)
if rank == 1:
    net.extra = torch.nn.Linear(4, 4)
try:
    distribute(net, torch.optim.SGD(net.parameters(), 0.1))
except ValueError as error:
    found["mismatch list"] = str(error)

# A checkpoint of each worker, loaded into new objects: the run continues bit for bit. Another worker's checkpoint is
# refused.
for kind, params in (("topk", TOPK), ("powersgd", {"compressor": "powersgd", "compress_rank": 2, "min_numel": 0})):
    net = model()
    grc, optimizer = distribute(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), params)
    train(net, optimizer, 3)
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict(), grc.state_dict()))
    whole = train(net, optimizer, 3)
    net = model(seed=5)
    grc, optimizer = distribute(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), params)
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    grc.load_state_dict(saved[2])
    found[f"resume {kind}"] = (whole, train(net, optimizer, 3))
try:
    grc.load_state_dict({**saved[2], "rank": 1 - rank})
except ValueError as error:
    found["other worker's state"] = str(error)

if transport == "torch":
    from torch.nn.parallel import DistributedDataParallel

    def ddp(params, steps=5, hook=True, **options):
        net = model()
        wrapped = DistributedDataParallel(net, bucket_cap_mb=0.002, **options)
        grc = grace.grace_from_params(params)
        if hook:
            grace.torch.name_parameters(grc, wrapped)
            wrapped.register_comm_hook(grc, grace.torch.ddp_hook)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        return train(wrapped, optimizer, steps), sorted(grc.names), grc

    found["ddp plain"] = ddp(DENSE, hook=False)[0]
    for name, params in {
        "none": DENSE,
        "topk": TOPK,
        "efsignsgd": {"compressor": "efsignsgd", "min_numel": 0},
        "powersgd": {"compressor": "powersgd", "compress_rank": 2, "min_numel": 0},
    }.items():
        hooked, names, _ = ddp(params)
        net = model()
        _, optimizer = distribute(net, torch.optim.SGD(net.parameters(), 0.1, momentum=0.9), params)
        found[f"ddp {name}"] = (hooked, train(net, optimizer, 5), names)

save(out, rank, found)
if transport == "torch":
    leave_gloo()
