"""Local training with Keras over Horovod, while a worker is lost and another one joins: OUT."""

import os
import sys
import time
import zlib

import numpy as np
from launch import TESTS, save

out = sys.argv[1]
sys.path.insert(0, str(TESTS.parent / "examples"))
os.environ["KERAS_BACKEND"] = "tensorflow"
import digits
import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from digits_keras import make_model

import grace

EPOCHS, BATCH = 16, 32
PARAMS = {"local": {"preset": "diloco", "sync_every": 10}, "compressor": "topk", "compress_ratio": 0.1}
found = {"followed": [], "landings": {}}


def checksum(state):
    return zlib.crc32(b"".join(np.asarray(state[key][name]).tobytes() for key in sorted(state) for name in state[key]))


class Commit(keras.callbacks.Callback):
    """Wait until exchanges in flight have landed, and commit after each epoch."""

    def __init__(self, state):
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch, logs=None):
        state, local = self.state, self.state.grace
        local.finish()
        own = zlib.crc32(b"".join(variable.numpy().tobytes() for variable in self.model.trainable_variables))
        found["landings"][epoch + 1] = (local.world_size, local.landed, checksum(local.global_state()), own)
        state.epoch = epoch + 1
        if local.rank == 0:
            print(f"epoch {epoch + 1}: {local.world_size} workers, accuracy {logs['val_accuracy']:.3f}", flush=True)
        if local.world_size == 3 and epoch >= EPOCHS // 2:
            time.sleep(1.5)  # give the fourth worker time to join
        state.commit()


@grace.elastic.run
def train(state):
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = "60"  # this machine may be busy when a worker starts
    local = state.grace
    found["followed"].append(local.world_size)
    images, labels, test_images, test_labels = digits.load(local.rank, local.world_size)
    batches = tf.data.Dataset.from_tensor_slices((images[..., None], labels)).shuffle(len(images), seed=0)
    total = len(digits.load(0, 1)[0])
    batches = batches.batch(BATCH, drop_remainder=True).take(total // local.world_size // BATCH)  # equal numbers
    validation = (test_images[..., None], test_labels)
    callbacks = [grace.tensorflow.LocalCallback(local), Commit(state)]
    state.model.fit(
        batches, initial_epoch=state.epoch, epochs=EPOCHS, validation_data=validation, callbacks=callbacks, verbose=0
    )


tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
hvd.init()
keras.utils.set_random_seed(0)
model = make_model()
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"], jit_compile=False)
state = grace.elastic.KerasState(model, grace=grace.local.from_params(PARAMS), epoch=0)
train(state)
images, labels = digits.load(0, 1)[2:]
found["accuracy"] = model.evaluate(images[..., None], labels, verbose=0, batch_size=len(images))[1]
save(out, hvd.rank(), found)
