"""PyTorch's integrations with one worker."""

import copy
import gc
import json
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import grace
from grace.torch.signals import Tracks

TOPK = {"compressor": "topk", "compress_ratio": 0.2, "min_numel": 0}


def network():
    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(20, 30),
        torch.nn.Tanh(),
        torch.nn.Linear(30, 30),
        torch.nn.Tanh(),
        torch.nn.Linear(30, 5),
    ]
    return torch.nn.Sequential(*layers)


def distribute(net, params=TOPK, optimizer=None, **options):
    grc = grace.grace_from_params(params, transport="local")
    optimizer = optimizer or torch.optim.SGD(net.parameters(), 0.1)
    return grc, grace.torch.DistributedOptimizer(optimizer, grc, net.named_parameters(), **options)


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def inputs(seed):
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(seed))


def test_it_is_the_users_own_optimizer():
    net = network()
    own = torch.optim.SGD(net.parameters(), 0.1)
    _, optimizer = distribute(net, optimizer=own)
    assert optimizer is own
    assert type(optimizer) is torch.optim.SGD
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    net(inputs(0)).square().sum().backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert pickle.loads(pickle.dumps(optimizer.state_dict())) == optimizer.state_dict()


def test_nothing_is_kept_of_a_training_that_is_over():
    net = network()
    grc, optimizer = distribute(net)
    net(inputs(0)).square().sum().backward()
    optimizer.step()
    left = [weakref.ref(each) for each in (grc, optimizer, *net.parameters())]
    del net, grc, optimizer
    gc.collect()
    assert [ref() for ref in left] == [None] * len(left)


def test_gradients_are_exchanged_when_backward_returns():
    net = network()
    grc, _ = distribute(net)
    net(inputs(0)).square().sum().backward()
    assert grc.report().bytes_sent > 0
    for p in net.parameters():
        assert torch.count_nonzero(p.grad) <= max(1, int(0.2 * p.numel()))


def test_what_was_sent_and_the_residual_are_the_gradient():
    net, plain = network(), network()
    grc, optimizer = distribute(net)
    net(inputs(0)).square().sum().backward()
    plain(inputs(0)).square().sum().backward()
    assert not any(state["memory/residual"].any() for state in grc.state_dict()["tensors"].values()), "provisional"
    optimizer.step()
    kept = grc.state_dict()["tensors"]
    for name, p in plain.named_parameters():
        residual = kept[name]["memory/residual"].reshape(p.shape)
        assert torch.equal(residual + dict(net.named_parameters())[name].grad, p.grad)


def test_accumulation_exchanges_the_sum_of_the_passes():
    net, plain = network(), network()
    grc, optimizer = distribute(net, {"compressor": "none"}, backward_passes_per_step=3)
    for seed in range(3):
        assert grc.report().bytes_sent == 0
        net(inputs(seed)).square().sum().backward()
        plain(inputs(seed)).square().sum().backward()
    assert grc.report().bytes_sent > 0
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    optimizer.step()
    assert grc.report().steps == 1


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_second_backward_on_top_of_means_is_refused(set_to_none):
    net = network()
    _, optimizer = distribute(net)
    net(inputs(0)).square().sum().backward()
    with pytest.raises(RuntimeError, match="backward_passes_per_step"):
        net(inputs(1)).square().sum().backward()
    # zero_grad without a step, as after an overflow, allows the next pass.
    net = network()
    grc, optimizer = distribute(net)
    for seed in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        net(inputs(seed)).square().sum().backward()
    optimizer.step()
    assert (grc.report().steps, grc.report().discarded) == (1, 2)


def test_a_failed_backward_pass_does_not_spoil_the_next():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("out of memory")

    net, plain = network(), network()
    grc, optimizer = distribute(net)
    _, other = distribute(plain)
    with pytest.raises(RuntimeError, match="out of memory"):
        net(Fails.apply(inputs(0).requires_grad_())).square().sum().backward()
    with pytest.warns(UserWarning, match="failed"):
        optimizer.zero_grad()
    net(inputs(1)).square().sum().backward()
    optimizer.step()
    plain(inputs(1)).square().sum().backward()
    other.step()
    assert grc.report().steps == 1
    assert torch.equal(weights(net), weights(plain))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_give_the_same(reentrant):
    net, plain = network(), network()
    grc, optimizer = distribute(net)
    _, other = distribute(plain)
    for seed in range(3):
        optimizer.zero_grad()
        other.zero_grad()
        x = inputs(seed).requires_grad_()
        hidden = checkpoint(net[:2], x, use_reentrant=reentrant)
        hidden = checkpoint(net[2:4], hidden, use_reentrant=reentrant)
        net[4](hidden).square().sum().backward()
        plain(inputs(seed)).square().sum().backward()
        optimizer.step()
        other.step()
    assert grc.report().steps == 3
    assert torch.equal(weights(net), weights(plain))


def test_a_pass_of_reentrant_checkpoints_alone_is_exchanged_by_the_step():
    net, plain = network(), network()
    grc, optimizer = distribute(net)
    _, other = distribute(plain)
    with pytest.warns(UserWarning, match="use_reentrant=False"):
        checkpoint(net, inputs(0).requires_grad_(), use_reentrant=True).square().sum().backward()
    optimizer.step()
    plain(inputs(0)).square().sum().backward()
    other.step()
    assert grc.report().steps == 1
    assert torch.equal(weights(net), weights(plain))


def test_gradients_that_were_set_by_hand_are_exchanged_by_the_step():
    net = network()
    grc, optimizer = distribute(net)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert grc.report().steps == 1
    assert all(torch.count_nonzero(p.grad) < p.numel() for p in net.parameters() if p.numel() > 1)


def test_a_shared_parameter_is_one_gradient():
    torch.manual_seed(0)
    layer = torch.nn.Linear(20, 20)
    net = torch.nn.Sequential(layer, torch.nn.Tanh(), layer)
    grc, optimizer = distribute(net, {"compressor": "none"})
    net(inputs(0)).square().sum().backward()
    optimizer.step()
    assert grc.names == ["0.weight", "0.bias"]


@pytest.mark.parametrize(
    "option, remedy",
    [
        ({"compression": "fp16"}, "grace_from_params"),
        ({"op": "Sum"}, "averages"),
        ({"num_groups": 3}, "bucket_mb"),
        ({"gradient_predivide_factor": 2.0}, "loss"),
        ({"backward_passes_per_step": 0}, "at least 1"),
    ],
)
def test_arguments_that_would_do_nothing_are_refused(option, remedy):
    with pytest.raises(ValueError, match=remedy):
        distribute(network(), **option)


def test_wrapping_twice_and_unnamed_parameters_are_refused():
    net = network()
    _, optimizer = distribute(net)
    with pytest.raises(ValueError, match="once"):
        distribute(net, optimizer=optimizer)
    net = network()
    grc = grace.grace_from_params(TOPK, transport="local")
    named, optimizer = list(net.named_parameters())[2:], torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(ValueError, match="lacks 2"):
        grace.torch.DistributedOptimizer(optimizer, grc, named)


def test_without_names_parameters_are_numbered():
    net = network()
    grc = grace.grace_from_params(TOPK, transport="local")
    grace.torch.DistributedOptimizer(torch.optim.SGD(net.parameters(), 0.1), grc)
    assert grc.names == [f"parameter{i}" for i in range(6)]


def test_only_complex_and_integer_parameters_are_refused():
    net = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))})
    with pytest.raises(TypeError, match=r"'a' has dtype complex64: train its real view"):
        distribute(net)


def test_a_checkpoint_survives_torch_save(tmp_path):
    net = network()
    grc, optimizer = distribute(net)
    net(inputs(0)).square().sum().backward()
    optimizer.step()
    torch.save(grc.state_dict(), tmp_path / "grace.pt")
    loaded = torch.load(tmp_path / "grace.pt", weights_only=True)
    other, _ = distribute(copy.deepcopy(network()))
    other.load_state_dict(loaded)
    for name, state in grc.state_dict()["tensors"].items():
        for key, value in state.items():
            assert torch.equal(other.state_dict()["tensors"][name][key], value)
    assert other.state_dict()["step"] == 1


def test_training_makes_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net = network()
        _, optimizer = distribute(net, optimizer=torch.optim.Adam(net.parameters()))
        for seed in range(3):
            optimizer.zero_grad()
            net(inputs(seed)).square().sum().backward()
            optimizer.step()


def test_a_trace_shows_what_overlaps(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    grc, optimizer = distribute(net, {"compressor": "powersgd", "min_numel": 0, "bucket_mb": 0.001, "trace": 2})
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(4, 64)).square().sum().backward()
        optimizer.step()
    path = tmp_path / "step.json"
    report = grc.report(trace=path)
    assert set(report.times) == {"compress", "wait", "decompress"}
    assert report.times["compress"] > 0
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in events} == {"backward", "compress", "communicate", "wait", "decompress"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events)
    backward = next(event for event in events if event["cat"] == "backward")
    # The first bucket was sent before the end of the backward pass.
    first = min(event["ts"] for event in events if event["cat"] == "communicate")
    assert first < backward["ts"] + backward["dur"]
    # At least two buckets, with two rounds each: P and Q.
    assert len({event["name"] for event in events if event["cat"] == "communicate"}) >= 4


def test_a_trace_is_kept_where_it_is_asked_for(tmp_path):
    net = network()
    grc, optimizer = distribute(net)
    net(inputs(0)).square().sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="'trace': 20"):
        grc.report(trace=tmp_path / "step.json")
    assert grc.report().times["compress"] > 0


# -- Muon -----------------------------------------------------------------------------------------------------------
def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(12, 20, bias=False), torch.nn.Tanh(), torch.nn.Linear(20, 8, bias=False))


def passed(model, step):
    """Compute the gradients of a step's batch."""
    x = torch.from_numpy(np.random.default_rng(step).standard_normal((16, 12)).astype(np.float32))
    model.zero_grad()
    (model(x) - x[:, :8]).square().mean().backward()


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch has Muon since 2.9")
def test_muon_steps_along_what_the_exchange_returns():
    """With ef21's top-k, Muon steps as without GRACE if it gets the estimates G = G + top-k(g - G)."""
    models = [layers(), layers()]
    behind, alone = (torch.optim.Muon(model.parameters(), lr=0.05) for model in models)
    params = {"compressor": "topk", "compress_ratio": 0.2, "memory": "ef21", "min_numel": 0}
    grc = grace.grace_from_params(params, transport="local")
    grace.torch.DistributedOptimizer(behind, grc, named_parameters=models[0].named_parameters())
    estimates = [torch.zeros(p.numel()) for p in models[1].parameters()]
    for step in range(5):
        for model in models:
            passed(model, step)
        for p, estimate in zip(models[1].parameters(), estimates, strict=True):
            rest = p.grad.reshape(-1) - estimate
            largest = rest.abs().topk(rest.numel() // 5).indices
            estimate[largest] += rest[largest]
            p.grad = estimate.reshape(p.shape).clone()
        for optimizer in (behind, alone):
            optimizer.step()
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="PyTorch has Muon since 2.9")
def test_muon_inside_local_training():
    """One worker whose outer step lands where its parameters are: as Muon alone."""
    models = [layers(), layers()]
    alone, inner = (torch.optim.Muon(model.parameters(), lr=0.05) for model in models)
    local = grace.local.LocalSGD(grace.grace_from_params({"compressor": "none"}, transport="local"), 2)
    grace.torch.local(inner, local, models[1].named_parameters())
    for step in range(5):
        for model, optimizer in zip(models, (alone, inner), strict=True):
            passed(model, step)
            optimizer.step()
    local.finish()
    assert local.grace.steps == 3
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_step_that_changes_one_weight_of_many_is_seen():
    parameters = [torch.nn.Parameter(torch.ones(10)) for _ in range(5)] + [torch.nn.Parameter(torch.ones(100_000))]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    parameters[-1].grad[77_777] = 0.1
    optimizer = torch.optim.SGD(parameters, 0.1)
    tracks = Tracks()
    for _ in range(2):
        tracks.take(optimizer, parameters)
        assert not tracks.moved()
        optimizer.step()
        assert tracks.moved()
