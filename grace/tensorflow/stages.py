"""`Boundary`: compression between pipeline stages, in one process, as a Keras layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import keras
import tensorflow as tf

from grace.backends import get_backend
from grace.core import Compressor, Context, name_of
from grace.stages import INT8, Direction, ExampleTopK, directions, send
from grace.stages.settings import Choice


@keras.saving.register_keras_serializable("grace")
class Boundary(keras.layers.Layer):
    """Compress activations on their way forward and their gradients on their way back.

    Input: floats [m, ...]; with "aq" a list of two: such floats, and the examples' IDs, integers [m]. Output: the shape
    and dtype of the floats. Each example is compressed by itself, so the batch size need not be known. The gradient of
    the compressor is taken as the identity (straight through), except with ``same_mask``.

    ``forward``, ``backward``, ``feedback``, ``same_mask``, ``samples``, ``seed``: as for `grace.stages.directions`.
    "aq" stores float32 in the layer's weights. ``compress_in_eval``: compress activations outside of training, too,
    without feedback. ``batch_size``: for "ef" and "ef21", which keep a buffer for each position in a batch.
    Raises ValueError for conflicting settings.
    """

    def __init__(
        self,
        forward: Choice = INT8,
        backward: Choice = INT8,
        feedback: str = "none",
        same_mask: bool = False,
        compress_in_eval: bool = True,
        batch_size: int = 0,
        samples: int = 0,
        seed: int = 0,
        **kwargs: Any,
    ):
        if (backend := keras.backend.backend()) != "tensorflow":
            raise RuntimeError(
                f"grace.tensorflow.Boundary is for Keras on TensorFlow, but Keras runs on {backend}: set "
                "KERAS_BACKEND=tensorflow before keras is imported, or use grace.torch.Boundary in PyTorch"
            )
        super().__init__(**kwargs)
        self._ahead, self._back = directions(
            forward, backward, feedback, same_mask, seed, samples=samples, stored="float32"
        )
        if feedback in ("ef", "ef21") and batch_size < 1:
            raise ValueError(f"feedback={feedback!r} keeps a buffer for each place in a batch: give batch_size")
        self.compress_in_eval = compress_in_eval
        self.batch_size = batch_size
        self.supports_jit = False  # examples are compressed in a loop, by methods that XLA may not know
        self._options: dict[str, Any] = {
            "forward": _plain(forward),
            "backward": _plain(backward),
            "feedback": feedback,
            "same_mask": same_mask,
            "compress_in_eval": compress_in_eval,
            "batch_size": batch_size,
            "samples": samples,
            "seed": seed,
        }

    def get_config(self) -> dict[str, Any]:
        """The arguments, as plain data."""
        return {**super().get_config(), **self._options}

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape[0] if self._ahead.feedback == "aq" else input_shape

    def build(self, input_shape: Any) -> None:
        shape = input_shape[0] if self._ahead.feedback == "aq" else input_shape
        example = tuple(shape[1:])
        if None in example:
            raise ValueError(f"a Boundary needs the shape of an example, but it is {example}: give all sizes")
        self._step = self._variable("step", (), "int64")
        rows = self._ahead.samples if self._ahead.feedback == "aq" else self.batch_size
        self._forward_buffer = self._backward_buffer = None
        if self._ahead.feedback != "none":
            self._forward_buffer = self._variable("forward_buffer", (rows, *example))
        if self._back.feedback != "none":
            self._backward_buffer = self._variable("backward_buffer", (rows, *example))
        self._seen: Any = self._variable("seen", (rows,), "int32") if self._ahead.feedback == "aq" else None
        self.built = True

    def _variable(self, name: str, shape: tuple[int, ...], dtype: str = "float32") -> Any:
        # autocast=False: buffers stay float32 under a mixed policy.
        return self.add_weight(
            name=name, shape=shape, dtype=dtype, initializer="zeros", trainable=False, autocast=False
        )

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Return the input as the next stage receives it."""
        x, ids = (inputs[0], inputs[1]) if self._ahead.feedback == "aq" else (inputs, None)
        if not training and not self.compress_in_eval:
            return x
        step = tf.identity(self._step.value)
        if training:
            self._step.assign_add(1)

        @tf.custom_gradient
        def cross(x: Any) -> Any:
            value, mask = self._cross(self._ahead, "forward", x, self._forward_buffer, step, ids, training)

            def gradient(g: Any) -> Any:
                if not training:
                    return g
                if self._back.masked:
                    return g * tf.cast(mask, g.dtype)
                return self._cross(self._back, "backward", g, self._backward_buffer, step, None, training)[0]

            return value, gradient

        return cross(x)

    def _cross(
        self, how: Direction, direction: str, x: Any, buffer: Any, step: Any, ids: Any, training: bool
    ) -> tuple[Any, Any]:
        # Returns the values that the receiver sees, and for a top-k the mask of sent elements, both in the shape of x.
        if how.plain:
            return tf.identity(x), x
        xp = get_backend("tensorflow")
        rows, example = tf.shape(x)[0], tuple(x.shape[1:])
        given = tf.reshape(tf.cast(x, "float32"), (rows, math.prod(example)))
        feedback = how.feedback if training else "none"
        fresh = None
        if feedback == "none":
            state = given
        else:
            places = tf.range(rows) if ids is None else tf.cast(tf.reshape(ids, (-1,)), "int32")
            most = self.batch_size if ids is None else how.samples
            message = (
                f"this batch has more examples than batch_size={most}"
                if ids is None
                else f"the ids of samples={most} are 0 .. {most - 1}"
            )
            with tf.control_dependencies([tf.debugging.assert_less(places, most, message)]):
                state = tf.reshape(tf.gather(buffer.value, places), tf.shape(given))
            if ids is not None:
                fresh = tf.gather(self._seen.value, places) == 0
                state = tf.where(fresh[:, None], given, state)  # the first activations of an example are sent exactly
        key = "error" if feedback == "ef" else "estimate"

        def one(parts: Any) -> Any:
            index, values, before = parts
            # Each example has its own random numbers.
            ctx = Context(
                xp=xp,
                name=f"{self.name}/{direction}",
                shape=(1, *example),
                step=step * 2**20 + tf.cast(index, "int64"),
                seed=how.seed,
            )
            payloads, value, after = send(how.codec, feedback, values, {key: before}, ctx)
            mask = values
            if isinstance(how.compressor, ExampleTopK):
                mask = xp.scatter(xp.zeros(ctx.size), how.codec.positions(payloads, ctx), 1.0)
            return value, after[key], mask

        kind = tf.TensorSpec(given.shape[1:], "float32")
        value, after, mask = tf.map_fn(one, (tf.range(rows), given, state), fn_output_signature=(kind, kind, kind))
        if feedback != "none":
            shape = tf.concat([[rows], tf.constant(example, "int32", (len(example),))], 0)
            if fresh is not None:
                finite = tf.reduce_all(tf.math.is_finite(after), 1)
                kept = tf.boolean_mask(places, finite)
                after = tf.boolean_mask(after, finite)
                shape = tf.concat([[tf.shape(after)[0]], shape[1:]], 0)
                self._seen.assign(tf.tensor_scatter_nd_update(self._seen.value, kept[:, None], tf.ones_like(kept)))
                places = kept
            buffer.assign(tf.tensor_scatter_nd_update(buffer.value, places[:, None], tf.reshape(after, shape)))
        return tf.cast(tf.reshape(value, tf.shape(x)), x.dtype), tf.reshape(mask, tf.shape(x))


def _plain(choice: Choice) -> Any:
    # The argument as plain data, for a saved model.
    if isinstance(choice, Compressor):
        return {"compressor": name_of(choice), **asdict(choice)}  # type: ignore[call-overload]
    return dict(choice) if isinstance(choice, Mapping) else choice
