"""Low-rank layers for PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from grace.factorize.algebra import svd_factor
from grace.factorize.plan import NameMap

__all__ = ["LowRank", "LowRankLSTM", "LowRankMultiheadAttention"]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class LowRank(nn.Module):
    """Two layers in place of a Linear or Conv.

    ``u`` maps the input to ``rank`` features, without a bias; ``v`` maps these to the output, with the layer's bias.
    For a convolution, ``u`` has the kernel, stride, padding and dilation, and ``v`` is 1 x 1.
    """

    def __init__(self, u: nn.Module, v: nn.Module):
        super().__init__()
        self.u, self.v = u, v

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.v(self.u(input))

    @property
    def weight(self) -> torch.Tensor:
        """The dense weight, the product of the factors."""
        u, v = self.u.weight, self.v.weight
        return (v.flatten(1) @ u.flatten(1)).reshape(len(v), *u.shape[1:])

    @property
    def bias(self) -> torch.Tensor | None:
        return self.v.bias

    @property
    def ranks(self) -> tuple[int]:
        return (len(self.u.weight),)

    @classmethod
    def of(cls, layer: nn.Module, ranks: Sequence[int], init: str) -> LowRank:
        """Factorise a dense layer. ``init``: "svd", "random" or "zeros"."""
        (rank,) = ranks
        u, v = _factors(layer.weight.flatten(1), rank, init)
        return cls(*_pair(layer, u.reshape(rank, *layer.weight.shape[1:]), v, layer.bias))

    def dense(self) -> nn.Module:
        """The ordinary layer with the same weight."""
        u, v = self.u, self.v
        if isinstance(u, nn.Linear):
            layer = _bare(nn.Linear, u, u.in_features, v.out_features, bias=v.bias is not None)
        else:
            options = {key: getattr(u, key) for key in ("kernel_size", "stride", "padding", "dilation", "padding_mode")}
            layer = _bare(type(u), u, u.in_channels, v.out_channels, bias=v.bias is not None, **options)
        _fill(layer, {"weight": self.weight, "bias": v.bias})
        return layer

    @staticmethod
    def renamed(names: Iterable[str]) -> NameMap:
        """Map the dense layer's parameter names to those of this layer."""
        return NameMap({name: ("u.weight", "v.weight") if name == "weight" else ("v.bias",) for name in names})


class LowRankLSTM(nn.Module):
    """A low-rank LSTM, called as nn.LSTM. Each gate's matrices are factorised separately.

    ``ranks``: two per layer and direction, for the matrices of the input and of the hidden state. Parameters: instead
    of nn.LSTM's ``weight_ih_l0``, ``u_ih_l0`` [4 rank, input] and ``v_ih_l0`` [4 hidden, rank], gates stacked; biases
    as in nn.LSTM. The steps are a Python loop, which `torch.compile` turns into one graph.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        ranks: Sequence[int],
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: Any = None,
    ):
        super().__init__()
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout, self.bidirectional = bias, batch_first, dropout, bidirectional
        self.ranks = tuple(ranks)
        for (name, suffix, width), rank in zip(self._stacks(), self.ranks, strict=True):
            for key, shape in ((f"u_{name}", (4 * rank, width)), (f"v_{name}", (4 * hidden_size, rank))):
                self.register_parameter(key, nn.Parameter(torch.zeros(shape, device=device, dtype=dtype)))
            if bias:
                zeros = torch.zeros(4 * hidden_size, device=device, dtype=dtype)
                self.register_parameter(f"bias_{suffix}", nn.Parameter(zeros))

    def _stacks(self) -> list[tuple[str, str, int]]:
        # Returns, for each stack of four matrices in nn.LSTM's order, the end of its name, the end of its bias's name,
        # and the input width.
        stacks = []
        for layer, direction in self._passes():
            below = self.input_size if layer == 0 else self.hidden_size * (2 if self.bidirectional else 1)
            stacks += [
                (f"{kind}_l{layer}{direction}", f"{kind}_l{layer}{direction}", width)
                for kind, width in (("ih", below), ("hh", self.hidden_size))
            ]
        return stacks

    def _passes(self) -> list[tuple[int, str]]:
        directions = ("", "_reverse") if self.bidirectional else ("",)
        return [(layer, direction) for layer in range(self.num_layers) for direction in directions]

    def forward(
        self, input: torch.Tensor | PackedSequence, hx: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> tuple[torch.Tensor | PackedSequence, tuple[torch.Tensor, torch.Tensor]]:
        packed = isinstance(input, PackedSequence)
        if packed:
            steps = list(input.data.split(input.batch_sizes.tolist()))
            if hx is not None and input.sorted_indices is not None:
                hx = (hx[0].index_select(1, input.sorted_indices), hx[1].index_select(1, input.sorted_indices))
        else:
            batched = input.dim() == 3
            x = input if batched else input.unsqueeze(0 if self.batch_first else 1)
            steps = list(x.unbind(1 if self.batch_first else 0))
            if hx is not None and not batched:
                hx = (hx[0].unsqueeze(1), hx[1].unsqueeze(1))
        passes = self._passes()
        if hx is None:
            zeros = steps[0].new_zeros(len(passes), len(steps[0]), self.hidden_size)
            hx = (zeros, zeros)
        last: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer in range(self.num_layers):
            if layer and self.dropout:
                steps = [F.dropout(step, self.dropout, self.training) for step in steps]
            outputs = []
            for direction in ("", "_reverse") if self.bidirectional else ("",):
                number = len(last)
                output, state = self._run(f"l{layer}{direction}", steps, (hx[0][number], hx[1][number]))
                outputs.append(output)
                last.append(state)
            steps = [torch.cat(parts, -1) for parts in zip(*outputs, strict=True)] if len(outputs) > 1 else outputs[0]
        h, c = (torch.stack([state[part] for state in last]) for part in (0, 1))
        if packed:
            sequence = PackedSequence(torch.cat(steps), input.batch_sizes, input.sorted_indices, input.unsorted_indices)
            if input.unsorted_indices is not None:
                h, c = (part.index_select(1, input.unsorted_indices) for part in (h, c))
            return sequence, (h, c)
        result = torch.stack(steps, 1 if self.batch_first else 0)
        if not batched:
            result, h, c = result.squeeze(0 if self.batch_first else 1), h.squeeze(1), c.squeeze(1)
        return result, (h, c)

    def _run(
        self, suffix: str, steps: list[torch.Tensor], state: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[list[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        # Run one layer in one direction. In packed sequences a step may have fewer rows than the state, whose other
        # rows then stay unchanged.
        inputs = self._gates(f"ih_{suffix}", torch.cat(steps)).split([len(step) for step in steps])
        h, c = state
        outputs = list(inputs)
        numbers = range(len(steps))
        for number in reversed(numbers) if suffix.endswith("_reverse") else numbers:
            rows = len(steps[number])
            gates = inputs[number] + self._gates(f"hh_{suffix}", h[:rows])
            i, f, g, o = gates.chunk(4, -1)
            new_c = f.sigmoid() * c[:rows] + i.sigmoid() * g.tanh()
            new_h = o.sigmoid() * new_c.tanh()
            outputs[number] = new_h
            h = new_h if rows == len(h) else torch.cat([new_h, h[rows:]])
            c = new_c if rows == len(c) else torch.cat([new_c, c[rows:]])
        return outputs, (h, c)

    def _gates(self, name: str, x: torch.Tensor) -> torch.Tensor:
        # [n, width] -> [n, 4 hidden]: one narrow product for all gates, then one wide product each.
        u, v = getattr(self, f"u_{name}"), getattr(self, f"v_{name}")
        rank = v.shape[1]
        narrow = F.linear(x, u).reshape(len(x), 4, rank).transpose(0, 1)
        wide = torch.bmm(narrow, v.reshape(4, self.hidden_size, rank).transpose(1, 2))
        wide = wide.transpose(0, 1).reshape(len(x), 4 * self.hidden_size)
        return wide + getattr(self, f"bias_{name}") if self.bias else wide

    @classmethod
    def of(cls, layer: nn.LSTM, ranks: Sequence[int], init: str) -> LowRankLSTM:
        """Factorise a dense LSTM. ``init``: "svd", "random" or "zeros"."""
        made = cls(layer.input_size, layer.hidden_size, ranks, **_lstm_options(layer, layer.weight_ih_l0))
        for (name, suffix, _), rank in zip(made._stacks(), ranks, strict=True):
            weight = getattr(layer, f"weight_{name}")
            pairs = [_factors(gate, rank, init) for gate in weight.chunk(4)]
            u, v = (torch.cat(parts) for parts in zip(*pairs, strict=True))
            biases = {f"bias_{suffix}": getattr(layer, f"bias_{suffix}")} if layer.bias else {}
            _fill(made, {f"u_{name}": u, f"v_{name}": v, **biases})
        return made

    def dense(self) -> nn.LSTM:
        """The ordinary LSTM with the same weights."""
        options = _lstm_options(self, self.u_ih_l0)
        layer = nn.LSTM(self.input_size, self.hidden_size, **{**options, "device": "meta"})
        layer = layer.to_empty(device=options["device"])
        for name, suffix, _ in self._stacks():
            us, vs = getattr(self, f"u_{name}").chunk(4), getattr(self, f"v_{name}").chunk(4)
            weight = torch.cat([v @ u for u, v in zip(us, vs, strict=True)])
            biases = {f"bias_{suffix}": getattr(self, f"bias_{suffix}")} if self.bias else {}
            _fill(layer, {f"weight_{name}": weight, **biases})
        return layer

    @staticmethod
    def renamed(names: Iterable[str]) -> NameMap:
        """Map the dense layer's parameter names to those of this layer."""
        stacks = [name.removeprefix("weight_") for name in names if name.startswith("weight_")]
        return NameMap({f"weight_{stack}": (f"u_{stack}", f"v_{stack}") for stack in stacks})


class LowRankMultiheadAttention(nn.Module):
    """Attention with four low-rank projections, called as nn.MultiheadAttention.

    Each projection is factorised for all heads together.
    """

    # With these values, nn.TransformerEncoderLayer calls this module instead of reading dense weights directly.
    _qkv_same_embed_dim = False
    in_proj_bias = None

    def __init__(self, num_heads: int, dropout: float, batch_first: bool, **projections: LowRank):
        super().__init__()
        self.num_heads, self.dropout, self.batch_first = num_heads, dropout, batch_first
        self.q, self.k, self.v, self.out = (projections[key] for key in ("q", "k", "v", "out"))
        self.embed_dim = len(self.out.v.weight)
        self.head_dim = self.embed_dim // num_heads

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(projection.ranks[0] for projection in (self.q, self.k, self.v, self.out))

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if is_causal and attn_mask is None:
            raise ValueError("is_causal is a hint about attn_mask: pass attn_mask too")
        batched = query.dim() == 3
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        q, k, v = self._heads(self.q(query)), self._heads(self.k(key)), self._heads(self.v(value))
        mask = self._mask(q, k, attn_mask, key_padding_mask)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, dropout)
            mixed = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        output = self.out(mixed.transpose(1, 2).flatten(2))
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return (output if self.batch_first else output.transpose(0, 1)), weights

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _mask(
        self, q: torch.Tensor, k: torch.Tensor, attention: torch.Tensor | None, padding: torch.Tensor | None
    ) -> torch.Tensor | None:
        # Returns the additive mask of the scores, [n, heads or 1, targets or 1, sources].
        masks = []
        if attention is not None:
            shape = (1, 1) if attention.dim() == 2 else (len(q), self.num_heads)
            masks.append(_additive(attention, q).reshape(*shape, *attention.shape[-2:]))
        if padding is not None:
            masks.append(_additive(padding, q).reshape(len(q), 1, 1, k.shape[-2]))
        return sum(masks[1:], masks[0]) if masks else None

    @classmethod
    def of(cls, layer: nn.MultiheadAttention, ranks: Sequence[int], init: str) -> LowRankMultiheadAttention:
        """Factorise a dense module. ``init``: "svd", "random" or "zeros"."""
        weights = [*projections(layer), layer.out_proj.weight]
        biases = [None] * 3 if layer.in_proj_bias is None else list(layer.in_proj_bias.chunk(3))
        parts = {}
        for key, weight, bias, rank in zip(
            ("q", "k", "v", "out"), weights, [*biases, layer.out_proj.bias], ranks, strict=True
        ):
            parts[key] = LowRank(*_pair(layer.out_proj, *_factors(weight, rank, init), bias))
        return cls(layer.num_heads, layer.dropout, layer.batch_first, **parts)

    def dense(self) -> nn.MultiheadAttention:
        """The ordinary module with the same weights."""
        projections = [self.q.weight, self.k.weight, self.v.weight]
        widths = [weight.shape[1] for weight in projections]
        layer = _bare(
            nn.MultiheadAttention,
            self.out.u,
            self.embed_dim,
            self.num_heads,
            self.dropout,
            self.out.bias is not None,
            batch_first=self.batch_first,
            kdim=widths[1],
            vdim=widths[2],
        )
        if layer._qkv_same_embed_dim:
            _fill(layer, {"in_proj_weight": torch.cat(projections)})
        else:
            _fill(layer, {f"{key}_proj_weight": w for key, w in zip("qkv", projections, strict=True)})
        if self.out.bias is not None:
            _fill(layer, {"in_proj_bias": torch.cat([self.q.bias, self.k.bias, self.v.bias])})
        _fill(layer.out_proj, {"weight": self.out.weight, "bias": self.out.bias})
        return layer

    @staticmethod
    def renamed(names: Iterable[str]) -> NameMap:
        """Map the dense module's parameter names to those of this module."""
        return NameMap({name: tuple(RENAMED_ATTENTION[name]) for name in names})


RENAMED_ATTENTION = {
    "in_proj_weight": [f"{key}.{part}.weight" for key in "qkv" for part in "uv"],
    "in_proj_bias": [f"{key}.v.bias" for key in "qkv"],
    "out_proj.weight": ["out.u.weight", "out.v.weight"],
    "out_proj.bias": ["out.v.bias"],
    **{f"{key}_proj_weight": [f"{key}.u.weight", f"{key}.v.weight"] for key in "qkv"},
}
LOW_RANK = (LowRank, LowRankLSTM, LowRankMultiheadAttention)


# -- shared helpers -------------------------------------------------------------------------------------------------
def _factors(weight: torch.Tensor, rank: int, init: str) -> tuple[torch.Tensor, torch.Tensor]:
    # Returns u[rank, n] and v[m, rank] for weight[m, n], with the weight's dtype and device.
    weight = weight.detach()
    like = {"dtype": weight.dtype, "device": weight.device}
    if init == "svd":
        exact = weight if weight.dtype == torch.float64 else weight.float()
        u, v = svd_factor(exact.cpu().numpy(), rank)
        return torch.from_numpy(u).to(**like), torch.from_numpy(v).to(**like)
    shapes = ((rank, weight.shape[1]), (weight.shape[0], rank))
    if init == "zeros":
        return torch.zeros(shapes[0], **like), torch.zeros(shapes[1], **like)
    # The product then has the variance of the given weight.
    scale = (weight.square().mean() / rank).pow(0.25)
    return torch.randn(shapes[0], **like) * scale, torch.randn(shapes[1], **like) * scale


def _pair(layer: nn.Module, u: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> tuple[nn.Module, nn.Module]:
    # Returns the layers u and v with these weights and bias, and the settings of a dense layer.
    rank = len(u)
    if isinstance(layer, nn.Linear):
        narrow = _bare(nn.Linear, layer, u.shape[1], rank, bias=False)
        wide = _bare(nn.Linear, layer, rank, len(v), bias=bias is not None)
    else:
        options = {key: getattr(layer, key) for key in ("stride", "padding", "dilation", "padding_mode")}
        narrow = _bare(type(layer), layer, layer.in_channels, rank, layer.kernel_size, bias=False, **options)
        wide = _bare(type(layer), layer, rank, layer.out_channels, 1, bias=bias is not None)
    _fill(narrow, {"weight": u})
    _fill(wide, {"weight": v.reshape(wide.weight.shape), "bias": bias})
    return narrow, wide


def _bare(cls: type[nn.Module], like: nn.Module, *args: Any, **options: Any) -> nn.Module:
    # Make an uninitialised module: initialisation would draw from the user's random generator.
    weight = like.weight
    return cls(*args, device="meta", dtype=weight.dtype, **options).to_empty(device=weight.device)


def _fill(module: nn.Module, values: Mapping[str, torch.Tensor | None]) -> None:
    for name, value in values.items():
        if value is not None:
            frozen = isinstance(value, nn.Parameter) and not value.requires_grad
            setattr(module, name, nn.Parameter(value.detach().clone(), requires_grad=not frozen))


def _lstm_options(layer: nn.Module, example: torch.Tensor) -> dict[str, Any]:
    keys = ("num_layers", "bias", "batch_first", "dropout", "bidirectional")
    return {key: getattr(layer, key) for key in keys} | {"device": example.device, "dtype": example.dtype}


def projections(layer: nn.MultiheadAttention) -> list[torch.Tensor]:
    """The weights of queries, keys and values."""
    if layer._qkv_same_embed_dim:
        return list(layer.in_proj_weight.chunk(3))
    return [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]


def _additive(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))
