"""The user's timeout and GRACE's, each in a separate process group: OUT. Saves findings."""

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from launch import leave_gloo, save

out = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()

import grace
from grace.transports.torch_distributed import TorchDistributedTransport

found = {}


def seconds(group):
    """gloo's timeout for all collectives of the group."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def make(group, method, width=300, **options):
    """A model and its wrapped optimizer over a group, after one step."""
    params = {"compressor": method, "compress_ratio": 0.01, "min_numel": 0, **options}
    if method == "none":
        del params["compress_ratio"]
    grc = grace.grace_from_params(params, TorchDistributedTransport(group))
    net = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, 4))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    optimizer = grace.torch.DistributedOptimizer(optimizer, grc, named_parameters=net.named_parameters())
    grace.torch.broadcast_parameters(net.state_dict(), grace=grc)
    return grc, net, optimizer


def step(net, optimizer):
    optimizer.zero_grad()
    net(torch.ones(2, net[0].in_features)).sum().backward()
    optimizer.step()


def tried(call):
    """Error and duration of a call."""
    began = time.monotonic()
    try:
        call()
        error = None
    except Exception as raised:
        error = type(raised).__name__, str(raised)
    return error, time.monotonic() - began


# Groups keep their timeouts, whatever GRACE's is.
long, short, other, more = (dist.new_group(timeout=timedelta(seconds=limit)) for limit in (60, 3, 3, 100))
made = {}
for limit, group in (("default", dist.group.WORLD), ("shorter", long), ("longer", short)):
    options = {"shorter": {"timeout": 3.0}, "longer": {"timeout": 60.0}}.get(limit, {})
    before = seconds(group)
    made[limit] = [make(group, method, **options) for method in ("none", "topk")]
    for _, net, optimizer in made[limit]:
        step(net, optimizer)
    found[limit] = before, seconds(group)
transport = made["default"][0][0].transport
found["usual"] = transport.timeout, transport.among([0, 1]).timeout


def late(name, call, seconds=5):
    """Record the outcome of a call that worker 0 makes later than the others."""
    dist.barrier()
    if rank == 0:
        time.sleep(seconds)
    found[name] = tried(call)
    dist.barrier()


# Worker 0 evaluates for longer than GRACE's timeout: the user's barrier waits.
late("barrier beyond GRACE's", lambda: dist.barrier(group=long))

# Worker 0 comes later than the group's timeout: each kind of GRACE's messages waits for it.
for kind, (_, net, optimizer) in zip(("reduce", "gather"), made["longer"], strict=True):
    late(f"{kind} beyond the group's", lambda n=net, o=optimizer: step(n, o))
grc, net, _ = made["longer"][0]
late("broadcast beyond the group's", lambda: grace.torch.broadcast_parameters(net.state_dict(), grace=grc))

# Without a timeout of its own GRACE waits as long as the group, here 3 s. With one, it waits that long. Small messages
# are sent directly between workers.
for name, group, options in (("the group's", other, {"width": 50}), ("GRACE's", more, {"timeout": 3.0})):
    _, net, optimizer = make(group, "none", **options)
    step(net, optimizer)
    late(f"step beyond {name}", lambda n=net, o=optimizer: step(n, o))

# The group's timeout ends the user's own wait, although GRACE's is longer.
late("barrier beyond the group's", lambda: dist.all_reduce(torch.ones(10), group=short))
save(out, rank, found)
leave_gloo()
