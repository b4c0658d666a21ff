"""grace.patch with tensors of the toolkits, and with shards of DTensors."""

from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from launch import launcher, run
from support.patches import changed

import grace

pytest.importorskip("zstandard")
pytest.importorskip("xxhash")
WORKERS = Path(__file__).parent / "workers"


def bits(n, dtype, seed=0):
    return np.random.default_rng(seed).normal(size=n).astype("f4").astype(dtype)


def test_torch_tensors_of_every_dtype_and_layout():
    torch = pytest.importorskip("torch")
    names = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
    names += " float8_e4m3fn float8_e5m2 uint16 uint32 uint64"
    base, new = {}, {}
    for name in names.split():
        dtype = getattr(torch, name)
        raw = torch.randint(0, 2 if name == "bool" else 256, (24, 16 * dtype.itemsize), dtype=torch.uint8)
        other = raw.clone()
        other[::3, :: dtype.itemsize] ^= 1
        for tensors, each in ((base, raw), (new, other)):
            full = each.view(dtype)
            tensors |= {
                name: full,
                f"{name}.T": full.clone().T,
                f"{name}.0": full[0, 0].clone(),
                f"{name}.none": full[:0].clone(),
            }
    patch = grace.patch.diff(new, base)
    assert patch.density == pytest.approx(1 / 3, abs=0.01)
    grace.patch.apply(patch, base)
    for name in new:
        assert torch.equal(
            base[name].contiguous().reshape(-1).view(torch.uint8), new[name].contiguous().reshape(-1).view(torch.uint8)
        ), name


def test_a_module_is_patched_in_place_with_tied_weights():
    torch = pytest.importorskip("torch")

    def made():
        model = torch.nn.Sequential(torch.nn.Embedding(30, 8), torch.nn.Linear(8, 30, bias=False)).bfloat16()
        model[1].weight = model[0].weight
        return model

    base, new = made(), made()
    held = base[0].weight
    patch = grace.patch.diff(new, base)
    assert patch.elements == 240
    grace.patch.apply(patch, base)
    assert base[0].weight is base[1].weight is held
    assert torch.equal(held, new[0].weight)


def test_nothing_is_copied():
    torch = pytest.importorskip("torch")
    from grace.patch.tensors import view

    tensor, array = torch.zeros(5, dtype=torch.bfloat16), np.zeros(5)
    assert view({"w": tensor}, "w").words.ctypes.data == tensor.data_ptr()
    assert view({"w": array}, "w").words.ctypes.data == array.ctypes.data


def test_jax_arrays():
    jax = pytest.importorskip("jax")
    from grace.patch.tensors import view

    base = {"w": jax.numpy.arange(5000, dtype="bfloat16"), "b": jax.numpy.zeros((), "float32")}
    new = {name: each + 1 for name, each in base.items()}
    assert view(base, "w").words.ctypes.data == base["w"].unsafe_buffer_pointer()
    patch, before = grace.patch.diff(new, base), base["w"]
    grace.patch.apply(patch, base)
    assert all((base[name] == new[name]).all() and base[name].dtype == new[name].dtype for name in new)
    assert before[1] == 1, "arrays do not change: new ones take their place"
    with pytest.raises(TypeError, match="pass a dict"):
        grace.patch.apply(patch, MappingProxyType({"w": before, "b": jax.numpy.zeros(())}))


def test_tensorflow_variables_and_tensors():
    tf = pytest.importorskip("tensorflow")
    base = {
        "w": tf.Variable(tf.cast(tf.range(3000), tf.bfloat16)),
        "b": tf.constant([1.0, 2.0]),
        "h": tf.Variable(tf.ones((3, 5), tf.float16)),
    }
    new = {"w": tf.Variable(base["w"] + 1), "b": tf.constant([1.0, -0.0]), "h": tf.Variable(base["h"] * 3)}
    patch, variable = grace.patch.diff(new, base), base["w"]
    grace.patch.apply(patch, base)
    assert base["w"] is variable
    assert all(base[name].numpy().tobytes() == new[name].numpy().tobytes() for name in new)


def test_toolkits_make_the_same_patch():
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    base = bits(70000, "f4")
    new = changed(np.random.default_rng(1), base, 0.1)
    patches = [
        grace.patch.diff({"w": make(new)}, {"w": make(base)})
        for make in (np.array, torch.from_numpy, jax.numpy.asarray)
    ]
    sent = {bytes(each.data_of(each.entries[0])) for each in patches}
    assert len(sent) == 1


def test_a_read_only_array_is_left_alone():
    base, new = np.zeros(5), np.ones(5)
    base.flags.writeable = False
    with pytest.raises(ValueError, match="apply the patch to a copy"):
        grace.patch.apply(grace.patch.diff({"w": new}, {"w": base}), {"w": base})


@pytest.mark.processes
def test_shards_joined_equal_the_whole(tmp_path):
    pytest.importorskip("torch")
    printed = run(*launcher("torchrun", 2), WORKERS / "patch_shards.py", tmp_path, log=tmp_path / "log")
    assert printed.count("all equal") == 2


def test_shards_that_are_missing_or_overlap_are_refused():
    from grace.patch.changes import check_regions
    from grace.patch.tensors import View

    def shard(array, begin, end):
        return {"w": View(array[begin:end].reshape(-1).view("u4"), "float32", array.shape, ((begin, end), (0, 3)))}

    base = np.zeros((4, 3), np.float32)
    new = base + np.arange(4, dtype=np.float32)[:, None]
    parts = [grace.patch.diff(shard(new, *each), shard(base, *each)) for each in ((0, 2), (2, 4), (1, 4))]
    whole = grace.patch.join(parts[:2])
    check_regions(whole.entries)
    target = {"w": base.copy()}
    grace.patch.apply(whole, target)
    assert (target["w"] == new).all()
    (item,) = whole.items()
    (other,) = grace.patch.diff({"w": new}, {"w": base}).items()
    assert (item.indices == other.indices).all()
    assert (item.values == other.values).all()
    for wrong in (parts[:1], parts[::2]):
        with pytest.raises(ValueError, match="a worker's patch is missing"):
            grace.patch.join(wrong)
