"""Training loops as users write them, over two workers: OUT TRANSPORT. Saves the results of each."""

import copy
import io
import sys
import warnings

import torch
from launch import error_of, join_torch, leave_gloo, save

out, transport = sys.argv[1:]
rank, size = join_torch(transport)

import grace

found = {}
TOPK = {"compressor": "topk", "compress_ratio": 0.02, "min_numel": 0, "timeout": 60.0}
DENSE = {"compressor": "none", "timeout": 60.0}
METHODS = {
    "none": DENSE,
    "topk": TOPK,
    "powersgd": {"compressor": "powersgd", "compress_rank": 1, "min_numel": 0},
    "efsignsgd": {"compressor": "efsignsgd", "min_numel": 0},
}
warnings.simplefilter("ignore")


def linear(inputs=40, outputs=40, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Linear(inputs, outputs)


def batch(step, worker=rank, width=40):
    return torch.randn(8, width, generator=torch.Generator().manual_seed(10 * step + worker))


def distribute(net, params=TOPK, optimizer=None, lr=0.1, **options):
    grc = grace.grace_from_params(params)
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr)
    return grc, grace.torch.DistributedOptimizer(optimizer, grc, net.named_parameters(), **options)


def weights(*nets):
    return torch.cat([p.detach().flatten().double() for net in nets for p in net.parameters()]).numpy().copy()


def residual(grc):
    return {name: state.get("memory/residual") for name, state in grc.state_dict()["tensors"].items()}


def alike(one, two):
    """Whether the residuals of two Graces are equal to the bit."""
    first, second = residual(one), residual(two)
    return first.keys() == second.keys() and all(
        torch.equal(first[k], second[k]) for k in first if first[k] is not None
    )


def situation(function):
    found[function.__name__] = function()


def gan(params, frozen, penalty=False, quiet=False, ddp=False, passes=1, clear="zero_grad"):
    """A GAN; the generator's loss passes through the discriminator. ``frozen``: this gives the latter no gradients."""
    generator, critic = linear(16, 40), torch.nn.Sequential(linear(40, 40, 1), torch.nn.Tanh(), linear(40, 1, 2))
    plain = critic
    if ddp:
        critic = torch.nn.parallel.DistributedDataParallel(critic)
        grc = grace.grace_from_params(params)
        critic.register_comm_hook(grc, grace.torch.ddp_hook)
        second = torch.optim.SGD(critic.parameters(), 0.05)
    else:
        grc, second = distribute(critic, params, lr=0.05, backward_passes_per_step=passes)
    _, first = distribute(generator, params, lr=0.05)
    for step in range(6):
        real, noise = batch(step), batch(100 + step, width=16)
        for each in critic.parameters():
            if clear == "data" and each.grad is not None:
                each.grad.data.zero_()
            if clear == "none":
                each.grad = None
        if clear == "zero_grad":
            second.zero_grad()
        losses = [(critic(real) - 1).square().mean(), critic(generator(noise).detach()).square().mean()]
        if penalty:  # penalty on the gradient with respect to the input
            x = real.clone().requires_grad_()
            (slope,) = torch.autograd.grad(plain(x).sum(), x, create_graph=True)
            losses[0] = losses[0] + (slope.norm(dim=1) - 1).square().mean()
        if passes == 2:
            for loss in losses:
                loss.backward()
        else:
            sum(losses).backward()
        second.step()
        first.zero_grad()
        plain.requires_grad_(not frozen)
        if quiet:
            with second.no_sync():
                (plain(generator(noise)) - 1).square().mean().backward()
        else:
            ((plain if frozen else critic)(generator(noise)) - 1).square().mean().backward()
        first.step()
        plain.requires_grad_(True)
    return weights(generator, plain), grc


for kind, params in METHODS.items():
    expected, frozen = gan(params, frozen=True)
    reached, grc = gan(params, frozen=False)
    report = grc.report()
    found[f"gan {kind}"] = (reached, expected, report.steps, alike(grc, frozen), report.discarded)
for name, options in {
    "a gradient penalty": {"penalty": True},
    "no_sync": {"quiet": True},
    "two passes": {"passes": 2},
    "gradients removed by hand": {"clear": "none"},
    "gradients zeroed through data": {"clear": "data"},
    **({"ddp": {"ddp": True}} if transport == "torch" else {}),
}.items():
    expected, frozen = gan(TOPK, True, **options)
    reached, grc = gan(TOPK, False, **options)
    found[f"gan, {name}"] = (reached, expected, grc.report().steps, alike(grc, frozen), grc.report().discarded)


@situation
def extra_pass_on_worker_0():
    net = linear()
    _, optimizer = distribute(net)

    def train():
        for step in range(4):
            optimizer.zero_grad()
            net(batch(step)).square().mean().backward()
            optimizer.step()
            if step == 1 and rank == 0:
                net(batch(50)).max().backward()
                optimizer.zero_grad()

    return error_of(train)


@situation
def extra_pass_inside_no_sync():
    net = linear()
    grc, optimizer = distribute(net)
    for step in range(4):
        optimizer.zero_grad()
        net(batch(step)).square().mean().backward()
        optimizer.step()
        if rank == 0:
            with optimizer.no_sync():
                net(batch(50)).max().backward()
    return weights(net), grc.report().steps


def by_hand(before):
    """Compare gradients set by hand after a pass that ``before`` discards with a training without this pass."""
    nets, graces = [], []
    for attack in (True, False):
        net = linear()
        grc, optimizer = distribute(net)
        for step in range(3):
            if attack:
                delta = torch.zeros(8, 40, requires_grad=True)
                net(batch(step) + delta).square().mean().backward()
                before(net, optimizer, grc)
            gradients = torch.autograd.grad(net(batch(step)).square().mean(), list(net.parameters()))
            for p, gradient in zip(net.parameters(), gradients, strict=True):
                p.grad = gradient
            optimizer.step()
            optimizer.zero_grad()
        nets.append(weights(net))
        graces.append(grc)
    return (*nets, alike(*graces))


def noise(net, optimizer, grc):
    torch.manual_seed(rank)
    for p in net.parameters():
        p.grad.add_(torch.randn_like(p) * 1e-3)
    optimizer.step()


found["by hand after optimizer.zero_grad"] = by_hand(lambda net, optimizer, grc: optimizer.zero_grad())
found["by hand after model.zero_grad"] = by_hand(lambda net, optimizer, grc: net.zero_grad())
found["by hand, nothing zeroed"] = by_hand(lambda net, optimizer, grc: grc.discard())
for name, before in (("kept", lambda *_: None), ("noise", noise)):
    found[f"by hand, {name}, not discarded"] = error_of(lambda before=before: by_hand(before))


@situation
def means_divided_by_hand():
    net, plain = linear(), linear()
    _, optimizer = distribute(net)
    _, other = distribute(plain)
    for step in range(3):
        for model, each in ((net, optimizer), (plain, other)):
            each.zero_grad()
            model(batch(step)).square().mean().backward()
            for p in model.parameters():
                if model is net:
                    p.grad = p.grad / 2
                else:
                    p.grad.div_(2)
            each.step()
    return weights(net), weights(plain)


def memory_of_the_users(make):
    nets = []
    for clone in (False, True):
        torch.manual_seed(0)
        net = torch.nn.ParameterDict({k: torch.nn.Parameter(torch.randn(64, 64)) for k in "ab"})
        _, optimizer = distribute(net)
        for step in range(3):
            mine = make(net, batch(step, width=64))
            kept = [gradient.clone() for gradient in mine]
            for p, gradient in zip(net.values(), mine, strict=True):
                p.grad = gradient.clone() if clone else gradient
            optimizer.step()
            assert all(map(torch.equal, mine, kept)), "the user's own tensors were written to"
        nets.append(weights(net))
    return tuple(nets)


def shared(net, x):
    return torch.autograd.grad((x @ (net["a"] + net["b"])).square().mean(), list(net.values()))


found["one tensor as two gradients"] = memory_of_the_users(shared)
found["expanded gradients"] = memory_of_the_users(
    lambda net, x: [x.mean().expand(64, 64), x.mean(0, keepdim=True).expand(64, 64)]
)


def accumulation(what, synchronize):
    net, reference = linear(), linear()
    grc, optimizer = distribute(net, DENSE, lr=0.5, backward_passes_per_step=2)
    plain = torch.optim.SGD(reference.parameters(), 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6, enabled=what == "scaler")
    for step in range(5):
        loss = net(batch(step)).square().mean()
        overflow = what == "scaler" and step == 4
        scaler.scale(loss * float("inf") if overflow and rank == 1 else loss).backward()
        sum(reference(batch(step, worker)).square().mean() for worker in range(size)).div(size).backward()
        if step % 2 or step == 4:
            if synchronize:
                optimizer.synchronize()
            scaler.unscale_(optimizer)
            if what == "clip":
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
                torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if not overflow:
                plain.step()
            plain.zero_grad()
    if (
        what == "scaler" and not synchronize
    ):  # only worker 1 saw the overflow; the workers meet again in the next exchange
        for step in range(5, 7):
            net(batch(step)).square().mean().backward()
    return weights(net), weights(reference), grc.report().steps


for what in ("clip", "scaler", "plain"):
    found[f"accumulation {what}"] = accumulation(what, True)
found["accumulation ends early"] = accumulation("plain", False)
for what in ("clip", "scaler"):
    found[f"local {what}"] = error_of(lambda: accumulation(what, False))


@situation
def only_a_new_group_has_gradients():
    net, reference = torch.nn.ModuleList([linear(), linear()]), torch.nn.ModuleList([linear(), linear()])
    net[1].requires_grad_(False)
    _, optimizer = distribute(net, DENSE, torch.optim.SGD(net[0].parameters(), 0.1))
    extra = torch.nn.Linear(40, 40)
    extra.load_state_dict(net[0].state_dict())
    optimizer.add_param_group({"params": list(extra.parameters())})
    extra(batch(0)).square().mean().backward()
    total = [float(torch.nn.utils.clip_grad_norm_(extra.parameters(), 0.01))]
    sum(reference[0](batch(0, w)).square().mean() for w in range(size)).div(size).backward()
    total.append(float(torch.nn.utils.clip_grad_norm_(reference[0].parameters(), 0.01)))
    return total


@situation
def only_unfrozen_parameters_have_gradients():
    net, reference = linear(), linear()
    net.requires_grad_(False)
    _, optimizer = distribute(net, DENSE)
    net.requires_grad_(True)
    net(batch(0)).square().mean().backward()
    total = [float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.01))]
    sum(reference(batch(0, w)).square().mean() for w in range(size)).div(size).backward()
    total.append(float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)))
    optimizer.step()
    return total


@situation
def a_closures_loss_keeps_its_dtype():
    dtypes = []
    for dtype in (torch.float64, torch.float32):
        net = linear().to(dtype)
        _, optimizer = distribute(net, DENSE, torch.optim.LBFGS(net.parameters(), max_iter=3))

        def closure():
            optimizer.zero_grad()
            loss = net(batch(0).to(dtype)).square().mean()
            loss.backward()
            return loss

        dtypes.append(str(optimizer.step(closure).dtype))
    return dtypes


@situation
def recreated_every_epoch():
    reached = []
    first = None
    for released in (False, True):
        net = linear()
        for epoch in range(3):
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            first = optimizer if epoch == 0 else first
            grc, optimizer = distribute(net, optimizer=optimizer)
            for step in range(3):
                optimizer.zero_grad()
                net(batch(10 * epoch + step)).square().mean().backward()
                optimizer.step()
            hooks = len(net.weight._post_accumulate_grad_hooks)
            if released:
                grace.torch.release(optimizer)
        reached.append(weights(net))
        steps = grc.report().steps
        if not released:
            refused = error_of(first.step)
    return (*reached, steps, hooks, refused)


@situation
def one_grace_for_two():
    net, other = linear(), linear()
    grc, optimizer = distribute(net)
    second = torch.optim.SGD(other.parameters(), 0.1)
    refused = error_of(lambda: grace.torch.DistributedOptimizer(second, grc, other.named_parameters()))
    grace.torch.release(optimizer)
    return refused, error_of(lambda: grace.torch.DistributedOptimizer(second, grc, other.named_parameters()))


@situation
def duplicate_names():
    nets = [linear(), linear()]
    optimizer = torch.optim.SGD([p for net in nets for p in net.parameters()], 0.1)
    named = [pair for net in nets for pair in net.named_parameters()]
    return error_of(lambda: grace.torch.DistributedOptimizer(optimizer, grace.grace_from_params(TOPK), named))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, on):
        ctx.on = on
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.on:
            raise RuntimeError("out of memory")
        return gradient, None


def dropped(failing):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(100, 100) for _ in range(4)])
    grc, optimizer = distribute(net, {**TOPK, "bucket_mb": 0.02})
    before = []

    def train():
        for step in range(4):
            optimizer.zero_grad()
            if step == 2:
                before.append((weights(net), residual(grc)))
            hidden = Fails.apply(net[:2](batch(step, width=100)), step == 2 and rank in failing)
            try:
                net[2:](hidden).square().mean().backward()
            except RuntimeError as error:
                if "out of memory" not in str(error):
                    raise
                optimizer.zero_grad()
                continue
            optimizer.step()

    error = error_of(train)
    kept = residual(grc)
    same = all(torch.equal(kept[name], before[0][1][name]) for name in kept)
    return error, bool((weights(net) == before[0][0]).all()) and same, weights(net)


@situation
def a_batch_dropped_on_one_worker():
    return dropped(failing=(1,))


@situation
def a_batch_dropped_on_all_workers():
    return dropped(failing=(0, 1))


@situation
def an_update_by_hand():
    nets = []
    for own in (True, False):
        net = linear()
        _, optimizer = distribute(net)
        for step in range(4):
            optimizer.zero_grad()
            net(batch(step)).square().mean().backward()
            if own:
                for p in net.parameters():
                    p.data.add_(p.grad, alpha=-0.1)
            else:
                optimizer.step()
        nets.append(weights(net))
    return tuple(nets)


@situation
def inner_and_outer_optimizer():
    net, reference = linear(), linear()
    grc, outer = distribute(net, DENSE, torch.optim.SGD(net.parameters(), 0.7, momentum=0.9, nesterov=True))
    plain = torch.optim.SGD(reference.parameters(), 0.7, momentum=0.9, nesterov=True)
    inner = torch.optim.SGD(net.parameters(), 0.1)
    for turn in range(3):
        start = [p.detach().clone() for p in net.parameters()]
        with outer.no_sync():
            for step in range(3):
                inner.zero_grad()
                net(batch(10 * turn + step)).square().mean().backward()
                inner.step()
        for p, before in zip(net.parameters(), start, strict=True):
            p.grad = before - p.detach()
            p.data.copy_(before)
        outer.step()
        outer.zero_grad()
        moved = []
        for worker in range(size):
            local = copy.deepcopy(reference)
            for step in range(3):
                local.zero_grad()
                local(batch(10 * turn + step, worker)).square().mean().backward()
                with torch.no_grad():
                    for p in local.parameters():
                        p -= 0.1 * p.grad
            moved.append(list(local.parameters()))
        for p, *ends in zip(reference.parameters(), *moved, strict=True):
            p.grad = sum(p.detach() - end.detach() for end in ends) / size
        plain.step()
    steps = grc.report().steps

    def unguarded():
        inner.zero_grad()
        net(batch(0)).square().mean().backward()
        inner.step()

    return weights(net), weights(reference), steps, error_of(unguarded)


@situation
def an_optimizer_in_each_backward():
    net, reference = linear(), linear()
    made = {}
    for name, p in net.named_parameters():
        grc = grace.grace_from_params(DENSE)
        made[p] = grace.torch.DistributedOptimizer(torch.optim.SGD([p], 0.1), grc, [(name, p)])

        def step_now(p):
            made[p].step()
            made[p].zero_grad()

        p.register_post_accumulate_grad_hook(step_now)
    plain = torch.optim.SGD(reference.parameters(), 0.1)
    for step in range(3):
        net(batch(step)).square().mean().backward()
        plain.zero_grad()
        sum(reference(batch(step, w)).square().mean() for w in range(size)).div(size).backward()
        plain.step()
    return weights(net), weights(reference), grc.report().steps


@situation
def two_losses_of_disjoint_parts():
    nets = []
    for apart in (True, False):
        net = torch.nn.ModuleList([linear(), linear(seed=1)])
        grc, optimizer = distribute(net)
        for step in range(4):
            optimizer.zero_grad()
            losses = [net[0](batch(step)).square().mean(), net[1](batch(50 + step)).square().mean()]
            if apart:
                for loss in losses:
                    loss.backward()
            else:
                sum(losses).backward()
            optimizer.step()
        nets.append(weights(net))
        nets.append(grc)
    return nets[0], nets[2], alike(nets[1], nets[3]), nets[1].report().steps


@situation
def a_skipped_step_leaves_no_trace():
    nets, graces = [], []
    for skips in (True, False):
        net = linear()
        grc, optimizer = distribute(net)
        for step in range(4):
            if step == 2:
                if not skips:
                    continue
                optimizer.zero_grad()
                (net(batch(step)).square().mean()).backward()
                continue  # finite, but not applied: as after an overflow in another optimizer of the scaler
            optimizer.zero_grad()
            net(batch(step)).square().mean().backward()
            optimizer.step()
        nets.append(weights(net))
        graces.append(grc)
    return (*nets, alike(*graces))


@situation
def sharpness_aware():
    # Two passes per step, the first of which moves the weights (SAM).
    net, reference = linear(), linear()
    _, optimizer = distribute(net, DENSE)
    plain = torch.optim.SGD(reference.parameters(), 0.1)

    def climb(model, sign, gradients):
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.add_(gradient, alpha=0.05 * sign)

    for step in range(3):
        for model, each, workers in ((net, optimizer, [rank]), (reference, plain, range(size))):
            for second in (False, True):
                each.zero_grad()
                sum(model(batch(step, w)).square().mean() for w in workers).div(len(workers)).backward()
                if not second:
                    gradients = [p.grad.clone() for p in model.parameters()]
                climb(model, -1 if second else 1, gradients)
            each.step()
    return weights(net), weights(reference)


@situation
def steps_inside_no_sync_are_local():
    net = linear()
    grc, optimizer = distribute(net)
    with optimizer.no_sync():
        net(batch(0)).square().mean().backward()
        optimizer.step()
    local = linear()
    plain = torch.optim.SGD(local.parameters(), 0.1)
    local(batch(0)).square().mean().backward()
    plain.step()
    return bool((weights(net) == weights(local)).all()), grc.report().steps


@situation
def a_pass_inside_no_sync_on_top_of_means():
    net = linear()
    _, optimizer = distribute(net)

    def train():
        net(batch(0)).square().mean().backward()
        with optimizer.no_sync():
            net(batch(1)).square().mean().backward()
        optimizer.step()

    return error_of(train)


@situation
def no_sync_accumulates_as_ddps():
    net, reference = linear(), linear()
    _, optimizer = distribute(net, DENSE)
    plain = torch.optim.SGD(reference.parameters(), 0.1)
    for step in range(2):
        optimizer.zero_grad()
        with optimizer.no_sync():
            net(batch(2 * step)).square().mean().backward()
        net(batch(2 * step + 1)).square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        batches = [batch(2 * step + part, w) for part in range(2) for w in range(size)]
        sum(reference(x).square().mean() for x in batches).div(size).backward()
        plain.step()
    return weights(net), weights(reference)


@situation
def a_grace_by_itself():
    grc = grace.grace_from_params(TOPK)
    gradients = {"w": batch(0), "b": batch(1)[0]}
    grc.build(gradients)
    with grc.no_sync():
        same = all(torch.equal(grc.step(gradients)[name], gradients[name]) for name in gradients)
    errors = [
        error_of(lambda: grc.step({**gradients, "b": batch(1)})),
        error_of(lambda: grc.step({**gradients, "c": batch(1)})),
    ]
    means = grc.step(gradients)

    def interrupted(*_):
        raise KeyboardInterrupt

    grc.step(gradients)
    apart = grace.grace_from_params(TOPK)
    apart.build(gradients)
    apart.load_state_dict({**apart.state_dict(), "step": 3 * rank})
    return same, errors, means["w"].numpy().copy(), error_of(lambda: apart.step(gradients)), grc.report().steps


@situation
def copies():
    net = linear()
    _, optimizer = distribute(net)
    average = torch.optim.swa_utils.AveragedModel(net)
    net(batch(0)).square().mean().backward()
    optimizer.step()
    average.update_parameters(net)
    return error_of(lambda: copy.deepcopy((net, optimizer))), bool((weights(average.module) == weights(net)).all())


if transport == "torch":
    from torch.nn.parallel import DistributedDataParallel

    @situation
    def ddp_copies():
        net = DistributedDataParallel(linear())
        grc = grace.grace_from_params(TOPK)
        net.register_comm_hook(grc, grace.torch.ddp_hook)
        kept = io.BytesIO()
        reached = []
        for model in (net, copy.deepcopy(net), torch.optim.swa_utils.AveragedModel(net).module):
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for step in range(3):
                optimizer.zero_grad()
                model(batch(step)).square().mean().backward()
                optimizer.step()
            reached.append(weights(model))
        torch.save(net, kept)
        return (*reached, grc.report().steps, kept.tell() > 0)

    @situation
    def hook_and_optimizer():
        net = DistributedDataParallel(linear())
        net.register_comm_hook(grace.grace_from_params(TOPK), grace.torch.ddp_hook)
        net(batch(0)).square().mean().backward()
        return error_of(lambda: distribute(net))

    @situation
    def another_group():
        from grace.transports.torch_distributed import TorchDistributedTransport

        groups = [torch.distributed.new_group([worker]) for worker in range(size)]
        errors = []
        for mine, averaging in ((groups[rank], None), (None, groups[rank]), (groups[rank], groups[rank])):
            net = DistributedDataParallel(linear(), process_group=mine)
            grc = grace.grace_from_params(DENSE, TorchDistributedTransport(averaging))
            net.register_comm_hook(grc, grace.torch.ddp_hook)
            errors.append(error_of(lambda net=net: net(batch(0)).square().mean().backward()))
        return errors

    @situation
    def ddp_accumulates_without_no_sync():
        nets = []
        for hook in (True, False):
            net = DistributedDataParallel(linear())
            if hook:
                net.register_comm_hook(grace.grace_from_params(DENSE), grace.torch.ddp_hook)
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            for step in range(3):
                optimizer.zero_grad()
                for part in range(2):
                    net(batch(2 * step + part)).square().mean().backward()
                optimizer.step()
            nets.append(weights(net))
        return tuple(nets)


save(out, rank, found)
if transport == "torch":
    leave_gloo()
