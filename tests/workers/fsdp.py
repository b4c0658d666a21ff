"""Sharded training over gloo workers: OUT. Saves a dictionary of findings."""

import copy
import sys

import torch
import torch.distributed as dist
from launch import leave_gloo, save
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Shard

import grace
from grace.transports.torch_distributed import TorchDistributedTransport

(out,) = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
found = {}
TOKENS, WIDTH, LENGTH = 64, 32, 16
NONE = {"compressor": "none", "communicator": "reducescatter"}
INT4 = {"compressor": "blockint", "bits": 4, "communicator": "reducescatter"}
INT8 = {"compressor": "blockint", "bits": 8, "block_size": 1024}
DRAWN = {**INT8, "rounding": "stochastic"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)
        h = self.first(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.layers(self.second(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.place = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.output = nn.Linear(WIDTH, TOKENS)

    def forward(self, x):
        h = self.embedding(x) + self.place
        for block in self.blocks:
            h = block(h)
        return self.output(h)


NEXT = torch.softmax(3 * torch.randn(TOKENS, TOKENS, generator=torch.Generator().manual_seed(7)), -1)


def text(seed, rows=8):
    # A Markov chain, which a Transformer can learn.
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, TOKENS, (rows,), generator=generator)]
    for _ in range(LENGTH):
        tokens.append(torch.multinomial(NEXT[tokens[-1]], 1, generator=generator)[:, 0])
    return torch.stack(tokens, 1)


def sharded(policy=None, **options):
    torch.manual_seed(0)
    model = Transformer()
    if policy is not None:
        options["mp_policy"] = policy
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def loss_of(model, tokens):
    return nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def train(model, steps, optimizer=None, first=0, parts=1):
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for part in range(parts):
            model.set_requires_gradient_sync(part + 1 == parts)
            (loss_of(model, text(1000 * step + 10 * part + 100_000 * rank)) / parts).backward()
        optimizer.step()
    return weights(model)


def weights(model):
    return torch.cat([p.to_local().detach().flatten() for p in model.parameters()]).clone().numpy()


def held_out(model):
    with torch.no_grad():
        return sum(loss_of(model, text(-1 - i, 64)).item() for i in range(4)) / 4


def compressed(params, parameters=None, **options):
    grc = grace.grace_from_params(params)
    return grc, grace.torch.fsdp(sharded(**options), grace=grc, parameters=parameters)


# Exact reductions equal FSDP's own.
found["dense"] = train(sharded(), 5)
grc, model = compressed(NONE)
found["none"] = train(model, 5)
found["steps"] = grc.report().steps
grc, model = compressed(NONE)
found["none accumulated"], plain = train(model, 3, parts=2), sharded()
found["dense accumulated"] = train(plain, 3, parts=2)
found["accumulated steps"] = grc.report().steps

# A separate training: loss and bytes. Two workers train to the end, four count bytes.
LONG = 100 if size == 2 else 10
plain = sharded()
train(plain, LONG)
grc, model = compressed(INT4)
train(model, LONG)
report = grc.report()
found["losses"] = (held_out(sharded()), held_out(plain), held_out(model))
found["bytes"] = {t.name: (t.shape, t.method, t.bytes_sent / report.steps) for t in report.tensors}
found["summary"] = (report.bytes_sent, report.steps)

# A sparse method with error feedback; small groups go dense.
grc, model = compressed(
    {"compressor": "topk", "compress_ratio": 0.1, "communicator": "reducescatter", "min_numel": 8000}
)
found["topk"] = train(model, 3 * LONG // 10)
found["topk report"] = [(t.name, t.method) for t in grc.report().tensors]
found["topk loss"] = held_out(model)

# Half precision: FSDP requests means in bfloat16, and sums in scaled float16.
for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    grc, model = compressed(NONE, policy=policy)
    found[name] = train(model, 3)
    found[f"dense {name}"] = train(sharded(policy=policy), 3)

# One worker's gradient overflows: all see it, and no memory changes.
grc, model = compressed(INT4)
optimizer = torch.optim.Adam(model.parameters(), 3e-3)
train(model, 2, optimizer)


def residuals():
    return {
        f"{unit} {key}": value.numpy()
        for unit, cells in grc.state_dict()["tensors"].items()
        for key, value in cells.items()
    }


before = residuals()
optimizer.zero_grad()
(loss_of(model, text(5)) * (float("inf") if rank == 0 else 1.0)).backward()
found["overflow"] = {
    name: bool(p.grad.to_local().isfinite().any()) for name, p in model.named_parameters() if p.to_local().numel()
}
found["overflow memory"] = (before, residuals())


# A run resumed from a checkpoint continues bit for bit, also with parameters that are rounded at random.
def resumed(parameters):
    grc, model = compressed(INT4, parameters)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    train(model, 3, optimizer)
    saved = [
        {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in model.state_dict().items()},
        copy.deepcopy(optimizer.state_dict()),
        grc.state_dict(),
    ]
    straight = train(model, 3, optimizer, first=3)
    grc, model = compressed(INT4, parameters)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    grc.load_state_dict(saved[2])
    return straight, train(model, 3, optimizer, first=3)


found["resumed"] = [resumed(None), resumed(DRAWN)]

# PyTorch's distributed checkpoints: without GRACE's help they would store one worker's tensors for all.
from torch.distributed import checkpoint as dcp


def parts(model, grc):
    return {"model": model.state_dict(), "grace": grace.torch.CheckpointState(grc)}


grc, model = compressed(INT4)
train(model, 3)
wanted = grc.state_dict()["tensors"]
dcp.save(parts(model, grc), checkpoint_id=f"{out}/dcp")
grc, model = compressed(INT4)
dcp.load(parts(model, grc), checkpoint_id=f"{out}/dcp")
have = grc.state_dict()["tensors"]
found["dcp"] = [(wanted[unit][key].numpy(), have[unit][key].numpy()) for unit in wanted for key in wanted[unit]]
found["dcp steps"] = grc.state_dict()["step"]

# HSDP: reductions within pairs of workers are exact, those between pairs are compressed.
if size == 4:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    across = TorchDistributedTransport(mesh["copies"].get_group())
    within = TorchDistributedTransport(mesh["shards"].get_group())
    found["hybrid dense"] = train(sharded(mesh=mesh), 5)
    for name, params in (
        ("none", {"compressor": "none"}),
        ("topk", {"compressor": "topk", "compress_ratio": 0.1}),
    ):
        replicas = grace.grace_from_params(params, transport=across)
        model = grace.torch.fsdp(sharded(mesh=mesh["shards"]), replicas=replicas)
        found[f"hybrid {name}"] = train(model, 5)
        found[f"hybrid {name} steps"] = replicas.report().steps
    both = grace.torch.fsdp(
        sharded(mesh=mesh["shards"]),
        grace=grace.grace_from_params(NONE, transport=within),
        replicas=grace.grace_from_params({"compressor": "none"}, transport=across),
    )
    found["hybrid both"] = train(both, 5)


# Parameters that are not used in some steps or on some workers, frozen ones, and ones that are unfrozen later.
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(11))  # FSDP lists it after the children's parameters
        self.a, self.b, self.c = nn.Linear(11, 13), nn.Sequential(nn.Linear(13, 13), nn.Tanh()), nn.Linear(13, 5)

    def forward(self, x, use_b, use_scale):
        h = torch.tanh(self.a(x * self.scale if use_scale else x))
        return self.c(self.b(h) if use_b else h)


def uses(mode, step, worker):
    if mode == "unused" and step == 2:
        return False, True
    if mode == "by one" and step >= 2:
        return (worker == 0, True) if step == 2 else (True, worker == size - 1)
    return True, True


def branches(mode, params, steps=5, rate=0.1, freezes=("frozen", "unfrozen", "unfrozen block")):
    torch.manual_seed(1)
    model = Branches()
    for p in model.b.parameters():
        p.requires_grad_(mode not in freezes)
    one = copy.deepcopy(model)
    if mode == "unfrozen block":
        fully_shard(model.b)
    fully_shard(model)
    grc = grace.grace_from_params({"communicator": "reducescatter", "min_numel": 0, "timeout": 60.0, **params})
    grace.torch.fsdp(model, grace=grc)
    pairs = list(zip(model.parameters(), one.parameters(), strict=True))
    ours, its = (
        torch.optim.SGD(m.parameters(), rate, momentum=0.9, weight_decay=0.1 if rate else 0.0) for m in (model, one)
    )
    handed = exact = 0.0
    for step in range(steps):
        if mode.startswith("unfrozen") and step == 2:
            model.b.requires_grad_(True)
            one.b.requires_grad_(True)
        ours.zero_grad()
        its.zero_grad()
        for worker in range(size):
            x = torch.randn(7, 11, generator=torch.Generator().manual_seed(10 * step + worker))
            if worker == rank:
                model(x, *uses(mode, step, worker)).square().mean().backward()
            (one(x, *uses(mode, step, worker)).square().mean() / size).backward()
        gradients = [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]
        handed += sum(g.double().sum().item() for g in gradients)
        exact += sum(p.grad.double().sum().item() for p in one.parameters() if p.grad is not None)
        none_of = [p.grad is None for p in model.parameters()], [p.grad is None for p in one.parameters()]
        if params["compressor"] == "none":
            assert none_of[0] == none_of[1], (mode, step, none_of)
        ours.step()
        its.step()
    off = max((p.full_tensor() - q).abs().max().item() for p, q in pairs)
    kept = torch.tensor(0.0, dtype=torch.float64)
    for arrays in grc.state_dict()["tensors"].values():
        for key, array in arrays.items():
            kept += array.double().sum() if key.endswith("residual") else 0
    dist.all_reduce(kept)
    return {"off": off, "lost": exact - handed - kept.item() / size, "steps": grc.report().steps, "exact": exact}


MODES = ("unused", "by one", "frozen", "unfrozen", "unfrozen block")
found["branches"] = {mode: branches(mode, {"compressor": "none"}) for mode in MODES}
topk = {"compressor": "topk", "compress_ratio": 0.1}
found["sparse branches"] = {mode: branches(mode, topk, rate=0.0) for mode in MODES}


# Scaled float16 sums need all parameters on all workers. Here one worker of each group of shards misses some.
half = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}
if size == 4:
    model = fully_shard(Branches(), mesh=mesh["shards"], **half)
    grc = grace.grace_from_params(NONE, transport=within)
    grace.torch.fsdp(model, grace=grc, replicas=grace.grace_from_params({"compressor": "none"}, transport=across))
else:
    model = fully_shard(Branches(), **half)
    grace.torch.fsdp(model, grace=grace.grace_from_params(NONE))
try:
    model(torch.ones(7, 11), rank % 2 == 0, True).square().mean().backward()
except RuntimeError as error:
    found["missing half"] = str(error)


# -- compressed parameters ---------------------------------------------------------------------------------------------
class Uneven(nn.Module):
    """Has shards of different lengths, a matrix of several blocks, vectors and frozen parameters."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(11))
        self.a, self.b, self.c = nn.Linear(11, 301), nn.Linear(301, 13), nn.Linear(13, 1)
        self.b.requires_grad_(False)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x * self.scale)))))


def watched(model):
    """Hooks that record the values of each parameter in each forward pass."""
    seen = {}

    def look(module, inputs):
        for name, p in model.named_parameters():
            if not isinstance(p, torch.distributed.tensor.DTensor):
                seen[name] = p.detach().clone().numpy()

    for module in model.modules():
        module.register_forward_pre_hook(look)
    return seen


def uneven(no_grad, compress_no_grad):
    torch.manual_seed(3)
    model = fully_shard(Uneven())
    grc = grace.grace_from_params(NONE)
    grace.torch.fsdp(model, grace=grc, parameters=INT8, compress_no_grad=compress_no_grad)
    seen, shards = watched(model), {name: p.full_tensor().detach().numpy() for name, p in model.named_parameters()}
    with torch.set_grad_enabled(not no_grad):
        loss = model(torch.ones(2, 11)).sum()
    if not no_grad:
        loss.backward()
    model.reshard()
    kept = {name: p.full_tensor().detach().numpy() for name, p in model.named_parameters()}
    return {"seen": seen, "shards": shards, "kept": kept, "report": grc.report().to_dict()["parameters"]}


found["uneven"] = uneven(False, False)
found["evaluated"], found["evaluated compressed"] = uneven(True, False), uneven(True, True)

# Exact gathers equal FSDP's own.
found["parameters none"] = train(compressed(NONE, {"compressor": "none"})[1], 5)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
found["parameters none bf16"] = train(compressed(NONE, {"compressor": "none"}, policy=policy)[1], 3)

# Backward passes see the same values as forward passes, whether or not parameters are gathered again.
SETTINGS = {
    "plain": (INT8, {}),
    "drawn": (DRAWN, {}),
    "bf16": (DRAWN, {"policy": policy}),
    "accumulated": (DRAWN, {"parts": 2}),
}
found["again"] = {}
for name, (parameters, options) in SETTINGS.items():
    parts = options.get("parts", 1)
    options = {key: value for key, value in options.items() if key != "parts"}
    found["again"][name] = [
        train(compressed(NONE, parameters, **options, reshard_after_forward=again)[1], 3, parts=parts)
        for again in (True, False, *[2] * (size == 4))
    ]

# Parameters that are made on the meta device.
with torch.device("meta"):
    model = Transformer()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
try:
    grace.torch.fsdp(model, grace=grace.grace_from_params(NONE), parameters=INT8)
except ValueError as error:
    found["meta"] = str(error)
model.to_empty(device="cpu")
model.load_state_dict(sharded().state_dict())
grace.torch.fsdp(model, grace=grace.grace_from_params(NONE), parameters=INT8)
found["from meta"] = train(model, 3)


# A frozen parameter of another dtype: FSDP gathers bytes, which stay unchanged.
class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(11, 13)
        self.b = nn.Parameter(torch.randn(13, 3).bfloat16(), requires_grad=False)

    def forward(self, x):
        return self.a(x) @ self.b.float()


mixed = []
for parameters in (None, INT8):
    torch.manual_seed(4)
    model = fully_shard(Mixed())
    grc = grace.grace_from_params(NONE)
    grace.torch.fsdp(model, grace=grc, parameters=parameters)
    model(torch.ones(2, 11)).square().sum().backward()
    mixed.append(model.a.weight.grad.full_tensor().numpy())
found["mixed"], found["mixed report"] = mixed, grc.report().parameters[0].reason

# Both directions compressed: loss and bytes.
if size == 2:
    train(plain, 100, first=100)
    grc, model = compressed(INT4, INT8)
    train(model, 100)
    train(model, 100, first=100)
    report = grc.report()
    found["parameters bytes"] = (report.to_dict()["parameters"], report.steps, str(report))
    found["parameters losses"] = (held_out(plain), held_out(model))
    groups = {"(root)": model, "blocks.0": model.blocks[0], "blocks.1": model.blocks[1]}
    found["shapes"] = {
        name: [list(p.shape) for key, p in group.named_parameters() if group is not model or "blocks" not in key]
        for name, group in groups.items()
    }
else:
    both = grace.torch.fsdp(
        sharded(mesh=mesh["shards"]),
        grace=grace.grace_from_params(NONE, transport=within),
        replicas=grace.grace_from_params({"compressor": "none"}, transport=across),
        parameters=DRAWN,
    )
    seen = watched(both)
    found["hybrid parameters"] = (train(both, 5), seen)

# Unsuitable settings are refused.
refused = {}


def refuse(name, attempt):
    try:
        attempt()
    except (TypeError, ValueError, RuntimeError) as error:
        refused[name] = str(error)


refuse("plain model", lambda: grace.torch.fsdp(Transformer(), grace=grace.grace_from_params(NONE)))
refuse("nothing", lambda: grace.torch.fsdp(sharded()))
refuse("allgather", lambda: grace.torch.fsdp(sharded(), grace=grace.grace_from_params({"compressor": "topk"})))
refuse("scattered copies", lambda: grace.torch.fsdp(sharded(), replicas=grace.grace_from_params(NONE)))
grc, model = compressed(NONE)
model.set_gradient_divide_factor(3.0)
refuse("divide factor", lambda: train(model, 1))

grc, model = compressed(NONE)
with grc.no_sync():
    refuse("no_sync", lambda: train(model, 1))
refuse("no Grace", lambda: grace.torch.fsdp(sharded(), parameters=INT8))
refuse("by worker", lambda: compressed(NONE, {**INT8, "bits": 8 if rank == 0 else 4}))
flat = init_device_mesh("cpu", (1, size), mesh_dim_names=("copies", "shards"))
refuse("two dimensions", lambda: compressed(NONE, INT8, mesh=flat))


class Gather:
    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


grc, model = compressed(NONE, INT8)
model.blocks[1].set_custom_all_gather(Gather())
refuse("replaced", lambda: train(model, 1))
pair = [FSDPMeshInfo(flat[name], 0) for name in ("copies", "shards")]
several = fully_shard(
    nn.Linear(4, 4),
    mesh=flat["shards"],
    shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), pair[p.dim() - 1]),
)
refuse("meshes", lambda: grace.torch.fsdp(several, grace=grace.grace_from_params(NONE), parameters=INT8))
found["refused"] = refused

save(out, rank, found)
leave_gloo()
