"""Four workers as one pipeline and as two pipelines of two, under torch's schedules: OUT. Saves findings."""

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from launch import join_torch, save
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate

from grace.torch import Boundary, PipelineStage

(out,) = sys.argv[1:]
rank, size = join_torch("torch")
halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
half = halves[rank // 2]
WIDTH, BATCH, CHUNKS, CPU = 512, 16, 4, torch.device("cpu")
INT8 = {"compressor": "blockint", "bits": 8}
NONE = {"forward": None, "backward": None}
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V = ("ZBVZeroBubble", "DualPipeV")


def part(index):
    """The module of a stage."""
    torch.manual_seed(index)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())


def loss(output, target):
    return (output - target).square().mean()


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


class Run:
    """A pipeline under a schedule, with torch's stages or GRACE's."""

    def __init__(self, name, group=None, ours=None, part=part, chunks=CHUNKS):
        self.me, ranks = dist.get_rank(group), dist.get_world_size(group)
        each = 2 if name in LOOPED + V else 1
        self.count = each * ranks
        mine = [self.me, 2 * ranks - 1 - self.me] if name in V else [self.me + i * ranks for i in range(each)]
        make = TorchStage if ours is None else PipelineStage
        self.modules = [part(index) for index in mine]
        self.stages = [
            make(module, index, self.count, CPU, group=group, **(ours or {}))
            for index, module in zip(mine, self.modules, strict=True)
        ]
        self.first, self.last = 0 in mine, self.count - 1 in mine
        kind = getattr(schedules, f"Schedule{name}")
        self.schedule = kind(self.stages if each > 1 else self.stages[0], chunks, loss_fn=loss)

    def step(self, number, ids=None, train=True):
        """One step of plain gradient descent: the mean loss, and all gradients."""
        x, y = batch(number)
        if ids is not None:
            for stage in self.stages:
                stage.sample_ids = ids
        losses = []
        for module in self.modules:
            module.zero_grad()
        run = self.schedule.step if train else self.schedule.eval
        arguments = [x] if self.first else []
        kept = {"target": y, "losses": losses} if self.last else {}
        found = run(*arguments, **kept)
        gradients = [p.grad.numpy().copy() for m in self.modules for p in m.parameters()] if train else found
        if train:
            with torch.no_grad():
                for module in self.modules:
                    for p in module.parameters():
                        p -= 0.1 * p.grad
        return (torch.stack(losses).mean().item() if losses else None), gradients

    def bytes(self):
        return [vars(edge) for stage in self.stages for edge in stage.report().edges]


def refused(act):
    """The type and text of the error that a call raises."""
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)


found = {"equal": {}, "int8": {}, "first": {}, "refused": {}}

# Without compression: results equal those of torch's stage, bit for bit, under each schedule. DualPipeV needs 2
# micro-batches per rank.
for group, ranks in ((None, 4), (half, 2)):
    for name in ("GPipe", "1F1B", *LOOPED, *V):
        chunks = 2 * ranks if name in V else CHUNKS
        runs = [Run(name, group, ours, chunks=chunks) for ours in (None, NONE)]
        steps = [[run.step(number) for run in runs] for number in range(2)]
        same = all(
            a[0] == b[0] and all(np.array_equal(x, y) for x, y in zip(a[1], b[1], strict=True)) for a, b in steps
        )
        found["equal"][name, ranks] = same

# With eight bits both ways: the losses of 15 steps, and the bytes.
for name in ("GPipe", "1F1B", "Interleaved1F1B"):
    runs = [Run(name, half, ours) for ours in (None, {"forward": INT8, "backward": INT8, "debug": False})]
    losses = [[run.step(number)[0] for run in runs] for number in range(15)]
    found["int8"][name] = losses, runs[1].bytes()

# The gradients of a pipeline of two, and those of autograd through a Boundary.
TOPK = {"compressor": "topk", "compress_ratio": 0.1}
B4 = {"compressor": "blockint", "bits": 4}
RANDOM = {**B4, "rounding": "stochastic"}
WHOLE = {**B4, "block_size": 0}
CASES = {
    "int8": {},
    "4 bits, scale of an example": {"forward": WHOLE, "backward": WHOLE},
    "random": {"forward": RANDOM, "backward": RANDOM, "seed": 7},
    "topk": {"forward": TOPK, "backward": TOPK},
    "same mask": {"forward": TOPK, "same_mask": True},
    "ef": {"forward": TOPK, "backward": TOPK, "feedback": "ef"},
    "ef21": {"forward": TOPK, "backward": B4, "feedback": "ef21"},
    "aq": {"forward": B4, "feedback": "aq", "samples": 40},
    "aq in a file": {"forward": B4, "feedback": "aq", "samples": 40, "storage": str(Path(out, "rows"))},
    "aq, float32": {"forward": B4, "feedback": "aq", "samples": 40, "stored": "float32"},
    "fp16": {"forward": "fp16", "backward": "fp16"},
}
IDS = [np.arange(16), np.arange(8, 24), np.arange(16)[::-1].copy(), np.r_[0:12, 30:34]]
for number, (name, case) in enumerate(CASES.items()):
    settings = {**case, "debug": number % 2 == 0}
    aq = case.get("feedback") == "aq"
    run = Run("1F1B", half, settings)
    if run.first:
        before, after = part(0), part(1)
        boundary = Boundary(**{**case, **({"storage": Path(out, f"alone{rank}")} if "storage" in case else {})})
    same = []
    for step in range(4):
        ids = IDS[step] if aq else None
        _, gradients = run.step(step, ids)
        if run.first:
            before.zero_grad()
            after.zero_grad()
            x, y = batch(step)
            for chunk, (xs, ys) in enumerate(zip(x.tensor_split(CHUNKS), y.tensor_split(CHUNKS), strict=True)):
                boundary.microbatch = chunk
                boundary.sample_ids = np.array_split(ids, CHUNKS)[chunk] if aq else None
                loss(after(boundary(before(xs))), ys).backward()
            with torch.no_grad():
                for p in (*before.parameters(), *after.parameters()):
                    p.grad /= CHUNKS
                    p -= 0.1 * p.grad
            mine = [p.grad.numpy() for p in before.parameters()]
            same.append(all(np.array_equal(a, b) for a, b in zip(mine, gradients, strict=True)))
    if run.first:
        found["first"][name] = same, run.bytes(), [vars(each) for each in boundary.report().edges]

# Evaluation: compressed, without feedback and without a change of state.
for name, settings in (("compressed", {"forward": TOPK}), ("plain", {"forward": TOPK, "compress_in_eval": False})):
    run = Run("GPipe", half, {**settings, "feedback": "ef21"})
    run.step(0)
    state = run.stages[0].state_dict()
    _, given = run.step(1, train=False)
    after = run.stages[0].state_dict()
    tensors = [p.detach().clone() for p in run.modules[0].parameters()]
    both = [None, None]
    dist.all_gather_object(both, tensors, half)
    if run.last:
        first = part(0)
        with torch.no_grad():
            for p, value in zip(first.parameters(), both[0], strict=True):
                p.copy_(value)
            boundary = Boundary(**settings, feedback="ef21").eval()
            expected = run.modules[0](boundary(first(batch(1)[0])))
        # A batched product may be rounded differently from those of its parts.
        found[f"eval, {name}"] = torch.allclose(given, expected, rtol=1e-5, atol=1e-6)
    found[f"state after eval, {name}"] = str(state) == str(after)

# A pipeline continues from a state.
for name, settings in (("ef21", {"forward": TOPK, "backward": B4, "feedback": "ef21"}), ("aq", CASES["aq"])):
    run = Run("1F1B", half, settings)
    ids = IDS if name == "aq" else [None] * 4
    for step in range(2):
        run.step(step, ids[step])
    again = Run("1F1B", half, settings)
    again.modules[0].load_state_dict(run.modules[0].state_dict())
    path = Path(out, f"state{rank}.pt")
    torch.save(run.stages[0].state_dict(), path)
    again.stages[0].load_state_dict(torch.load(path, weights_only=True))
    both = [[r.step(step, ids[step]) for step in (2, 3)] for r in (run, again)]
    found[f"resumed, {name}"] = all(
        np.array_equal(x, y) for a, b in zip(*both, strict=True) for x, y in zip(a[1], b[1], strict=True)
    )


# Several outputs: one has integers and is not compressed; one does not depend on the parameters.
class Several(torch.nn.Module):
    def __init__(self, index):
        super().__init__()
        self.first, self.inside = index == 0, part(index)

    def forward(self, x, marks=None, other=None):
        if self.first:
            return self.inside(x), (x[:, :8] > 0).long(), x[:, :WIDTH] * 2
        return self.inside(x) * marks.float().mean() + other


run = Run("1F1B", half, {"debug": True}, part=Several)
reference = Run("1F1B", half, None, part=Several)
found["several"] = [[r.step(step)[0] for step in range(3)] for r in (run, reference)], run.bytes()

# Refusals: on all ranks, before anything is sent.
run = Run("1F1B", None, {"forward": {**B4, "bits": 4 if rank < 2 else 8}})
found["refused"]["settings"] = refused(lambda: run.step(0))
run = Run("1F1B", None, CASES["aq"])
found["refused"]["no ids"] = refused(lambda: run.step(0))
found["refused"]["twice"] = refused(lambda: run.step(0, np.zeros(16, int)))
found["refused"]["beyond"] = refused(lambda: run.step(0, np.arange(30, 46)))
found["refused"]["floats"] = refused(lambda: run.step(0, np.arange(16.0)))
run.step(0, IDS[0])  # the pipeline still works
run = Run("1F1B", half, {})
found["refused"]["state"] = refused(lambda: run.stages[0].load_state_dict({}))
found["refused"]["variable length"] = refused(lambda: Run("1F1B", half, {"forward": "threshold"}))
mesh = DeviceMesh("cpu", list(range(size)))
outputs = [DTensor.from_local(torch.ones(4), mesh, [Replicate()])]
# private names of PyTorch: up to 2.14, and from 2.15 on
for name, value in {"fwd_cache": (outputs, []), "_forward_chunk_states": SimpleNamespace(live_outputs=outputs)}.items():
    if hasattr(run.stages[0], name):
        getattr(run.stages[0], name)[0] = value
found["refused"]["DTensor"] = refused(lambda: run.stages[0].get_fwd_send_ops(0))

# Last: worker 3's buffer is corrupted. It raises an error and ends; the others must fail instead of waiting for it.
run = Run("1F1B", None, {"forward": B4, "feedback": "ef21", "debug": True})
run.step(0)
if rank == 3:
    next(iter(run.stages[0]._ends["forward", False]._state.values()))["estimate"][5] += 1
began = time.monotonic()
found["disturbed"] = refused(lambda: run.step(1))
found["seconds"] = time.monotonic() - began
save(out, rank, found)
sys.stdout.flush()
os._exit(0)  # the connections are broken
