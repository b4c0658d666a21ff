"""Broadcasts as training loops call them, over two workers: OUT TRANSPORT. Saves a dictionary of findings."""

import sys
import warnings

import numpy as np
import torch
from launch import join_torch, leave_gloo, save

out, transport = sys.argv[1:]
rank, size = join_torch(transport)

import grace.torch

found = {}
value = 1 if rank == 0 else 5  # worker 0's value is broadcast


def outcome(call, *tensors):
    """The error that a call raised, if any, and the values of tensors afterwards."""
    try:
        call()
        message = ""
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    return message, [tensor.detach().clone().float().flatten().tolist() for tensor in tensors]


# Every dtype and every memory layout.
kinds = {
    str(dtype): torch.full((3,), value, dtype=torch.float32).to(dtype)
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
                  torch.uint32, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
                  torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32, torch.complex64, torch.complex128)
}  # fmt: skip
kinds["torch.bool"] = torch.tensor([rank == 0, True, False])
kinds["scalar"] = torch.tensor(value)
kinds["empty"] = torch.empty(0, 3)
kinds["channels last"] = torch.full((2, 3, 4, 4), float(value)).to(memory_format=torch.channels_last)
kinds["transposed"] = torch.full((3, 5), float(value)).t()
kinds["expanded"] = torch.full((1, 8), float(value)).expand(4, 8)
kinds["strided"] = torch.full((10,), float(value))[::3]
kinds["own nan"] = torch.tensor([float("nan") if rank == 0 else 0.0, float("inf")])
strides = {name: tensor.stride() for name, tensor in kinds.items()}
before = {name: tensor.data_ptr() for name, tensor in kinds.items()}
with torch.no_grad():
    grace.torch.broadcast_parameters(kinds)
found["kinds"] = {
    name: tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).tolist()
    for name, tensor in kinds.items()
}
found["in place"] = all(
    tensor.stride() == strides[name] and tensor.data_ptr() == before[name] for name, tensor in kinds.items()
)

# States that differ between workers: nothing changes.
w = torch.full((4,), float(value))
differing = {
    "missing": {"w": w, **({"extra": torch.ones(3)} if rank == 1 else {})},
    "shape": {"s": torch.ones(3 + rank), "w": w},
    "dtype": {"s": torch.ones(3, dtype=torch.float32 if rank == 0 else torch.float64), "w": w},
    "empty": {"w": w} if rank == 0 else {},
    "expanded": {"s": torch.ones(1).expand(3) if rank == 0 else torch.ones(3), "w": w},
    "sparse": {"s": torch.ones(3) if rank == 0 else torch.ones(3).to_sparse(), "w": w},
    "quantised": {"s": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "w": w},
    "meta": {"s": torch.ones(3, device="meta"), "w": w},
    "nested": {"s": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "w": w},
    "overlapping": {"s": torch.zeros(4).as_strided((3, 2), (1, 1)), "w": w},
}
for name, params in differing.items():
    found[f"differ {name}"] = outcome(lambda params=params: grace.torch.broadcast_parameters(params), w)
for name, root in (("roots", rank), ("range", 2), ("negative", -1), ("text", "0")):
    found[f"root {name}"] = outcome(lambda root=root: grace.torch.broadcast_parameters({"w": w}, root), w)
model = torch.nn.Linear(3, 2)
for name, params in (
    ("module", model),
    ("parameters", list(model.parameters())),
    ("generator", model.parameters()),
    ("tensor", w),
    ("names twice", [("w", w), ("w", w.clone())]),
):
    found[f"wrong {name}"] = outcome(lambda params=params: grace.torch.broadcast_parameters(params), w)


class Extra(torch.nn.Linear):
    def get_extra_state(self):
        return {"rank": rank}

    def set_extra_state(self, state):
        pass


model = Extra(3, 2)
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    grace.torch.broadcast_parameters(model.state_dict())
found["extra"] = ([str(warning.message) for warning in said], model.weight.detach().numpy().copy())
with torch.inference_mode():
    grace.torch.broadcast_parameters(w_ := {"w": torch.full((2,), float(value))})
found["inference"] = w_["w"].tolist()
torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
grace.torch.broadcast_parameters(w_ := {"w": torch.full((2,), float(value), dtype=torch.float32, device="cpu")})
torch.set_default_device(None)
torch.set_default_dtype(torch.float32)
found["defaults"] = w_["w"].tolist()

# Optimizer state of every kind.
p = torch.nn.Parameter(torch.full((5, 4), float(value)))


class Tag:
    pass


def optimizer(name):
    lr = 0.1 * (rank + 1)
    return {
        "numpy": lambda: torch.optim.SGD([p], lr=np.float64(lr) if rank == 0 else lr, momentum=0.9),
        "numpy float32": lambda: torch.optim.SGD([p], lr=np.float32(lr) if rank == 0 else lr, momentum=0.9),
        "tensor": lambda: torch.optim.Adam([p], lr=torch.tensor(lr)),
        "adam": lambda: torch.optim.AdamW([p], lr=lr, amsgrad=True),
        "capturable": lambda: torch.optim.AdamW([p], lr=lr, fused=True),
        "lbfgs": lambda: torch.optim.LBFGS([p], lr=lr),
        "rprop": lambda: torch.optim.Rprop([p], lr=lr),
        "adafactor": lambda: torch.optim.Adafactor([p], lr=lr),
        "array": lambda: torch.optim.SGD([{"params": [p], "history": np.arange(3) * (rank + 1)}], lr=lr),
        "tag": lambda: torch.optim.SGD([{"params": [p], "tag": Tag()}], lr=lr),
        "function": lambda: torch.optim.SGD([{"params": [p], "decay": lambda step: step}], lr=lr),
        "groups": lambda: torch.optim.SGD([p] if rank == 0 else [{"params": [p]}, {"params": [torch.zeros(2)]}], lr=lr),
        "shapes": lambda: torch.optim.SGD([p] if rank == 0 else [torch.zeros(2)], lr=lr),
        "class": lambda: torch.optim.SGD([p], lr=lr) if rank == 0 else torch.optim.Adam([p], lr=lr),
    }[name]()


def plain(each):
    if isinstance(each, torch.Tensor):
        return each.detach().numpy().tolist()
    if isinstance(each, dict):
        return {key: plain(value) for key, value in each.items()}
    return [*map(plain, each)] if isinstance(each, list | tuple) else repr(each)


for name in ("numpy", "numpy float32", "tensor", "adam", "capturable", "lbfgs", "rprop", "adafactor", "array", "tag",
             "function", "groups", "shapes", "class"):  # fmt: skip
    made = optimizer(name)
    if rank == 0:

        def loss(made=made):
            made.zero_grad()
            total = p.square().sum()
            total.backward()
            return total

        loss()
        made.step(loss) if name == "lbfgs" else made.step()
    old = plain({key: value for key, value in made.param_groups[0].items() if key != "params"})
    message, _ = outcome(lambda made=made: grace.torch.broadcast_optimizer_state(made))
    new = {key: value for key, value in made.param_groups[0].items() if key != "params"}
    found[f"optimizer {name}"] = (message, plain(made.state.get(p, {})), plain(new), old)

save(out, rank, found)
if transport == "torch":
    leave_gloo()
