"""Arguments that integrations reject before they send anything; and Graces made before the process group."""

import pickle
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from launch import TESTS, launch, run

import grace
from grace import grace_from_params, simulate

torch = pytest.importorskip("torch")

import grace.torch  # noqa: E402
from grace.gossip import Gossip  # noqa: E402

DENSE = {"compressor": "none"}


# -- Graces made before the process group ----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def early(tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    run(sys.executable, TESTS / "workers" / "early.py", out, log=out / "output.txt")
    return [pickle.loads((out / f"{rank}.pickle").read_bytes()) for rank in range(2)]


@pytest.mark.processes
@pytest.mark.parametrize("key", ["pickled", "made"])
def test_a_grace_made_before_the_group_finds_its_workers(early, key):
    for rank, worker in enumerate(early):
        assert worker[key][:2] == (2, rank)
    assert np.array_equal(early[0][key][2], early[1][key][2])


@pytest.mark.processes
@pytest.mark.parametrize("key", ["asked early", "counted early", "built early"])
def test_a_grace_that_was_alone_raises_beside_a_group(early, key):
    for worker in early:
        assert worker["asked"] == (0, 1)
        assert worker[key].startswith("RuntimeError: this Grace looked for its workers before there was a group")
        assert "beside a group of 2" in worker[key]
        assert "grc.reset()" in worker[key]


@pytest.mark.processes
def test_reset_goes_on_with_the_group(early):
    for rank, worker in enumerate(early):
        assert worker["alone"] == [float(rank)] * 4
        assert worker["reset"] == (2, [0.5] * 4)


@pytest.mark.processes
def test_a_grace_over_the_local_transport_stays_alone(early):
    for rank, worker in enumerate(early):
        assert worker["local"] == (1, [float(rank)] * 4)


@pytest.mark.processes
def test_communicators_are_checked_against_the_workers_that_were_found(early):
    for worker in early:
        assert worker["fits"] == [0.5] * 4
        assert "node_size=3 does not divide 2 workers" in worker["misfit"]


@pytest.mark.processes
def test_gossip_made_before_the_group_finds_its_neighbours(early):
    for worker in early:
        assert worker["gossip"] == [0.5] * 4


@pytest.mark.processes
def test_a_group_that_was_made_anew_or_belongs_to_another_process_is_not_used(early):
    for worker in early:
        assert "group of another process, from which this one was forked" in worker["forked"]
        for key in ("destroyed", "again"):
            assert worker[key].startswith("RuntimeError: the process group that this Grace was made for is gone")
        assert worker["not forked"] == worker["again reset"] == [0.5] * 4


# -- workers that join early -----------------------------------------------------------------------------------------
@pytest.mark.processes
@pytest.mark.parametrize("compressor", ["none", "signsgd"])
def test_a_worker_in_horovods_join_ends_the_next_exchange_of_all(compressor, tmp_path):
    pytest.importorskip("horovod.torch")
    stays, joins = launch("horovodrun", 2, "joins.py", tmp_path, "horovod", compressor)
    assert stays["steps"] == 2
    assert joins["error"].startswith("HorovodInternalError")
    # With gathers, the joined worker's Horovod may end before it reports the reason.
    reasons = ["a worker has called hvd.join()", *(["HorovodInternalError"] if compressor == "signsgd" else [])]
    assert any(reason in stays["error"] for reason in reasons)


@pytest.mark.processes
def test_ddps_join_divides_by_all_workers_or_is_refused_by_all(tmp_path):
    for worker in launch("torchrun", 2, "joins.py", tmp_path, "torch", "none"):
        assert np.allclose(*worker["all"], atol=1e-6)
        assert "join(divide_by_initial_world_size=False)" in worker["error"]
        assert "leave it out" in worker["error"]


@pytest.mark.processes
def test_a_worker_outside_a_process_set_is_told_so(tmp_path):
    inside, outside = launch("horovodrun", 2, "joins.py", tmp_path, "horovod", "process set")
    assert inside == {"error": "", "world size": 1, "accepted": True, "refused": True}
    assert "ValueError: this worker is not in the process set" in outside["error"]


# -- arguments -------------------------------------------------------------------------------------------------------
def parameters(*tensors):
    return torch.optim.SGD([torch.nn.Parameter(tensor) for tensor in tensors or (torch.zeros(3),)], lr=0.1)


def grc(**params):
    return grace_from_params({**DENSE, **params}, "local")


class Wrapped(torch.optim.Optimizer):
    """An optimizer by class that delegates its steps to another one, like trainers' wrappers."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


WRONG = {
    "swapped": (lambda: grace.torch.DistributedOptimizer(grc(), parameters()), "the arguments are swapped"),
    "class": (lambda: grace.torch.DistributedOptimizer(torch.optim.SGD, grc()), "SGD is a class"),
    "scheduler": (
        lambda: grace.torch.DistributedOptimizer(torch.optim.lr_scheduler.ConstantLR(parameters()), grc()),
        "ConstantLR schedules learning rates: pass the optimizer",
    ),
    "wrapper": (lambda: grace.torch.DistributedOptimizer(Wrapped(parameters()), grc()), "optimizer.optimizer"),
    "apex": (
        lambda: grace.torch.DistributedOptimizer(SimpleNamespace(optimizer=parameters()), grc()),
        "wraps an optimizer: pass the inner one",
    ),
    "schedule-free": (
        lambda: grace.torch.DistributedOptimizer(SimpleNamespace(base=parameters()), grc()),
        "wraps an optimizer: pass the inner one, optimizer.base, and step the wrapper as before",
    ),
    "zero": (
        lambda: grace.torch.broadcast_optimizer_state(SimpleNamespace(optim=parameters())),
        "wraps an optimizer: pass the inner one, optimizer.optim",
    ),
    "averaging": (
        lambda: grace.torch.gossip(SimpleNamespace(base_optimizer=parameters()), Gossip(transport="local")),
        "wraps an optimizer: pass the inner one, optimizer.base_optimizer",
    ),
    "model": (lambda: grace.torch.DistributedOptimizer(torch.nn.Linear(2, 2), grc()), "torch.optim.Optimizer is"),
    "name": (
        lambda: grace.torch.DistributedOptimizer(parameters(), "topk"),
        r"not 'topk': grc = grace.grace_from_params\(\{'compressor': 'topk'\}\)",
    ),
    "dictionary": (
        lambda: grace.torch.DistributedOptimizer(parameters(), {"compressor": "topk"}),
        r"grace.grace_from_params\(\{'compressor': 'topk'\}\)",
    ),
    "none": (lambda: grace.torch.DistributedOptimizer(parameters(), None), "a Grace is needed, not builtins.NoneType"),
    "named module": (
        lambda: grace.torch.DistributedOptimizer(parameters(), grc(), torch.nn.Linear(2, 2)),
        r"named_parameters is a module, Linear: pass model.named_parameters\(\)",
    ),
    "named tensors": (
        lambda: grace.torch.DistributedOptimizer(parameters(), grc(), [torch.zeros(2)]),
        "tensors without names, as model.parameters",
    ),
    "named names": (lambda: grace.torch.DistributedOptimizer(parameters(), grc(), ["weight"]), "no pair of a name"),
    "named text": (lambda: grace.torch.DistributedOptimizer(parameters(), grc(), "weight"), "named_parameters is"),
    "passes": (
        lambda: grace.torch.DistributedOptimizer(parameters(), grc(), backward_passes_per_step=2.0),
        "backward_passes_per_step=2.0 must be an integer",
    ),
    "hook": (lambda: grace.torch.ddp_hook({"compressor": "topk"}, None), "register_comm_hook.grc"),
    "hook's names": (lambda: grace.torch.name_parameters("topk", torch.nn.Linear(2, 2)), "Grace is needed"),
    "hook's model": (lambda: grace.torch.name_parameters(grc(), parameters()), "a model is needed, not SGD"),
    "fsdp": (lambda: grace.torch.fsdp(torch.nn.Linear(2, 2), {"compressor": "topk"}), "a Grace is needed, not dict"),
    "fsdp's model": (lambda: grace.torch.fsdp(grc(), torch.nn.Linear(2, 2)), "a model is needed, not Grace"),
    "gossip": (lambda: grace.torch.gossip(parameters(), grc()), "a grace.gossip.Gossip is needed, not Grace"),
    "gossip's optimizer": (lambda: grace.torch.gossip(Gossip(transport="local"), parameters()), "torch.optim"),
    "broadcast": (lambda: grace.torch.broadcast_parameters({}, 0, "topk"), "a Grace is needed, not 'topk'"),
    "broadcast's optimizer": (lambda: grace.torch.broadcast_optimizer_state({}), "torch.optim.Optimizer is needed"),
    "params": (lambda: grace_from_params("topk"), r"not 'topk': grace_from_params\(\{'compressor'"),
    "params none": (lambda: grace_from_params(None), "params is a dictionary, not None"),
    "params' keys": (lambda: grace_from_params({1: "topk"}), "the keys of params are names, but 1 is int"),
    "transport": (lambda: grace_from_params(DENSE, 2), "transport=2 is int, not a name"),
    "simulated name": (lambda: simulate("topk", [{"w": np.ones(4)}]), "params is a dictionary"),
    "simulated dictionary": (lambda: simulate(DENSE, {"w": np.ones(4)}), "a list with a dictionary for each worker"),
    "simulated arrays": (lambda: simulate(DENSE, [np.ones(4)]), "a list with a dictionary for each worker"),
    "simulated none": (lambda: simulate(DENSE, []), "a list with a dictionary for each worker"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_arguments_of_another_kind_are_refused_with_the_remedy(name):
    call, words = WRONG[name]
    with pytest.raises(TypeError, match=words):
        call()


class Elsewhere(torch.Tensor):
    """A tensor without memory of its own; its values are in another tensor."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=True)

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return "Elsewhere"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(each.inner if isinstance(each, cls) else each for each in args), **(kwargs or {}))


def sharded():
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    return DTensor.from_local(torch.zeros(3), init_device_mesh("cpu", (1,)), [Replicate()])


@pytest.fixture
def group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_shards_are_sent_to_fsdp():
    optimizer = parameters(sharded())
    with pytest.raises(TypeError, match=r"'w' is a DTensor.*grace.torch.fsdp\(model, grc\)"):
        grace.torch.DistributedOptimizer(optimizer, grc(), [("w", optimizer.param_groups[0]["params"][0])])
    with pytest.raises(ValueError, match="'w' is a DTensor, of which this worker holds a shard"):
        grace.torch.broadcast_parameters({"w": sharded()})
    assert not hasattr(optimizer, "_grace")


def inference():
    with torch.inference_mode():
        return torch.nn.Parameter(torch.zeros(3))


KINDS = {
    "subclass": (lambda: Elsewhere(torch.zeros(3)), TypeError, "Elsewhere, a tensor subclass"),
    "meta": (lambda: torch.zeros(3, device="meta"), ValueError, r"meta device, without values: call model.to_empty"),
    "sparse": (lambda: torch.eye(3).to_sparse(), TypeError, "layout torch.sparse_coo"),
    "complex": (lambda: torch.zeros(3, dtype=torch.complex64), TypeError, "train its real view, torch.view_as_real"),
    "float8": (lambda: torch.zeros(3).to(torch.float8_e4m3fn), TypeError, "only float16, bfloat16, float32, float64"),
    "nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        TypeError,
        "nested tensor",
    ),
    "inference": (inference, ValueError, "made in torch.inference_mode"),
}  # fmt: skip


def integrate(integration, optimizer, named):
    if integration == "optimizer":
        grace.torch.DistributedOptimizer(optimizer, grc(), named)
    else:
        grace.torch.gossip(optimizer, Gossip(transport="local"), named)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("integration", ["optimizer", "gossip"])
def test_parameters_of_other_kinds_are_refused_by_name(kind, integration):
    make, error, words = KINDS[kind]
    tensor = make()
    p = tensor if isinstance(tensor, Elsewhere | torch.nn.Parameter) else torch.nn.Parameter(tensor)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3)), p], lr=0.1)
    named = [("first", optimizer.param_groups[0]["params"][0]), ("second", p)]
    with pytest.raises(error, match=f"'second' .*{words}"):
        integrate(integration, optimizer, named)
    assert not p._post_accumulate_grad_hooks
    grace.torch.DistributedOptimizer(parameters(), grc())  # a failed call does not affect later ones


def test_lazy_parameters_are_refused():
    model = torch.nn.LazyLinear(3)
    with pytest.raises(ValueError, match=r"'weight' has no shape yet: call a lazy model on one batch first"):
        grace.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), grc(), model.named_parameters())


def test_an_added_group_is_checked_like_the_first():
    optimizer = grace.torch.DistributedOptimizer(parameters(), grc())
    group = {"params": [torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))]}
    with pytest.raises(TypeError, match="complex64"):
        optimizer.add_param_group(group)


def test_a_generator_that_was_used_up_is_refused():
    model = torch.nn.Linear(2, 2)
    named = model.named_parameters()
    list(named)
    with pytest.raises(ValueError, match="a generator can be used once"):
        grace.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), grc(), named)


@pytest.mark.parametrize("integration", ["optimizer", "gossip"])
def test_two_parameters_of_one_name_are_refused(integration):
    one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], 0.1)
    named = [*one.named_parameters(), *two.named_parameters()]
    with pytest.raises(ValueError, match=r"two parameters are named 'weight'.*prefix"):
        integrate(integration, optimizer, named)


def test_a_dictionary_of_names_and_parameters_is_taken():
    model, made = torch.nn.Linear(2, 2), grc()
    grace.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), made, dict(model.named_parameters()))
    assert made.names == ["weight", "bias"]


# -- defaults and contexts of the process ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "compressor", ["topk", "qsgd", "powersgd", "signsgd", "efsignsgd", "terngrad", "eden", "sketch"]
)
def test_defaults_and_contexts_of_the_process_change_nothing(compressor):
    def trained(disturbed):
        torch.manual_seed(0)
        model = torch.nn.Linear(300, 20)
        x = torch.randn(3, 8, 300)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        made = grc(compressor=compressor, min_numel=0)
        with torch.inference_mode(disturbed):
            grace.torch.DistributedOptimizer(optimizer, made, model.named_parameters())
        if disturbed:
            torch.set_default_dtype(torch.float64)
            torch.set_default_device("meta")
            torch.use_deterministic_algorithms(True)
        for number, batch in enumerate(x):
            optimizer.zero_grad()
            if number % 2:
                model(batch).square().mean().backward()
            else:
                for p in model.parameters():
                    p.grad = batch[0, :20].outer(batch[1]) if p.ndim > 1 else batch[2, :20].clone()
            with torch.inference_mode(disturbed):
                optimizer.synchronize()
            optimizer.step()
        return model.weight.detach().numpy().copy()

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = trained(True)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert np.array_equal(found, trained(False))


# -- Horovod's arguments ---------------------------------------------------------------------------------------------
def test_horovods_defaults_are_accepted_by_its_names():
    hvd = pytest.importorskip("horovod.torch")
    for options in (
        {"op": hvd.Average},
        {"op": None},
        {"op": "average"},
        {"compression": hvd.Compression.none},
        {"process_set": hvd.global_process_set},
        {"gradient_predivide_factor": 1, "num_groups": 0, "groups": None, "sparse_as_dense": True},
    ):
        optimizer = grace.torch.DistributedOptimizer(parameters(), grc(), **options)
        assert hasattr(optimizer, "_grace"), options


@pytest.mark.parametrize(
    "options, words",
    [
        (lambda hvd: {"op": hvd.Sum}, "op=.*GRACE averages"),
        (lambda hvd: {"op": hvd.Adasum}, "op=.*GRACE averages"),
        (lambda hvd: {"op": hvd.Min}, "op=.*GRACE averages"),
        (lambda hvd: {"compression": hvd.Compression.fp16}, "compression=.*such as {'compressor': 'fp16'}"),
        (lambda hvd: {"process_set": hvd.ProcessSet([0])}, "process_set=.*transport=HorovodTransport"),
        (lambda hvd: {"gradient_predivide_factor": 2.0}, "scale the loss"),
        (lambda hvd: {"num_groups": 2}, "bucket_mb"),
    ],
)
def test_what_horovod_would_do_otherwise_is_refused_with_the_place(options, words):
    hvd = pytest.importorskip("horovod.torch")
    with pytest.raises(ValueError, match=words):
        grace.torch.DistributedOptimizer(parameters(), grc(), **options(hvd))
