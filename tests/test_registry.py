"""Building from names and numbers: valid and rejected settings, and their messages."""

import ast
import pkgutil
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pytest
from methods import ROWS, backend, normal, workers

import grace
from grace import Compressor, grace_from_params, register, simulate
from grace.communicators.allgather import Allgather
from grace.compressors.measured.topk import TopK
from grace.core import Combine, Memory
from grace.core.collectives import Broadcast, Gather, Reduce
from grace.core.communicator import Communicator
from grace.core.registry import REGISTRIES, Registry, communicators, compressors, memories
from grace.engine.options import Options
from grace.memories.residual import Residual
from grace.transports.launched import LAUNCHED
from grace.transports.local import LocalTransport, World

PACKAGE = Path(grace.__file__).parent


def build(transport=None, **params):
    return grace_from_params(params, transport or LocalTransport())


# -- names and defaults ---------------------------------------------------------------------------------------------
def test_the_dictionary_of_the_first_grace():
    params = {
        "compressor": "topk",
        "memory": "residual",
        "communicator": "allgather",
        "compress_ratio": 0.3,
        "world_size": 1,
    }
    found = grace_from_params(params)
    assert found.method.compressor == TopK(compress_ratio=0.3)
    assert found.method.memory == Residual()
    assert found.communicator == Allgather()
    assert params["world_size"] == 1, "the caller's dictionary was changed"


def test_a_grace_says_what_it_is(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # a launcher was used, but there is no process group yet
    grc = grace_from_params({"compressor": "eden", "bits": 2, "memory": "residual", "beta": 0.9})
    method = "eden(block_size=4096, bits=2, biased=False) + residual(beta=0.9) + auto"
    assert repr(grc) == f"Grace({method}; workers not known yet; 0 tensors)"
    grc = grace_from_params({"compressor": "none", "policy": "accordion_batch"}, "local")
    grc.build({"w": np.ones((3, 4), "float32")})
    assert str(grc) == "Grace(none + none + allreduce; policy accordion_batch; worker 0 of 1; 1 tensors)"


def test_nothing_given_is_no_compression():
    found = build()
    names = [type(part).__name__ for part in (found.method.compressor, found.method.memory, found.communicator)]
    assert names == ["NoCompression", "NoMemory", "Allreduce"]
    assert found.options == Options()


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_defaults_are_those_that_a_user_should_have(row):
    found = build(**row.params)
    assert found.method.memory.registered_name == row.params.get("memory", found.method.compressor.traits.memory)
    gathers = found.method.compressor.traits.combine is Combine.GATHER
    assert found.communicator.registered_name == ("allgather" if gathers else "allreduce")
    check_fields(found.method.compressor, row.params)


def check_fields(part, params):
    # The parts of a method take their fields from one dictionary.
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(field.default, Compressor):
            default = type(field.default).registered_name
            assert value.registered_name == params.get(field.name, default)
            if field.name in params:
                check_fields(value, params)
            else:
                given = {each.name: params[each.name] for each in fields(value) if each.name in params}
                assert value == replace(field.default, **given)
        else:
            assert value == params.get(field.name, field.default)


@pytest.mark.parametrize(
    "kind, alias, name",
    [
        ("compressor", "nocompression", "none"),
        ("compressor", "bfloat16", "bf16"),
        ("compressor", "scaled_sign", "efsignsgd"),
        ("memory", "powersgd", "residual"),
        ("communicator", "alltoall", "twostage"),
    ],
)
def test_aliases(kind, alias, name):
    registry = {"compressor": compressors, "memory": memories, "communicator": communicators}[kind]
    assert registry[alias] is registry[name]
    assert alias in registry.aliases(name)
    assert alias not in list(registry)
    assert list(registry) == sorted(registry)
    assert len(registry) == len(list(registry))
    rest = {"compressor": "qsgd"} if alias == "alltoall" else {"compressor": "topk"} if kind == "memory" else {}
    assert build(**{**rest, kind: alias}) is not None


def test_options_and_fields_are_told_apart_by_name():
    found = build(compressor="topk", compress_ratio=0.5, beta=0.9, min_numel=5, seed=3, fuse="model", nonfinite="zero")
    assert found.method.compressor.compress_ratio == 0.5
    assert found.method.memory == Residual(beta=0.9)
    assert (found.options.min_numel, found.options.seed) == (5, 3)
    assert (found.options.fuse, found.options.nonfinite) == ("model", "zero")


def test_instances_are_taken_as_they_are():
    compressor, memory, communicator = TopK(0.5), Residual(beta=0.5), Allgather()
    found = build(compressor=compressor, memory=memory, communicator=communicator)
    assert found.method.compressor is compressor
    assert found.method.memory is memory
    assert found.communicator is communicator


# -- refusals -------------------------------------------------------------------------------------------------------
REFUSED = [
    ({"compressor": "topkk"}, r"unknown compressor 'topkk' \(did you mean 'topk'\?\).*Known: 3lc"),
    ({"compressor": "TopK"}, r"unknown compressor 'TopK' \(did you mean 'topk'\?\)"),
    ({"compressor": "zzz"}, r"unknown compressor 'zzz'\. Known"),
    ({"compressor": None}, "unknown compressor None"),
    ({"compressor": Residual()}, "unknown compressor Residual"),
    ({"memory": "residal"}, r"unknown memory 'residal' \(did you mean 'residual'\?\)"),
    ({"communicator": "allgater"}, r"unknown communicator 'allgater' \(did you mean 'allgather'\?\)"),
    ({"compressor": "topk", "compres_ratio": 0.1}, r"unknown key 'compres_ratio' \(did you mean 'compress_ratio'\?\)"),
    ({"compressor": "topk", "min_nummel": 1}, r"unknown key 'min_nummel' \(did you mean 'min_numel'\?\)"),
    ({"compressor": "topk", "wrold_size": 1}, r"did you mean 'world_size'"),
    ({"compressor": "topk", "quantum_num": 7}, r"key 'quantum_num' belongs to compressor 'qsgd', not to 'topk'"),
    ({"compressor": "qsgd", "compress_ratio": 0.1}, r"compressor 'randomk'.* compressor 'topk'.* not to 'qsgd'"),
    ({"compressor": "qsgd", "beta": 0.1}, r"key 'beta' belongs to .*memory 'residual'"),
    ({"compressor": "topk", "compress_ratio": 0}, r"compress_ratio=0 must lie in \(0, 1\]"),
    ({"compressor": "topk", "compress_ratio": 2}, r"compress_ratio=2 must lie in \(0, 1\]"),
    ({"compressor": "randomk", "compress_ratio": -0.1}, r"compress_ratio=-0.1 must lie"),
    ({"compressor": "topk", "compress_ratio": float("nan")}, "compress_ratio=nan must lie"),
    ({"compressor": "topk", "compress_ratio": "0.1"}, "compress_ratio='0.1' must be of type float"),
    ({"compressor": "topk", "compress_ratio": True}, "compress_ratio=True must be of type float"),
    ({"compressor": "qsgd", "quantum_num": 7.0}, "quantum_num=7.0 must be of type int"),
    ({"compressor": "qsgd", "quantum_num": 128}, r"quantum_num=128 must lie in 1 \.\. 127"),
    ({"compressor": "qsgd", "quantum_num": 0}, r"quantum_num=0 must lie"),
    ({"compressor": "qsgd", "bucket_size": 12}, "bucket_size=12 must be a multiple of 8"),
    ({"compressor": "efsignsgd", "block_size": -8}, "block_size=-8 must be a multiple of 8"),
    ({"compressor": "threshold", "threshold": 0.0}, "threshold=0.0 must be a positive number"),
    ({"compressor": "threshold", "threshold": float("inf")}, "threshold=inf must be a positive number"),
    ({"compressor": "powersgd", "compress_rank": 0}, "compress_rank=0 must be at least 1"),
    ({"compressor": "powersgd", "min_rate": 0.0}, "min_rate=0.0 must be positive"),
    ({"compressor": "bf16", "rounding": "up"}, "rounding='up': choose 'nearest' or 'stochastic'"),
    ({"compressor": "signsgd", "packed": 1}, "packed=1 must be of type bool"),
    ({"fuse": "all"}, "fuse='all': choose one of 'tensor', 'bucket', 'model'"),
    ({"nonfinite": "ignore"}, "nonfinite='ignore': choose one of 'poison', 'zero', 'raise'"),
    ({"min_numel": -1}, "min_numel=-1 must be 0 or more"),
    ({"bucket_mb": 0}, "bucket_mb=0 must be positive"),
    ({"bucket_mb": float("nan")}, "bucket_mb=nan must be positive"),
    ({"seed": "7"}, "seed='7' must be of type int"),
    ({"timeout": "600"}, "timeout='600' must be of type float, such as 600.0"),
    ({"compressor": "topk", "communicator": "allreduce"}, "cannot carry 'topk'.*Leave communicator out, or use 'allg"),
    ({"compressor": "signsgd", "communicator": "allreduce"}, "or use 'allgather'; or set packed=False"),
    ({"compressor": "powersgd", "communicator": "allgather"}, "cannot carry 'powersgd'.*Use communicator 'allreduce'"),
    ({"compressor": "powersgd", "communicator": "broadcast"}, "Use communicator 'allreduce'"),
    ({"compressor": "powersgd", "communicator": "twostage"}, "Use communicator 'allreduce'"),
    (
        {"compressor": "efsignsgd", "memory": "onebit_adam", "communicator": "twostage"},
        "cannot carry memory 'onebit_adam' with 'efsignsgd'.*Use a blockwise compressor",
    ),
    ({"compressor": "topk", "communicator": "twostage", "min_shard": -1}, "min_shard=-1 must be 0 or more"),
    ({"compressor": "signsgd", "memory": "residual"}, "use memory 'none' with 'signsgd', or compressor 'efsignsgd'"),
    (
        {"compressor": "randomk", "unbiased_scale": True, "memory": "residual"},
        "memory 'residual' diverges with 'randomk'.*use memory 'none'",
    ),
    ({"compressor": "qsgd", "quantum_num": 1, "memory": "residual"}, "diverges with 'qsgd'"),
    ({"compressor": "chain", "sparsifier": "threshold"}, "sparsifier='threshold' does not send a known number"),
    ({"compressor": "chain", "sparsifier": "qsgd"}, "sparsifier='qsgd' does not .* use 'topk' or 'randomk'"),
    ({"compressor": "chain", "sparsifier": "randomk", "mode": "bernoulli"}, "'randomk' does not .* with mode 'fixed'"),
    ({"compressor": "randomk", "mode": "block"}, "mode='block': choose 'fixed' or 'bernoulli'"),
    ({"compressor": "gradiveq", "slice_size": 0}, r"slice_size=0 must lie in 1 \.\. 4096"),
    ({"compressor": "gradiveq", "train_steps": 1}, "train_steps=1 must be at least 2"),
    ({"compressor": "geometric", "beta": 1.0}, r"beta=1.0 must lie in 1.1 \.\. 16"),
    ({"compressor": "natural_dithering", "base": 1.0}, r"base=1.0 must lie in 1.1 \.\. 16"),
    ({"compressor": "natural_dithering", "base": 4.0, "s": 65}, "up to 2 .. 126: .* fewer levels than s=65"),
    ({"compressor": "natural_dithering", "norm": "l1"}, "norm='l1': choose 'max' or 'l2'"),
    ({"compressor": "adaptive_random", "compress_ratio": 0.0}, "compress_ratio=0.0 must lie"),
    ({"compressor": "adaptive_random", "unbiased": True, "memory": "residual"}, "diverges with 'adaptive_random'"),
    ({"compressor": "chain", "quantizer": "signsgd"}, "quantizer='signsgd' is a vote.* use 'qsgd'"),
    ({"compressor": "chain", "quantizer": "powersgd"}, "quantizer='powersgd' is a vote, has a state.* use 'qsgd'"),
    ({"compressor": "chain", "quantizer": "threshold"}, "quantizer='threshold' .* no fixed number of bytes"),
    ({"compressor": "chain", "quantum_num": 1}, "quantizer='qsgd' with these settings can have an error .* 'qsparse'"),
    (
        {"compressor": "chain", "sparsifier": "randomk", "unbiased_scale": True, "quantizer": "efsignsgd"},
        "needs an unbiased quantizer, such as 'qsgd', and not 'efsignsgd'",
    ),
    ({"compressor": "qsparse", "quantizer": "efsignsgd"}, "quantizer='efsignsgd' use compressor 'chain'"),
    ({"compressor": "adacomp", "memory": "residual"}, "error feedback twice: 'adacomp' .* Use memory 'none'"),
    ({"compressor": "variance", "memory": "residual"}, "error feedback twice: 'variance' .* Use memory 'none'"),
    ({"compressor": "variance", "alpha": 0.0}, "alpha=0.0 must be positive"),
    ({"compressor": "variance", "zeta": 1.5}, r"zeta=1.5 must lie in \(0, 1\]"),
    ({"compressor": "adacomp", "bin_size": 129}, r"bin_size=129 must lie in 2 \.\. 128"),
    ({"compressor": "arctopk", "row_size": 0}, "row_size=0 must lie in 1 .. 16777216"),
    ({"compressor": "arctopk", "row_size": 4, "sketch_size": 5}, r"sketch_size=5 must lie in 1 \.\. row_size=4"),
    ({"compressor": "chunktopk", "chunk_size": 100}, "chunk_size=100 must be a power of two"),
    ({"compressor": "chunktopk", "chunk_k": 12}, "chunk_k=12 must be a multiple of 8"),
    ({"compressor": "chunktopk", "chunk_size": 8, "chunk_k": 16}, r"chunk_k=16 .* 8 \.\. chunk_size=8"),
    ({"compressor": "countsketch", "rows": 4}, "rows=4 must be odd"),
    ({"compressor": "countsketch", "columns": 100}, "columns=100 must be a power of two"),
    ({"compressor": "countsketch", "candidates": 0}, "candidates=0 must be at least 1"),
    ({"compressor": "wangni", "iterations": -1}, "iterations=-1 must lie in 0 .. 100"),
    ({"compressor": "wangni", "memory": "residual"}, "diverges with 'wangni'"),
    ({"compressor": "topk", "selector": "best"}, "selector='best': choose one of 'exact', 'sampled', 'sidco'"),
    (
        {"compressor": "topk", "selector": "sidco", "index_coding": "elias_fano"},
        "with selector='sidco' it varies: use 'int32' or 'bitmap', or selector 'exact' or 'chunk'",
    ),
    ({"compressor": "stc", "selector": "gaussian"}, "'elias_fano' needs a fixed number .* selector 'exact' or 'chunk'"),
    (
        {"compressor": "chain", "selector": "gaussian"},
        "sparsifier='topk' does not .* with selector='gaussian' it varies; use selector 'exact' or 'chunk'",
    ),
    ({"compressor": "sidco", "sid": "gauss"}, "sid='gauss': choose one of 'e', 'gp', 'p'"),
    ({"compressor": "sidco", "stage_rule": "none"}, "stage_rule='none': choose one of 'robust', 'paper'"),
    ({"compressor": "sidco", "stages": -1}, "stages=-1 must lie in 0 .. 100"),
    ({"compressor": "sidco", "q": 0}, "q=0 must lie in 1 .. 16777216"),
    ({"compressor": "sidco", "eps": 1.0}, "eps=1.0 must lie in"),
    ({"compressor": "sidco", "delta1": 1.0}, "delta1=1.0 must lie in"),
    ({"compressor": "sidco", "cap_factor": 0.5}, "cap_factor=0.5 must be at least 1, or 0 for no cap"),
    ({"compressor": "sidco", "closed_form": True}, "closed_form is the gamma law's.* use sid='gp'"),
    ({"compressor": "sidco", "compress_ratio": 0.3, "stages": 2}, "stages=2 is impossible.* Use stages=1"),
    ({"compressor": "sidco", "index_coding": "auto"}, "the others need a fixed number of positions"),
    ({"compressor": "adaq", "compress_ratio": 0}, "compress_ratio=0 must lie"),
    ({"compressor": "dgc", "index_coding": "elias_fano"}, "elias_fano' needs a fixed number of positions"),
    ({"compressor": "gtopk", "communicator": "allgather"}, "cannot carry 'gtopk'.*Use communicator 'allreduce'"),
    ({"world_size": 4}, r"world_size=4, but the transport has 1 worker\(s\): initialise Horovod or torch.distributed"),
    ({"world_size": "1"}, "world_size='1'"),
]  # fmt: skip


@pytest.mark.parametrize("params, message", REFUSED, ids=lambda value: str(value)[:60])
def test_refusals_name_the_remedy(params, message):
    with pytest.raises(ValueError, match=message):
        build(**params)


def test_residual_around_a_mild_quantiser_is_allowed():
    assert build(compressor="qsgd", quantum_num=127, memory="residual").method.memory == Residual()


@pytest.mark.parametrize("compressor", ["topk", "randomk", "threshold", "efsignsgd", "powersgd"])
def test_no_memory_where_one_is_needed_is_warned_of(compressor):
    with pytest.warns(
        UserWarning, match=f"'{compressor}' without error feedback loses what it does not send; use memory 'residual'"
    ):
        build(compressor=compressor, memory="none")


def test_the_warning_points_at_the_caller():
    with pytest.warns(UserWarning, match="without error feedback") as found:
        grace_from_params({"compressor": "topk", "memory": "none"}, LocalTransport())
    assert found[0].filename == __file__


def test_unknown_transport():
    with pytest.raises(ValueError, match="unknown transport 'mpi'; choose one of local, torch, horovod"):
        grace_from_params({}, "mpi")


@pytest.mark.parametrize(
    "key, call",
    [
        ("WORLD_SIZE", "torch.distributed.init_process_group()"),
        ("HOROVOD_SIZE", "hvd.init()"),
        ("OMPI_COMM_WORLD_SIZE", "hvd.init()"),
        ("PMI_SIZE", "hvd.init()"),
        ("SLURM_STEP_NUM_TASKS", "torch.distributed.init_process_group()"),
    ],
)
def test_a_launcher_without_a_transport_is_an_error(monkeypatch, key, call):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(key, "2")
    early = grace_from_params({})  # allowed: a group may be created later, as by Lightning
    for use in (lambda: early.build({"w": np.ones(4)}), lambda: early.world_size, lambda: early.rank):
        with pytest.raises(RuntimeError, match=rf"{key}=2 asks for 2 workers.*call {re.escape(call)}.* before"):
            use()
    assert grace_from_params({}, "local").world_size == 1
    monkeypatch.setenv(key, "1")
    assert grace_from_params({}).world_size == 1


# -- registering ----------------------------------------------------------------------------------------------------
@pytest.fixture
def forget():
    """Remove a test's registrations at its end."""
    registries = REGISTRIES.values()
    assert all(map(list, registries)), "loaded first, so that what is restored is all of it"
    before = [(dict(registry._classes), dict(registry._aliases)) for registry in registries]
    yield
    for registry, (classes, aliases) in zip(registries, before, strict=True):
        registry._classes, registry._aliases = classes, aliases


@pytest.mark.usefixtures("forget")
def test_a_method_of_thirty_lines_works_everywhere():
    @register("meansign")
    @dataclass(frozen=True)
    class MeanSign(Compressor):
        """Signs at a given scale, packed.

        Payload: bits uint8[ceil(n/8)].
        """

        scale: float = 0.5

        def compress(self, x, state, ctx):
            return (ctx.xp.bits.pack(x >= 0),), state

        def decompress(self, payload, ctx):
            signs = ctx.xp.cast(ctx.xp.bits.unpack(payload[0], ctx.size), "float32") * 2.0 - 1.0
            return signs * self.scale

    x = normal(2000)
    for name in ("numpy", "torch", "tensorflow"):
        backend(name)
        found = simulate({"compressor": "meansign", "scale": 0.25}, [{"w": x}, {"w": -x}], backend=name, steps=2)
        assert (found.history[0][0]["w"] == 0).all()
        assert found.report.bytes_sent == 2 * 250
        assert found.report.method == "meansign + residual + allgather"
    assert "meansign" in compressors
    with pytest.raises(ValueError, match=r"unknown key 'scael'.*did you mean 'scale'"):
        build(compressor="meansign", scael=1.0)


@pytest.mark.usefixtures("forget")
def test_a_name_is_given_once():
    with pytest.raises(
        ValueError, match=r"compressor 'topk' is already registered by grace\.compressors\.measured\.topk\.TopK"
    ):
        register("topk")(type("Other", (Compressor,), {}))
    with pytest.raises(ValueError, match="'nocompression' is already registered"):
        register("fresh", "nocompression")(type("Other", (Compressor,), {}))
    with pytest.raises(ValueError, match="memory 'residual' is already registered"):
        register("residual")(type("Other", (Memory,), {}))
    with pytest.raises(TypeError, match="Other is no Compressor, Memory, Communicator or Policy"):
        register("other")(type("Other", (), {}))
    assert "fresh" not in compressors
    register("topk")(TopK)  # as when a module is reloaded


def test_every_module_is_imported_by_its_package():
    for package, registry in (("compressors", compressors), ("memories", memories), ("communicators", communicators)):
        modules = {module.name for module in pkgutil.iter_modules([str(PACKAGE / package)])}
        found = {cls.__module__.split(".")[2] for cls in registry.values()}
        shared = {
            "agreed",
            "blockwise",
            "lowrank",
            "selectors",
            "sparse",
            "tracked",
        }  # shared by several methods, not registered
        assert modules - shared == found
        for name, cls in registry.items():
            assert cls.registered_name == name
            assert cls.__doc__
    assert isinstance(compressors, Registry)


# -- one definition -------------------------------------------------------------------------------------------------
SOURCES = [
    *sorted(PACKAGE.glob("compressors/*.py")),
    *sorted(PACKAGE.glob("memories/*.py")),
    *sorted(PACKAGE.glob("communicators/*.py")),
    *sorted(PACKAGE.glob("core/*.py")),
    *sorted(PACKAGE.glob("ops/*.py")),
    *(PACKAGE / "engine" / f"{name}.py" for name in ("buckets", "report", "scheduler")),
]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_method_names_a_toolkit(path):
    toolkits = {"torch", "tensorflow", "horovod", "numpy", "keras"}
    imported, used = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Name):
            used.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("self", "np", "tf")
        ):
            used.add(node.value.id)
    assert imported & toolkits == set()
    assert used & {"np", "tf", *toolkits} == set()


@pytest.mark.parametrize("path", SOURCES[:3] + sorted(PACKAGE.glob("compressors/*.py")), ids=lambda path: path.name)
def test_methods_keep_nothing_in_themselves(path):
    # compress, decompress, compensate and update must be functions of their arguments: no assignment to self.
    assigned = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    ]
    assert assigned == []


# -- workers that differ --------------------------------------------------------------------------------------------
class Asks(Communicator):
    """Each worker requests the collectives that it was given."""

    def __init__(self, *asked):
        self.asked = asked

    def reduce(self, x, method, state, ctx):
        yield self.asked[ctx.rank](x, ctx.xp)
        return x, state


@pytest.mark.parametrize(
    "one, other, message",
    [
        (
            lambda x, xp: Reduce((x,)), lambda x, xp: Gather((x,)),
            r"worker 0 asks for Reduce\(mean, float32\[9\]\), worker 1 for Gather\(float32\[9\]\)",
        ),
        (
            lambda x, xp: Reduce((x,), "sum"), lambda x, xp: Reduce((x,), "max"),
            r"worker 0 asks for Reduce\(sum, float32\[9\]\), worker 1 for Reduce\(max, float32\[9\]\)",
        ),
        (
            lambda x, xp: Gather((x,)), lambda x, xp: Gather((x[:5],)),
            r"worker 0 asks for Gather\(float32\[9\]\), worker 1 for Gather\(float32\[5\]\)",
        ),
        (
            lambda x, xp: Gather((x,)), lambda x, xp: Gather((xp.cast(x, "float16"),)),
            r"worker 0 asks for Gather\(float32\[9\]\), worker 1 for Gather\(float16\[9\]\)",
        ),
        (
            lambda x, xp: Broadcast((x,), 0), lambda x, xp: Broadcast((x,), 1),
            r"worker 0 asks for Broadcast\(0, float32\[9\]\), worker 1 for Broadcast\(1, float32\[9\]\)",
        ),
        (
            lambda x, xp: (Gather((x,)), Gather((x,))), lambda x, xp: Gather((x,)),
            r"worker 0 asks for 2 collectives, worker 1 for 1 collectives",
        ),
    ],
)  # fmt: skip
def test_collectives_that_do_not_match_name_both_sides(xp, one, other, message):
    world, communicator = World(2), Asks(one, other)
    graces = [
        grace_from_params({"communicator": communicator, "min_numel": 0}, LocalTransport(world, rank))
        for rank in range(2)
    ]
    for grace_ in graces:
        grace_.build({"w": xp.zeros(9)})
        grace_.launch({"w": xp.zeros(9)})
    with pytest.raises(RuntimeError, match=message):
        graces[0].land()


def test_a_worker_that_does_not_come_is_named(xp):
    graces = workers({"compressor": "none"}, 3)
    for grace_ in graces:
        grace_.build({"w": xp.zeros(9)})
    for grace_ in graces[:2]:
        grace_.launch({"w": xp.zeros(9)})
    with pytest.raises(RuntimeError, match="worker 0 waits for worker 2"):
        graces[0].land()


# -- checkpoints ----------------------------------------------------------------------------------------------------
def trained(xp, params=None, steps=2, rank=0, size=1, build=True, shape=(900,)):
    world = World(size)
    params = {"compressor": "topk", "compress_ratio": 0.1, "min_numel": 0, **(params or {})}
    grace_ = grace_from_params(params, LocalTransport(world, rank))
    if build:
        grace_.build({"w": xp.zeros(shape), "v": xp.zeros(shape)})
    for step in range(steps):
        grace_.step({name: xp.asarray(normal(*shape, seed=step), "float32") for name in ("w", "v")})
    return grace_


def bits(xp, means):
    return {name: np.array(xp.to_numpy(mean)).tobytes() for name, mean in means.items()}


@pytest.mark.parametrize(
    "params, shape",
    [
        ({}, (900,)),
        ({"compressor": "qsgd", "compress_ratio": None}, (900,)),
        ({"compressor": "powersgd", "compress_ratio": None}, (30, 30)),
        ({"compressor": "efsignsgd", "block_size": 64, "communicator": "twostage", "compress_ratio": None}, (900,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("early", [True, False])
def test_a_run_goes_on_where_it_stopped(xp, params, shape, early):
    params = {"compressor": "topk", "compress_ratio": 0.1, "min_numel": 0, **params}
    params = {key: value for key, value in params.items() if value is not None}

    def make():
        return grace_from_params(params, LocalTransport())

    def given(seed):
        return {name: xp.asarray(normal(*shape, seed=seed), "float32") for name in ("w", "v")}

    zeros = {name: xp.zeros(shape) for name in ("w", "v")}
    first, second = make(), make()
    first.build(zeros)
    for step in range(3):
        first.step(given(step))
    saved = first.state_dict()
    if early:  # a state may be loaded before the tensors are known
        second.load_state_dict(saved)
        second.build(zeros)
    else:
        second.build(zeros)
        second.step(given(77))
        second.load_state_dict(saved)
    for step in range(3, 6):
        assert bits(xp, first.step(given(step))) == bits(xp, second.step(given(step)))
    assert second.state_dict()["step"] == 6


def test_a_saved_state_is_a_copy(xp):
    grace_ = trained(xp)
    saved = grace_.state_dict()
    before = np.asarray(saved["tensors"]["w"]["memory/residual"]).copy()
    grace_.step({name: xp.asarray(normal(900, seed=5), "float32") for name in ("w", "v")})
    assert np.array_equal(np.asarray(saved["tensors"]["w"]["memory/residual"]), before)
    grace_.load_state_dict(saved)
    grace_.step({name: xp.asarray(normal(900, seed=5), "float32") for name in ("w", "v")})
    assert np.array_equal(np.asarray(saved["tensors"]["w"]["memory/residual"]), before)


def spoil(saved, change):
    saved = {**saved, "tensors": {name: dict(arrays) for name, arrays in saved["tensors"].items()}}
    change(saved)
    return saved


def rename(saved):
    saved["tensors"]["new"] = saved["tensors"].pop("w")


SPOILED = [
    (rename, r"the model's \['w'\] are not in the state, the state's \['new'\] are not in the model.*rename its key"),
    (lambda s: s["tensors"].pop("v"), r"the model's \['v'\] are not in the state, the state's none"),
    (lambda s: s["tensors"].update(x={}), r"the state's \['x'\] are not in the model"),
    (
        lambda s: s["tensors"]["v"].update({"memory/residual": np.zeros(7, np.float32)}),
        r"state 'memory/residual' of 'v' has shape \(7,\), but the model needs \(900,\)",
    ),
    (
        lambda s: s["tensors"]["v"].update(q=np.zeros(3)),
        r"state of 'v' has \['memory/residual', 'q'\], but this method keeps",
    ),
    (lambda s: s.update(rank=1, world_size=2), "state of worker 1 of 2, but this is worker 0 of 1"),
    (lambda s: s.update(format=99), "has format 99, but this version of grace reads 2"),
    (lambda s: s.pop("format"), "has format None"),
    (lambda s: s.update(method="Method(TopK(compress_ratio=0.5))"), "use the same settings"),
]


@pytest.mark.parametrize("change, message", SPOILED, ids=[message[:40] for _, message in SPOILED])
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(xp, change, message):
    saved, other = trained(xp).state_dict(), trained(xp, steps=1)
    before = other.state_dict()
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(spoil(saved, change))
    after = other.state_dict()
    assert after["step"] == before["step"] == 1
    for name, arrays in before["tensors"].items():
        for key, array in arrays.items():
            assert np.array_equal(np.asarray(after["tensors"][name][key]), np.asarray(array))


def test_a_state_of_another_method_is_refused_before_build(xp):
    saved = trained(xp).state_dict()
    with pytest.raises(ValueError, match=r"compress_ratio=0.1.*but this is.*compress_ratio=0.5"):
        trained(xp, {"compress_ratio": 0.5}, steps=0, build=False).load_state_dict(saved)


def test_a_checkpoint_that_waits_is_refused_when_the_tensors_differ(xp):
    late = trained(xp, steps=0, build=False)
    late.load_state_dict(trained(xp).state_dict())
    with pytest.raises(ValueError, match=r"the model's \['u'\] are not in the state"):
        late.build({"u": xp.zeros(900), "w": xp.zeros(900), "v": xp.zeros(900)})


def test_compile_is_accepted_and_said_to_have_no_effect():
    with pytest.warns(UserWarning, match="compile=True has no effect any more"):
        grace_from_params({"compressor": "topk", "compile": True}, "local")
