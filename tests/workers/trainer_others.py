"""Accelerate, Lightning, Fabric with GRACE on two gloo workers, compared with plain runs: OUT. Saves findings."""

import logging
import sys
from inspect import signature
from pathlib import Path
from shutil import copytree

import torch
from launch import error_of, join_torch, leave_gloo, save
from support.sharding import ON_CPUS
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

out = Path(sys.argv[1])
rank, size = join_torch("torch")

import lightning
from accelerate import Accelerator, DistributedDataParallelKwargs
from lightning.fabric import Fabric
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import grace.torch

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
NONE = {"compressor": "none", "min_numel": 0}
TOPK = {"compressor": "topk", "compress_ratio": 0.1, "memory": "residual", "min_numel": 0}
INT4 = {"compressor": "blockint", "bits": 4, "min_numel": 0}
STEPS = 6
X = torch.randn(192, 20, generator=torch.Generator().manual_seed(1))
Y = X @ torch.randn(20, 3, generator=torch.Generator().manual_seed(2))
BATCHES = DataLoader(TensorDataset(X, Y), 4)
found = {}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3))


def flat(model):
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in whole]).clone()


def loss_of(model, x, y):
    return nn.functional.mse_loss(model(x), y)


# Accelerate: two passes a step, clipping, evaluation in between; checkpoint after the third step.
def accelerated(params=None, first=0, last=STEPS, bare=False, folder=out / "accelerate"):
    handler = DistributedDataParallelKwargs(bucket_cap_mb=1, find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[handler])
    hook = None
    if params is not None:
        hook = grace.torch.AccelerateHook(params, *(() if bare else (accelerator,)))
        accelerator.ddp_handler = hook
    model = net()
    model, optimizer, batches = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 1e-2), BATCHES)
    if first:
        accelerator.load_state(str(folder))
    losses = []
    for number, (x, y) in enumerate(batches):
        if not 2 * first <= number < 2 * last:
            continue
        with accelerator.accumulate(model):
            loss = loss_of(model, x, y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        with torch.no_grad():
            model(X[:4])
        if number == 5 and not first and params is TOPK and not bare:
            accelerator.save_state(str(out / "accelerate"))
            accelerator.wait_for_everyone()
    accelerator.free_memory()
    return flat(model), losses, hook, model


own, _, _, plain = accelerated()
none, _, hook, model = accelerated(NONE)
options = "find_unused_parameters", "bucket_bytes_cap"
found["accelerate none"] = (torch.equal(own, none), hook.grace.steps, hook.grace.names)
found["accelerate options"] = all(getattr(model, key) == getattr(plain, key) for key in options)
_, losses, hook, _ = accelerated(INT4, last=24)
report = hook.grace.report()
found["accelerate int4"] = (losses[0], losses[-1], report.bytes_dense / report.bytes_sent)
whole, _, hook, _ = accelerated(TOPK)
resumed, _, again, _ = accelerated(TOPK, first=3)
norms = [[each.residual_norm for each in one.grace.report().tensors] for one in (hook, again)]
found["accelerate resumed"] = (torch.equal(whole, resumed), again.grace.steps, norms[0] == norms[1])
found["accelerate norms"] = norms[0]
found["accelerate bare"] = torch.equal(accelerated(TOPK, bare=True)[0], whole)
found["accelerate files"] = sorted(each.name for each in (out / "accelerate" / "grace").glob("*/*"))
if rank == 0:  # a checkpoint of a training with a single worker
    copytree(out / "accelerate", out / "alone", ignore=lambda folder, names: ["grace"])
    alone = grace.grace_from_params(TOPK, "local")
    ones = {name: torch.ones_like(p) for name, p in net().named_parameters()}
    alone.build(ones)
    alone.step(ones)
    grace.checkpoint.save(alone, out / "alone" / "grace", keep=0)
torch.distributed.barrier()
_, _, hook, _ = accelerated(TOPK, first=3, last=3, folder=out / "alone")
found["accelerate one to two"] = (hook.grace.steps, [each.residual_norm for each in hook.grace.report().tensors])
accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="fp16")])
found["accelerate hook"] = error_of(grace.torch.AccelerateHook, TOPK, accelerator)
found["accelerate local"] = error_of(grace.torch.AccelerateHook, {"local": {"sync_every": 2}, "compressor": "none"})


# Lightning.
class Module(lightning.LightningModule):
    def __init__(self, bypass=False):
        super().__init__()
        self.net, self.losses, self.bypass = net(), [], bypass

    def training_step(self, batch, number):
        loss = loss_of(self.net, *batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, number):
        self.log("seen", loss_of(self.net, *batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


class Logged(lightning.pytorch.loggers.logger.DummyLogger):
    def __init__(self):
        super().__init__()
        self.lines = []

    def log_metrics(self, metrics, step=None):
        self.lines.append((step, dict(metrics)))


class Sharded(Module):
    def configure_model(self):
        for module in (self.net[0], self.net[2], self.net):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])


def lit(params=None, epochs=2, resume=None, checkpoints=None, again=False, kind=Module, strategy="ddp"):
    module, logger = kind(), Logged()
    callback = None if params is None else grace.torch.LightningCallback(params)
    callbacks = [callback] if callback else []
    if checkpoints:
        each = {"save_top_k": -1, "save_on_train_epoch_end": True}
        callbacks.append(lightning.pytorch.callbacks.ModelCheckpoint(out / checkpoints, "{step}", **each))
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=strategy,
        callbacks=callbacks,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        val_check_interval=4,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        log_every_n_steps=2,
        logger=logger,
        enable_checkpointing=bool(checkpoints),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
    )
    safe = {"weights_only": True} if "weights_only" in signature(trainer.fit).parameters else {}  # since Lightning 2.6
    trainer.fit(module, DataLoader(TensorDataset(X[:48], Y[:48]), 4), BATCHES, ckpt_path=resume, **safe)
    if again:
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, DataLoader(TensorDataset(X[:48], Y[:48]), 4))
    return flat(module), module.losses, callback, logger.lines


own, *_ = lit()
none, _, callback, _ = lit(NONE)
found["lightning none"] = (torch.equal(own, none), callback.grace.steps, callback.grace.names)
_, losses, callback, lines = lit(INT4, 8)
report = callback.grace.report()
logged = [(step, line["grace_ratio"], line["grace_bytes_sent"]) for step, line in lines if "grace_ratio" in line]
found["lightning int4"] = (losses[0], losses[-1], report.bytes_dense / report.bytes_sent, report.bytes_sent, logged)
whole, _, callback, _ = lit(TOPK, checkpoints="lightning")
resumed, losses, again, _ = lit(TOPK, resume=out / "lightning" / "step=3.ckpt")
norms = [[each.residual_norm for each in one.grace.report().tensors] for one in (callback, again)]
found["lightning resumed"] = (torch.equal(whole, resumed), again.grace.steps, norms[0] == norms[1], len(losses))
own, *_ = lit(again=True)
none, _, callback, _ = lit(NONE, again=True)
found["lightning again"] = (torch.equal(own, none), callback.grace.steps)
lit(epochs=1, checkpoints="own")
found["lightning foreign"] = error_of(lit, TOPK, resume=out / "own" / "step=3.ckpt")


# FSDP2, by ModelParallelStrategy.
def sharded(*args, **options):
    return lit(*args, **options, kind=Sharded, strategy=ModelParallelStrategy(2, 1))


if ON_CPUS:
    own, *_ = sharded()
    none, _, callback, _ = sharded(NONE)
    found["lightning fsdp none"] = (torch.equal(own, none), callback.grace.steps, callback.grace.names)
    params = {**TOPK, "parameters": {"compressor": "blockint", "bits": 8}}
    whole, _, callback, _ = sharded(params, checkpoints="sharded")
    resumed, _, again, _ = sharded(params, resume=out / "sharded" / "step=3.ckpt")
    found["lightning fsdp resumed"] = (torch.equal(whole, resumed), again.grace.steps, callback.grace.report().ratio)
    found["lightning mesh"] = error_of(lit, NONE, kind=Sharded, strategy=ModelParallelStrategy(1, 2))

# Fabric.
fabric = Fabric(accelerator="cpu", devices=size, strategy="ddp")
fabric.launch()


def fabricated(params=None, first=0):
    model = net()
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), 1e-2))
    grc = None if params is None else grace.torch.compress(model, params)
    parts = {"model": model, "optimizer": optimizer}
    if grc is not None:
        parts["grace"] = grace.torch.GatheredState(grc)
    if first:
        fabric.load(out / "fabric.ckpt", parts)
    for number, (x, y) in enumerate(DataLoader(TensorDataset(X[rank::2], Y[rank::2]), 4)):
        if not 2 * first <= number < 2 * STEPS:
            continue
        if number == 6 and not first and params is TOPK:
            fabric.save(out / "fabric.ckpt", parts)
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            fabric.backward(loss_of(model, x, y))
        if number % 2:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                model(X[:4])
            model.train()
    return flat(model), grc


own, _ = fabricated()
none, grc = fabricated(NONE)
found["fabric none"] = (torch.equal(own, none), grc.steps, grc.names)
whole, grc = fabricated(TOPK)
resumed, again = fabricated(TOPK, 3)
found["fabric resumed"] = (torch.equal(whole, resumed), again.steps)
found["fabric ratio"] = grc.report().ratio


# A loss scaler skips the second of three steps, in which worker 0's loss is not finite.
def scaled(losses):
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    grc = grace.torch.compress(model, TOPK)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in losses:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, X[rank::2], Y[rank::2]) * (factor if rank == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update(8.0)  # keep the scale: residuals have the scale of the loss
    return flat(model), [each.residual_norm for each in grc.report().tensors], grc.steps


skipped, plain = scaled([1.0, float("inf"), 1.0]), scaled([1.0, 1.0])
found["skipped"] = (torch.equal(skipped[0], plain[0]), skipped[1] == plain[1], skipped[2])

# Unsuitable settings: all workers refuse them.
found["plain"] = error_of(grace.torch.compress, net(), TOPK)
found["data parallel"] = error_of(grace.torch.compress, nn.DataParallel(net()), TOPK)


class Engine(nn.Module):
    """A stand-in for DeepSpeed's engine, which holds the model and averages gradients itself."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class OwnEngine(lightning.pytorch.strategies.DDPStrategy):
    """A stand-in for Lightning's DeepSpeedStrategy, whose wrapper is not DDP."""

    def _setup_model(self, model):
        return Engine(model)


hook = grace.torch.AccelerateHook(TOPK)
found["accelerate engine"] = error_of(hook.register_comm_hook, Engine(net()))
found["lightning engine"] = error_of(lit, TOPK, strategy=OwnEngine())
found["no model"] = error_of(grace.torch.compress, [net()], TOPK)
model = nn.parallel.DistributedDataParallel(net())
optimizer = torch.optim.SGD(model.parameters(), 0.1)
grace.torch.compress(model, NONE)
loss_of(model.module, X, Y).backward()
other = torch.nn.Linear(2, 2)
other(torch.ones(1, 2)).sum().backward()
found["another"] = error_of(torch.optim.SGD(other.parameters(), 0.1).step)
found["bypass"] = error_of(optimizer.step)
save(out, rank, found)
leave_gloo()
