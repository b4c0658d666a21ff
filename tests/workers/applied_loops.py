"""Real training loops that do not apply all exchanges, over two workers: OUT. Saves findings."""

import copy
import sys
import tempfile
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launch import error_of, leave_gloo, save
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.nn.parallel import DistributedDataParallel

import grace

(out,) = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
warnings.simplefilter("ignore")
NONE = {"compressor": "none", "timeout": 30.0}
TOPK = {"compressor": "topk", "compress_ratio": 0.3, "min_numel": 0, "timeout": 30.0}
METHODS = {"none": NONE, "topk": TOPK}
found = {}


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * seed + rank))


def weights(model):
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([v.detach().double().reshape(-1) for v in values])


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 24), nn.Tanh(), nn.Linear(24, 20)).to(dtype)


def loss_of(model, step):
    x = drawn(8, 20, seed=step).to(next(model.parameters()).dtype)
    return (model(x) - x.roll(1, 1)).float().square().mean()


def hooked(net, method, **options):
    model = DistributedDataParallel(net, **options)
    grc = grace.grace_from_params(method)
    grace.torch.name_parameters(grc, model)
    model.register_comm_hook(grc, grace.torch.ddp_hook)
    return model, grc


def wrapped(optimizer, named, method, **options):
    grc = grace.grace_from_params(method)
    return grace.torch.DistributedOptimizer(optimizer, grc, named, **options), grc


def residuals(grc):
    arrays = [a for cells in grc.state_dict()["tensors"].values() for a in cells.values()]
    return torch.cat([a.double().reshape(-1) for a in arrays]) if arrays else torch.zeros(0)


def apart(model):
    every = [torch.zeros_like(weights(model)) for _ in range(size)]
    dist.all_gather(every, weights(model))
    return float((every[0] - every[1]).abs().max())


def compare(name, one, other, graces=(), limit=0.0):
    """Record how far two models, and the residuals and steps of their Graces, are apart."""
    texts = []
    if (off := float((weights(one) - weights(other)).abs().max())) > limit:
        texts.append(f"weights are {off:.2g} apart")
    if apart(one):
        texts.append("workers differ")
    if len(graces) == 2:
        if not torch.equal(*map(residuals, graces)):
            texts.append("residuals differ")
        if graces[0].steps != graces[1].steps:
            texts.append(f"{graces[0].steps} steps instead of {graces[1].steps}")
    found[name] = "; ".join(texts)


def average(parameters):
    for p in parameters:
        dist.all_reduce(p.grad)
        p.grad.div_(size)


# -- float32 masters --
def masters(method, how, dtype=torch.bfloat16):
    net = mlp(dtype)
    copies = [nn.Parameter(p.detach().float()) for p in net.parameters()]
    optimizer, model, grc = torch.optim.SGD(copies, 0.5), net, None
    if how == "ddp" and method:
        model, grc = hooked(net, method)
    elif method:
        _, grc = wrapped(optimizer, [(str(n), p) for n, p in enumerate(copies)], method)
    for step in range(6):
        net.zero_grad()
        loss_of(model, step).backward()
        for p, master in zip(net.parameters(), copies, strict=True):
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            if how == "numpy":
                master.grad.numpy()[:] = p.grad.float().numpy()
            elif how == "new":
                master.grad = p.grad.float()
            else:
                master.grad.data.copy_(p.grad.data)
        if not method:
            average(copies)
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(net.parameters(), copies, strict=True):
                p.copy_(master)
    return nn.ParameterList(copies), grc


reference, _ = masters(None, "data")
for how in ("data", "numpy", "new", "ddp"):
    got, grc = masters(NONE, how)
    compare(f"masters, {how}, none", got, reference, limit=0.01 if how == "ddp" else 1e-6)
    got, grc = masters(TOPK, how)
    found[f"masters, {how}, topk"] = "" if (apart(got), grc.steps) == (0, 6) else f"{apart(got)}, {grc.steps} steps"


# -- GANs --
def wgan(method, freeze, when):
    torch.manual_seed(0)
    g, d = nn.Linear(16, 20), nn.Sequential(nn.Linear(20, 20), nn.LeakyReLU(0.2), nn.Linear(20, 1))
    its, mine = torch.optim.RMSprop(g.parameters(), 5e-3), torch.optim.RMSprop(d.parameters(), 5e-3)
    wrapped(its, g.named_parameters(prefix="g"), NONE)
    _, grc = wrapped(mine, d.named_parameters(), method)

    def clamp():
        for p in d.parameters():
            if when == "decay":
                p.data.mul_(0.99)
            else:
                p.data.clamp_(-0.05, 0.05)

    for step in range(6):
        real, fake = drawn(8, 20, seed=step) + 1, g(drawn(8, 16, seed=50 + step))
        if when in ("first", "decay"):
            clamp()
        mine.zero_grad()
        (d(fake.detach()).mean() - d(real).mean()).backward()
        mine.step()
        if when == "after":
            clamp()
        its.zero_grad()
        d.requires_grad_(not freeze)
        (-d(fake).mean()).backward()
        d.requires_grad_(True)
        its.step()
    return d, grc


for when in ("first", "after", "decay"):
    for name, method in METHODS.items():
        (one, grc), (two, its) = wgan(method, False, when), wgan(method, True, when)
        compare(f"WGAN, weights written {when}, {name}", one, two, (grc, its))


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.g, self.d = nn.Linear(16, 20), nn.Sequential(nn.Linear(20, 20), nn.LeakyReLU(0.2), nn.Linear(20, 1))

    def forward(self, generator, real, z, detached):
        ones = torch.ones(len(z), 1)
        if not generator:
            return cross_entropy(self.d(real), ones) + cross_entropy(self.d(self.g(z).detach()), 0 * ones)
        if not detached:
            return cross_entropy(self.d(self.g(z)), ones)
        constants = {name: p.detach() for name, p in self.d.named_parameters()}
        return cross_entropy(torch.func.functional_call(self.d, constants, (self.g(z),)), ones)


def one_ddp(method, how, whole_first=False, critics=1):
    torch.manual_seed(0)
    net = Both()
    model, grc = hooked(net, method, find_unused_parameters=True)
    g, d = torch.optim.SGD(net.g.parameters(), 0.1), torch.optim.SGD(net.d.parameters(), 0.1)
    for step in range(6):
        real, z = drawn(8, 20, seed=step) + 1, drawn(8, 16, seed=50 + step)
        if how == "toggled" and not (whole_first and not step):
            net.d.requires_grad_(False)
        g.zero_grad()
        model(True, real, z, how == "detached").backward()
        g.step()
        net.d.requires_grad_(True)
        for _ in range(critics):
            net.g.requires_grad_(how != "toggled")
            d.zero_grad()
            model(False, real, z, False).backward()
            d.step()
        net.g.requires_grad_(True)
    return net, grc


for name, method in METHODS.items():
    for how, whole_first, critics in (
        ("untoggled", False, 1),
        ("toggled", False, 1),
        ("toggled", True, 1),
        ("untoggled", False, 3),
    ):
        (one, grc), (two, its) = one_ddp(method, how, whole_first, critics), one_ddp(method, "detached", False, critics)
        compare(f"GAN in one DDP, {how}, {whole_first}, {critics}, {name}", one, two, (grc, its))


# -- skipped batches --
def spike(method, how, spikes, drops=False):
    net = model = mlp()
    if how == "fsdp":
        fully_shard(net)
        grc = grace.grace_from_params({**method, "communicator": "reducescatter"})
        grace.torch.fsdp(net, grace=grc, rollback="drop" if drops else "keep")
    if how == "ddp":
        model, grc = hooked(net, method)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    if how == "optimizer":
        _, grc = wrapped(optimizer, net.named_parameters(), method)
    for step in range(6):
        if step == 3 and not spikes:
            continue
        optimizer.zero_grad()
        (loss_of(model, step) * (1000 if step == 3 else 1)).backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
        if float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm) < 50:
            optimizer.step()
    return net, grc


for how in ("optimizer", "ddp", "fsdp"):
    for name, method in METHODS.items():
        (one, grc), (two, its) = spike(method, how, True), spike(method, how, False)
        compare(f"a spike is skipped, {how}, {name}", one, two, (grc, its))
dropped, grc = spike(TOPK, "fsdp", True, drops=True)
report = grc.report()
reasons = "; ".join(tensor.reason for tensor in report.tensors)
found["rollback=drop"] = (apart(dropped), report.steps, report.discarded, "residuals were zeroed" in reasons)


def two_models(method, together):
    """GAN of two models under fully_shard: the generator's pass goes through the discriminator."""
    torch.manual_seed(0)
    g, d = nn.Linear(16, 20), nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    graces = []
    for model in (g, d):
        fully_shard(model)
        graces.append(grace.grace_from_params({**method, "communicator": "reducescatter"}))
        grace.torch.fsdp(model, grace=graces[-1])
    its, mine = torch.optim.SGD(g.parameters(), 0.1), torch.optim.SGD(d.parameters(), 0.1)
    for step in range(5):
        z = drawn(8, 16, seed=step)
        mine.zero_grad()
        (d(g(z).detach()).mean() - d(drawn(8, 20, seed=20 + step)).mean()).backward()
        mine.step()
        if together:
            its.zero_grad()
            (-d(g(z)).mean()).backward()
    return d, graces[1]


for name, method in METHODS.items():
    (one, grc), (two, its) = two_models(method, True), two_models(method, False)
    compare(f"GAN under fully_shard, {name}", one, two, (grc, its))


# -- checkpoints of PyTorch --
class App:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def trained(net, optimizer, first, last):
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()
    optimizer.zero_grad()


folders = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folders, 0)
for order in ("one call", "grace first", "grace last"):
    folder = f"{folders[0]}/{order}"
    net = mlp()
    optimizer, grc = wrapped(torch.optim.AdamW(net.parameters(), 1e-2), net.named_parameters(), TOPK)
    trained(net, optimizer, 0, 3)
    parts = {"app": App(net, optimizer)}
    if order == "one call":
        parts["grace"] = grace.torch.CheckpointState(grc)
    dcp.save(parts, checkpoint_id=folder)
    if order != "one call":
        grace.checkpoint.save(grc, folder + "-grace")
    trained(net, optimizer, 3, 6)
    new = mlp()
    again, other = wrapped(torch.optim.AdamW(new.parameters(), 1e-2), new.named_parameters(), TOPK)
    parts = {"app": App(new, again)}
    if order == "one call":
        parts["grace"] = grace.torch.CheckpointState(other)
    if order == "grace first":
        grace.checkpoint.load(other, folder + "-grace")
    dcp.load(parts, checkpoint_id=folder)
    if order == "grace last":
        grace.checkpoint.load(other, folder + "-grace")
    trained(new, again, 3, 6)
    compare(f"torch.distributed.checkpoint, {order}", new, net, (other, grc))


# -- frozen and odd parameters --
class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 8)

    def image(self, x):
        return self.c(torch.tanh(self.a(x)))

    def text(self, x):
        return self.c(torch.tanh(self.b(x)))

    def forward(self, x):
        return self.image(x) + self.text(x)


def towers(method, how):
    torch.manual_seed(0)
    net, grc = Towers(), None
    fully_shard(net)
    register_fsdp_forward_method(net, "image")
    register_fsdp_forward_method(net, "text")
    if method:
        grc = grace.grace_from_params({**method, "communicator": "reducescatter"})
        grace.torch.fsdp(net, grace=grc)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(5):
        optimizer.zero_grad()
        one = net.image if how == "method" or step % 2 else net.text
        (one if how != "whole" else net)(drawn(8, 16, seed=step)).square().mean().backward()
        optimizer.step()
    return net


for how in ("whole", "method", "one tower a step"):
    compare(f"register_fsdp_forward_method, {how}", towers(NONE, how), towers(None, how))


def beside(part):
    net = mlp()
    model = DistributedDataParallel(net)
    optimizer, _ = wrapped(torch.optim.SGD(net.parameters(), 0.1), net.named_parameters(), TOPK)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(part(model), step).backward()
        optimizer.step()


found["DDP beside the optimizer"] = error_of(lambda: beside(lambda model: model))
found["DDP's module alone"] = error_of(lambda: beside(lambda model: model.module))

net = mlp()
groups = [{"params": list(part.parameters())} for part in (net[0], net[2])]
optimizer, grc = wrapped(torch.optim.SGD(groups, 0.1), net.named_parameters(), TOPK)
sent = []
for step in range(4):
    if step == 2:
        del optimizer.param_groups[1]
    net.zero_grad()
    before = grc.report().bytes_sent
    loss_of(net, step).backward()
    sent.append(grc.report().bytes_sent - before)
    last = copy.deepcopy(net[2])
    last.weight.data.copy_(net[2].weight.grad)
    optimizer.step()
found["a removed group"] = (sent, apart(net), apart(last) > 0)


def alone():
    if rank == 0:
        del optimizer.param_groups[0]["params"][0]
    loss_of(net, 9).backward()
    optimizer.step()


def growing(method, passes):
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    if method:
        wrapped(optimizer, net.named_parameters(), method)
    for step, count in enumerate(passes):
        if method:
            optimizer.set_backward_passes_per_step(count)
        optimizer.zero_grad()
        for part in range(count):
            (loss_of(net, 10 * step + part) / count).backward()
        if not method:
            average(net.parameters())
        optimizer.step()
    return net


compare("accumulation that grows", growing(NONE, (1, 1, 2, 4)), growing(None, (1, 1, 2, 4)), limit=1e-6)


def with_wrapper(wrap):
    net = mlp()
    model = DistributedDataParallel(net)
    model.register_comm_hook(grace.grace_from_params(TOPK), wrap(grace.torch.ddp_hook))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    trained(model, optimizer, 0, 4)
    return net


compare("fp16_compress_wrapper", with_wrapper(fp16_compress_wrapper), with_wrapper(lambda hook: hook), limit=1e-4)


def other_model(how):
    net = mlp()
    model, grc = hooked(net, TOPK) if how == "ddp" else (net, None)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    if how != "ddp":
        _, grc = wrapped(optimizer, net.named_parameters(), TOPK)
    trained(model, optimizer, 0, 1)
    net[2] = nn.Linear(24, 7)
    if how != "ddp":
        grace.torch.release(optimizer)
        grace.torch.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), grc, net.named_parameters())
    else:
        model = DistributedDataParallel(net)
        grace.torch.name_parameters(grc, model)
        model.register_comm_hook(grc, grace.torch.ddp_hook)
        model(drawn(8, 20, seed=1)).sum().backward()


found["another head"] = [error_of(lambda how=how: other_model(how)) for how in ("ddp", "optimizer")]
found["a group removed on one worker alone"] = error_of(alone)


def from_a_set():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    one, two = (list(part.parameters()) for part in net)
    optimizer, _ = wrapped(torch.optim.SGD([*one, *two] if rank else [*two, *one], 0.1), None, TOPK)
    loss_of(net, 0).backward()
    optimizer.step()


found["parameters from a set"] = error_of(from_a_set)

save(out, rank, found)
leave_gloo()
