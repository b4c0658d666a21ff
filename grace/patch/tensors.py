"""Tensors of any toolkit as flat arrays of unsigned integers, which share the tensors' memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from grace.patch.files import SIZES

Array = Any
Region = tuple[tuple[int, int], ...]
"""The part of a tensor that a worker holds: begin and end in each dimension."""


@dataclass
class View:
    """A tensor, or a worker's shard of it.

    ``words``: its elements in order, as unsigned integers of the element's size (complex128: two of 8 bytes).
    ``write``: takes new words, if ``words`` does not share the tensor's memory; None if it does.
    """

    words: Array
    dtype: str
    shape: tuple[int, ...]
    region: Region
    write: Callable[[Array], None] | None = None

    @property
    def whole(self) -> bool:
        """Whether the view has all elements of the tensor."""
        return self.region == everything(self.shape)

    @property
    def data(self) -> memoryview:
        """The bytes."""
        return memoryview(self.words.view(np.uint8))

    @property
    def key(self) -> tuple[int, int, str]:
        """Equal for two views of the same memory."""
        return self.words.ctypes.data, self.words.nbytes, self.dtype


def everything(shape: tuple[int, ...]) -> Region:
    """The region of a whole tensor."""
    return tuple((0, n) for n in shape)


def width_of(dtype: str) -> int:
    """Bytes of a word."""
    if dtype not in SIZES:
        raise ValueError(f"dtype {dtype} is unknown: patches take {', '.join(SIZES)}")
    return min(8, SIZES[dtype])


def words_of(data: Any, dtype: str) -> Array:
    """A buffer of bytes as words."""
    return np.frombuffer(data, np.uint8).view(f"u{width_of(dtype)}")


def view(tensors: Mapping[str, Any], name: str) -> View:
    """View an entry of a mapping. Raises TypeError for what is no tensor."""
    tensor = tensors[name]
    if isinstance(tensor, View):
        return tensor
    toolkit = type(tensor).__module__.partition(".")[0]
    if toolkit in ("torch", "torchao") or hasattr(tensor, "untyped_storage"):
        return _torch(tensor)
    if toolkit in ("tensorflow", "keras"):
        return _tensorflow(tensors, name, tensor)
    if not isinstance(tensor, np.ndarray):
        return _other(tensors, name, tensor)
    dtype, (flat, shared) = _name(tensor.dtype), _flat(tensor)
    write = None
    if not (shared and tensor.flags.writeable):

        def write(words: Array) -> None:
            if not tensor.flags.writeable:
                raise ValueError(f"{name} is a read-only array: apply the patch to a copy of it")
            tensor[...] = words.view(tensor.dtype).reshape(tensor.shape)

    return View(flat, dtype, tensor.shape, everything(tensor.shape), write)


def _name(dtype: np.dtype[Any]) -> str:
    if dtype.name not in SIZES or dtype.byteorder == ">":
        raise TypeError(f"dtype {dtype} cannot be patched: use one of {', '.join(SIZES)}, little-endian")
    return dtype.name


def _flat(array: Array) -> tuple[Array, bool]:
    # Returns the words, and whether they share the array's memory.
    flat = np.ascontiguousarray(array).reshape(-1)
    shared = array.flags.c_contiguous
    return flat.view(f"u{min(8, flat.itemsize)}"), shared


def _torch(tensor: Any) -> View:
    torch = sys.modules["torch"]
    tensor = tensor.detach()
    shape = tuple(tensor.shape)
    region = everything(shape)
    if hasattr(tensor, "to_local"):
        region = _region(tensor)
        tensor = tensor.to_local()
    dtype = str(tensor.dtype).removeprefix("torch.")
    size = width_of(dtype)
    plain = tensor.resolve_conj().resolve_neg()
    near = plain.contiguous().cpu().reshape(-1)
    words = near.view(torch.uint8).numpy().view(f"u{size}") if near.numel() else np.empty(0, f"u{size}")
    write = None
    if near.numel() and near.data_ptr() != tensor.data_ptr():

        def write(words: Array) -> None:
            fresh = torch.from_numpy(words.view(np.uint8)).view(tensor.dtype).reshape(tensor.shape)
            tensor.copy_(fresh)

    return View(words, dtype, shape, region, write)


def _region(tensor: Any) -> Region:
    # The local part of a DTensor.
    from torch.distributed.tensor import Partial
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(isinstance(each, Partial) or "Strided" in type(each).__name__ for each in tensor.placements):
        raise ValueError(f"placements {tensor.placements} cannot be patched: redistribute to Shard or Replicate first")
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple((int(begin), int(begin + n)) for begin, n in zip(offsets, sizes, strict=True))


def _tensorflow(tensors: Mapping[str, Any], name: str, tensor: Any) -> View:
    import tensorflow as tf

    value = tf.convert_to_tensor(tensor)
    dtype, shape = value.dtype.name, tuple(value.shape)
    size = width_of(dtype)
    try:
        near = np.asarray(memoryview(value))
    except (TypeError, ValueError, BufferError):  # no buffer of this dtype
        near = np.asarray(memoryview(tf.bitcast(value, {1: tf.uint8, 2: tf.uint16}[size])))

    def write(words: Array) -> None:
        fresh = words.view(value.dtype.as_numpy_dtype).reshape(shape)
        if hasattr(tensor, "assign"):
            tensor.assign(fresh)
        else:
            _replace(tensors, name, tf.constant(fresh))

    return View(near.reshape(-1).view(f"u{size}"), dtype, shape, everything(shape), write)


def _other(tensors: Mapping[str, Any], name: str, tensor: Any) -> View:
    # JAX's arrays, and whatever else offers a buffer or DLPack.
    if type(tensor).__module__.partition(".")[0] in ("jax", "jaxlib"):
        array = np.asarray(tensor)
    elif hasattr(tensor, "__dlpack__"):
        array = np.from_dlpack(tensor)
    elif hasattr(tensor, "__array__"):
        array = np.asarray(tensor)
    else:
        raise TypeError(f"{name} is a {type(tensor).__name__}, not a tensor: leave it out")

    def write(words: Array) -> None:
        fresh = words.view(array.dtype).reshape(array.shape)
        if type(tensor).__module__.partition(".")[0] not in ("jax", "jaxlib"):
            raise TypeError(f"{name}: a {type(tensor).__name__} cannot be written to; patch a NumPy copy of it")
        import jax

        _replace(tensors, name, jax.device_put(fresh, tensor.sharding))

    return View(_flat(array)[0], _name(array.dtype), array.shape, everything(array.shape), write)


def _replace(tensors: Mapping[str, Any], name: str, fresh: Any) -> None:
    # Tensors that cannot change are replaced in their dictionary.
    if not isinstance(tensors, MutableMapping):
        raise TypeError(f"{name} cannot change, and its {type(tensors).__name__} takes no other: pass a dict")
    tensors[name] = fresh


def part(view: View, region: Region) -> View:
    """A region of a view of a whole tensor; raises ValueError if the view lacks some of it."""
    if view.region == region:
        return view
    if not view.whole:
        raise ValueError(
            f"holds {view.region} of a tensor of shape {view.shape}, and the patch is of {region}: "
            "use the same sharding, or whole tensors"
        )
    lanes = view.words.size // max(1, prod(view.shape))
    grid = view.words.reshape(*view.shape, lanes)[tuple(slice(*each) for each in region)]
    flat, shared = grid.reshape(-1), grid.flags.c_contiguous

    def write(words: Array) -> None:
        grid[...] = words.reshape(grid.shape)
        if view.write is not None:
            view.write(view.words)

    # With a `write` of the whole view, words are a copy; a later region of it must see what an earlier one wrote.
    return View(flat, view.dtype, view.shape, region, None if shared and view.write is None else write)
