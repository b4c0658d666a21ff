"""Low-rank layers of PyTorch: equal to dense ones at full rank, called alike, saved, compiled and exported."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import grace
import grace.torch
from grace.factorize import WarmUp, defactorize, factorize, load_dense, plan, recalibrate

torch.set_num_threads(1)


def close(found, expected, rel=1e-4):
    assert (found - expected).abs().max() <= rel * expected.abs().max()


def full(model):
    """The model with factors of full rank for all supported layers."""
    ranks = {}
    for layer in plan(model, keep_first=0, keep_last=False, min_numel=0).layers:
        if not layer.reason or "smaller" in layer.reason:
            ranks[layer.name] = largest(model.get_submodule(layer.name))
    return factorize(copy.deepcopy(model), ranks=ranks)[0]


def largest(module):
    weights = [p.flatten(1) for p in module.parameters() if p.dim() > 1]
    if isinstance(module, nn.LSTM):
        return max(min(len(w) // 4, w.shape[1]) for w in weights)
    if isinstance(module, nn.MultiheadAttention):
        return module.embed_dim
    return min(weights[0].shape)


LAYERS = {
    "linear": (lambda: nn.Linear(30, 20), (7, 30)),
    "linear on a sequence": (lambda: nn.Linear(20, 30, bias=False), (2, 7, 20)),
    "conv1d": (lambda: nn.Conv1d(6, 8, 3, stride=2), (2, 6, 15)),
    "conv2d": (lambda: nn.Conv2d(6, 8, 3, padding=1), (2, 6, 9, 9)),
    "conv2d stride": (lambda: nn.Conv2d(6, 8, (3, 5), stride=2, padding=(1, 2), bias=False), (2, 6, 9, 9)),
    "conv2d dilation": (lambda: nn.Conv2d(6, 80, 3, dilation=2, padding="same"), (2, 6, 9, 9)),
    "conv2d reflect": (lambda: nn.Conv2d(6, 8, 3, padding=1, padding_mode="reflect"), (2, 6, 9, 9)),
    "conv2d 1x1": (lambda: nn.Conv2d(16, 8, 1, stride=2), (2, 16, 9, 9)),
    "conv3d": (lambda: nn.Conv3d(3, 8, 3), (2, 3, 5, 5, 5)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_full_rank_changes_nothing(name):
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer, x = make().eval(), torch.randn(shape)
    other = full(layer)
    close(other(x), layer(x))
    close(other.weight, layer.weight)
    back, _ = defactorize(other)
    assert type(back) is type(layer)
    assert repr(back) == repr(layer)
    close(back(x), layer(x))


@pytest.mark.parametrize("name", LAYERS)
def test_what_a_lower_rank_loses_are_the_small_singular_values(name):
    torch.manual_seed(0)
    layer = LAYERS[name][0]()
    dense = layer.weight.detach().flatten(1).double()
    other, _ = factorize(layer, ranks={"": 2})
    values = torch.linalg.svdvals(dense)
    lost = (dense - other.weight.detach().flatten(1).double()).square().sum()
    close(lost, values[2:].square().sum())
    for gram in (
        other.v.weight.flatten(1).T @ other.v.weight.flatten(1),
        other.u.weight.flatten(1) @ other.u.weight.flatten(1).T,
    ):
        np.testing.assert_allclose(gram.detach(), torch.diag(values[:2]), atol=1e-4 * values[0].item())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_first": True, "bias": False},
        {"num_layers": 2, "bidirectional": True},
        {"num_layers": 3, "batch_first": True},
    ],
    ids=str,
)
def test_an_lstm_is_called_and_answers_as_pytorchs(options):
    torch.manual_seed(0)
    lstm = nn.LSTM(12, 16, **options).eval()
    other = full(lstm)
    x = torch.randn(5, 4, 12)
    batch = 5 if options.get("batch_first") else 4
    passes = lstm.num_layers * (2 if lstm.bidirectional else 1)
    state = (torch.randn(passes, batch, 16), torch.randn(passes, batch, 16))
    lengths = torch.tensor([2, 3, 1, 3, 2][:batch])
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, lstm.batch_first, enforce_sorted=False)
    one = torch.randn(6, 12)
    for args in ((x,), (x, state), (packed,), (packed, state), (one,), (one, (state[0][:, 0], state[1][:, 0]))):
        out, (h, c) = lstm(*args)
        mine, (my_h, my_c) = other(*args)
        if args[0] is packed:
            out, mine = (nn.utils.rnn.pad_packed_sequence(y)[0] for y in (out, mine))
        assert mine.shape == out.shape
        for found, expected in ((mine, out), (my_h, h), (my_c, c)):
            close(found, expected)
    back, _ = defactorize(other)
    close(back(x)[0], lstm(x)[0])


@pytest.mark.parametrize("gate", range(4))
def test_each_gate_of_an_lstm_is_factorised_by_itself(gate):
    torch.manual_seed(0)
    lstm = nn.LSTM(40, 32)
    dense = lstm.weight_ih_l0.detach().chunk(4)[gate].double()
    other, _ = factorize(lstm, ranks={"": 8})
    product = other.v_ih_l0.chunk(4)[gate] @ other.u_ih_l0.chunk(4)[gate]
    close((dense - product.double()).square().sum(), torch.linalg.svdvals(dense)[8:].square().sum())


@pytest.mark.parametrize("options", [{}, {"bias": False, "batch_first": True}, {"kdim": 12, "vdim": 20}], ids=str)
def test_attention_is_called_and_answers_as_pytorchs(options):
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(32, 4, **options).eval()
    if attention.in_proj_bias is not None:
        nn.init.normal_(attention.in_proj_bias)
    other = full(attention)
    first = attention.batch_first
    q = torch.randn((2, 6, 32) if first else (6, 2, 32))
    k = torch.randn((2, 5, attention.kdim) if first else (5, 2, attention.kdim))
    v = torch.randn((2, 5, attention.vdim) if first else (5, 2, attention.vdim))
    padding = torch.tensor([[False, False, True, False, True], [False] * 5])
    causal = torch.triu(torch.ones(6, 5, dtype=torch.bool), 1)
    for kwargs in (
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"key_padding_mask": padding},
        {"attn_mask": causal, "is_causal": True, "need_weights": False},
        {"attn_mask": torch.randn(8, 6, 5), "key_padding_mask": padding.float()},
    ):
        out, weights = attention(q, k, v, **kwargs)
        mine, my_weights = other(q, k, v, **kwargs)
        close(mine, out)
        assert (weights is None) == (my_weights is None)
        if weights is not None:
            assert my_weights.shape == weights.shape
            close(my_weights, weights)
    alone = [x[0] if first else x[:, 0] for x in (q, k, v)]
    close(other(*alone)[0], attention(*alone)[0])
    back, _ = defactorize(other)
    close(back(q, k, v)[0], attention(q, k, v)[0])
    with pytest.raises(ValueError, match="pass attn_mask too"):
        other(q, k, v, is_causal=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("keep_first", [0, 3])
def test_pytorchs_transformer_layers_take_low_rank_parts(keep_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    x = torch.randn(2, 7, 32)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)[~padding]
    names = [made.name for made in plan(model).layers if len(made.shape) > 1][keep_first:]
    other, _ = factorize(model, ranks=dict.fromkeys(names, 32), include=names)
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            close(other(x, src_key_padding_mask=padding)[~padding], expected)


def network():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.Linear(64, 10),
    )


IMAGES = (4, 3, 8, 8)


def test_everything_else_keeps_its_values_and_identity():
    torch.manual_seed(0)
    model = network()
    model(torch.randn(IMAGES))
    model[3].bias.requires_grad_(False)
    model[6].eval()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    generator = torch.get_rng_state()
    same, names = factorize(model)
    assert same is model
    assert torch.equal(torch.get_rng_state(), generator), "the user's generator is not touched"
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert sorted(names.removed) == ["3.bias", "3.weight", "6.bias", "6.weight"]
    assert set(after) == set(tensors) - set(names.removed) | set(names.added)
    for name in set(after) - set(names.added):
        assert after[name] is tensors[name]
        assert torch.equal(after[name], before[name])
    assert torch.equal(after["3.v.bias"], before["3.bias"])
    assert not after["3.v.bias"].requires_grad
    assert not model[6].training
    assert not model[6].u.training
    assert model[3].training
    assert plan(model).layers[2].reason == "factorised already"


def test_reasons_to_leave_a_layer_alone():
    class Own(nn.Linear):
        pass

    def hooked():
        layer = nn.Linear(64, 64)
        layer.register_forward_hook(lambda *_: None)
        return layer

    shared = nn.Linear(64, 64)
    model = nn.ModuleDict(
        {
            "first": nn.Linear(64, 64),
            "embedding": nn.Embedding(64, 64),
            "tied": nn.Linear(64, 64),
            "grouped": nn.Conv2d(64, 64, 3, groups=2),
            "transposed": nn.ConvTranspose2d(64, 64, 3),
            "norm": nn.LayerNorm(64),
            "frozen": nn.Linear(64, 64).requires_grad_(False),
            "own": Own(64, 64),
            "hooked": hooked(),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)),
            "projecting": nn.LSTM(64, 64, proj_size=32),
            "biased": nn.MultiheadAttention(64, 4, add_bias_kv=True),
            "gru": nn.GRU(64, 64),
            "shared": shared,
            "again": nn.Sequential(shared),
            "good": nn.Linear(64, 64),
            "last": nn.Linear(64, 64),
        }
    )
    model["tied"].weight = model["embedding"].weight
    found = {layer.name: layer.reason for layer in plan(model).layers}
    words = {
        "first": "first layers",
        "embedding": "looked up",
        "tied": "also embedding.weight",
        "grouped": "grouped",
        "transposed": "ConvTranspose2d is of no kind",
        "norm": "no matrix",
        "frozen": "frozen",
        "own": "Own is of no kind",
        "hooked": "hooks",
        "projecting": "projections",
        "biased": "bias_k",
        "gru": "GRU is of no kind",
        "shared": "also again.0.weight",
        "last": "last layer",
    }
    for name, word in words.items():
        assert word in found[name], name
    assert found["good"] == ""
    assert [name for name, layer in model.named_modules() if type(layer).__name__ == "LowRank"] == []
    factorize(model)
    assert [name for name, layer in model.named_modules() if type(layer).__name__ == "LowRank"] == ["good"]


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager")])
def test_wrapped_models_are_refused_with_the_remedy(wrap):
    with pytest.raises(ValueError, match=r"factorize model\.\w+, then"):
        plan(wrap(network()))


def test_lazy_layers_must_have_seen_a_batch():
    with pytest.raises(ValueError, match="'0' is lazy: run one batch"):
        plan(nn.Sequential(nn.LazyLinear(10)))


def test_multiply_adds_are_those_of_the_weights():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.attention, self.out = nn.LSTM(64, 64, 2), nn.MultiheadAttention(64, 4), nn.Linear(64, 64)

        def forward(self, x, memory):
            x, _ = self.lstm(x)
            x, _ = self.attention(x, key=memory, value=memory)
            return self.out(self.out(x))

    model = Net()
    made = plan(model, keep_first=0, keep_last=False, example=(torch.randn(5, 2, 64), torch.randn(3, 2, 64)))
    dense = [layer.macs for layer in made.layers]
    assert dense == [10 * 4 * 4 * 64 * 64, (10 + 6 + 6 + 10) * 64 * 64, 2 * 10 * 64 * 64]
    assert [layer.macs_after for layer in made.layers] == [macs // 2 for macs in dense]  # 16 (64 + 64) is half of 64^2
    assert "MACs" in str(made)


def test_random_factors_have_the_variance_of_the_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(400, 300))
    spread = model[0].weight.std().item()
    bias = model[0].bias
    factorize(model, init="random", ranks={"0": 60})
    assert model[0].weight.std().item() == pytest.approx(spread, rel=0.05)
    assert torch.equal(model[0].v.bias, bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_dtype_stays(dtype):
    model = nn.Sequential(nn.Linear(64, 64), nn.LSTM(64, 64)).to(dtype)
    factorize(model, keep_first=0, keep_last=False)
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_a_dense_checkpoint_and_back():
    torch.manual_seed(0)
    trained, model = network().eval(), network().eval()
    reference, _ = factorize(copy.deepcopy(trained), ranks={"3": 8, "6": 8})
    factorize(model, init="random", ranks={"3": 8, "6": 8})
    parameters = dict(model.named_parameters())
    load_dense(model, trained.state_dict())
    x = torch.randn(IMAGES)
    assert torch.equal(model(x), reference(x))
    assert all(dict(model.named_parameters())[name] is p for name, p in parameters.items()), "an optimizer stays valid"
    expected = model(x)
    dense, _ = defactorize(model)
    assert dense.state_dict().keys() == trained.state_dict().keys()
    close(dense(x), expected)
    plain = network().eval()
    plain.load_state_dict(dense.state_dict())
    assert torch.equal(plain(x), dense(x))


class Words(nn.Module):
    """A model with every kind of layer that can be factorised."""

    def __init__(self):
        super().__init__()
        self.conv, self.lstm = nn.Conv1d(16, 32, 3, padding=1), nn.LSTM(32, 32, batch_first=True)
        self.attention, self.out = nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 32)

    def forward(self, x):
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        x, _ = self.lstm(x)
        x, _ = self.attention(x, x, x, need_weights=False)
        return self.out(x)


def words():
    torch.manual_seed(0)
    model, _ = factorize(Words(), keep_first=0, keep_last=False, min_numel=0)
    assert len(list(model.named_parameters())) > 20
    return model.eval()


def test_factorised_models_are_saved_and_loaded(tmp_path):
    model, x = words(), torch.randn(2, 5, 16)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other = Words()
    factorize(other, init="random", keep_first=0, keep_last=False, min_numel=0)
    other.eval().load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(other(x), model(x))
    torch.save(model, tmp_path / "model.pt")
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False)(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))


@pytest.mark.slow
def test_factorised_models_compile_in_one_graph_and_export():
    model, x = words(), torch.randn(2, 5, 16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(compiled(x), model(x))
    compiled(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    close(torch.export.export(model, (x,)).module()(x), model(x))


def test_batch_norm_is_measured_anew():
    torch.manual_seed(0)
    model = network()
    batches = [torch.randn(IMAGES) for _ in range(3)]
    recalibrate(model, batches)
    first = [model[0](batch).transpose(0, 1).flatten(1) for batch in batches]
    close(model[1].running_mean, torch.stack([x.mean(1) for x in first]).mean(0).detach())
    close(model[1].running_var, torch.stack([x.var(1) for x in first]).mean(0).detach())
    assert model[1].momentum == 0.1
    assert model.training


# -- the doors and the switch, on one worker ------------------------------------------------------------------------
TOPK = {"compressor": "topk", "compress_ratio": 0.1, "min_numel": 0}


def step(model, optimizer, grc=None):
    torch.manual_seed(1)
    optimizer.zero_grad()
    model(torch.randn(IMAGES)).square().mean().backward()
    optimizer.step()


def test_grace_forgets_what_is_gone_and_keeps_what_stays():
    grc = grace.grace_from_params(TOPK, transport="local")
    grc.build({"a": torch.zeros(50), "b": torch.zeros(4, 5)})
    grc.step({"a": torch.arange(50.0), "b": torch.ones(4, 5)})
    kept = grc.state_dict()["tensors"]["a"]
    grc.start("a", torch.ones(50))
    with pytest.raises(RuntimeError, match="under way"):
        grc.rebuild({})
    grc.finish(grc.start("b", torch.ones(4, 5)))
    kept = grc.state_dict()["tensors"]["a"]
    grc.rebuild({"c": torch.zeros(30), "a": torch.zeros(50)})
    state = grc.state_dict()
    assert set(state["tensors"]) == {"a", "c"}
    assert state["step"] == 2
    assert all(torch.equal(state["tensors"]["a"][key], kept[key]) for key in kept)
    assert grc.names == ["c", "a"]
    assert (grc.report().steps, grc.report().bytes_sent) == (0, 0)
    grc.step({"c": torch.ones(30), "a": torch.ones(50)})
    assert grc.report().steps == 1
    assert {t.name for t in grc.report().tensors} == {"a", "c"}
    with pytest.raises(KeyError, match="was not built"):
        grc.start("b", torch.ones(4, 5))


def test_a_tensor_that_changes_its_shape_begins_anew():
    grc = grace.grace_from_params(TOPK, transport="local")
    grc.build({"a": torch.zeros(50)})
    grc.step({"a": torch.arange(50.0)})
    grc.rebuild({"a": torch.zeros(60)})
    (residual,) = grc.state_dict()["tensors"]["a"].values()
    assert residual.shape == (60,)
    assert not residual.any()


def test_a_released_optimizer_is_the_users_again():
    grc = grace.grace_from_params(TOPK, transport="local")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    grace.torch.DistributedOptimizer(optimizer, grc, model.named_parameters())
    step(model, optimizer)
    assert grace.torch.release(optimizer) is optimizer
    steps = grc.report().steps
    step(model, optimizer)
    assert grc.report().steps == steps
    assert not hasattr(optimizer, "synchronize")
    with pytest.raises(ValueError, match="not distributed"):
        grace.torch.release(optimizer)
    grace.torch.DistributedOptimizer(optimizer, grc, model.named_parameters())
    step(model, optimizer)
    assert grc.report().steps == steps + 1


def test_the_switch_on_one_worker():
    torch.manual_seed(0)
    model = network()
    grc = grace.grace_from_params(TOPK, transport="local")
    make = lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)  # noqa: E731
    optimizer = grace.torch.DistributedOptimizer(make(model), grc, model.named_parameters(), 2)
    warmup = WarmUp(1)
    model, new = warmup.switch(model, optimizer, make)
    assert new is not optimizer
    assert new.state_dict()["state"] == {}
    assert sorted(grc.names) == sorted(name for name, _ in model.named_parameters())
    for _ in range(2):
        model(torch.randn(IMAGES)).square().mean().backward()
    new.step()
    assert grc.report().steps == 1, "backward_passes_per_step goes over to the new optimizer"
    assert warmup.switched
    with pytest.raises(RuntimeError, match="already"):
        warmup.switch(model, new, make)
    plain = network()
    with pytest.raises(ValueError, match="must make a new optimizer"):
        WarmUp(0).switch(plain, old := make(plain), lambda _: old)
    with pytest.raises(ValueError, match="nothing would be factorised"):
        WarmUp(0, exclude="*").switch(network(), None, make)


def test_an_lstms_matrices_may_have_ranks_of_their_own():
    # Ranks of the authors' LSTM: a quarter of the input size for input matrices, of the hidden size for the others.
    lstm = torch.nn.LSTM(48, 16)
    for settings, ranks in (({"ranks": {"": (12, 4)}}, (12, 4)), ({"keep_first": 0, "keep_last": False}, (4, 4))):
        assert plan(lstm, min_numel=0, **settings).ranks == {"": ranks}
    made, _ = factorize(lstm, ranks={"": (12, 4)})
    assert made.u_ih_l0.shape == (4 * 12, 48)
    assert made.v_hh_l0.shape == (4 * 16, 4)
