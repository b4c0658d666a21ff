"""grace.patch's publisher and receiver: chains, checkpoints, receivers that missed versions."""

import json
import shutil

import numpy as np
import pytest
from support.patches import copied, same, versions

import grace
from grace.patch import Publisher, Receiver, Refused
from grace.patch.files import INDEX

pytest.importorskip("zstandard")
pytest.importorskip("xxhash")

KINDS = [("float16", (500,), "plain", 0.1), ("float32", (7, 9), "plain", 0.2), ("int64", (), "plain", 1.0)]


def chain(count, seed=0):
    return versions(seed, KINDS, count)


def published(folder, tensors, **how):
    publisher = Publisher(folder, **{"anchor_every": 3, "keep": 0, **how})
    for each in tensors:
        publisher.publish(each)
    return publisher


@pytest.mark.parametrize("encoding", ["steps", "xor", "overwrite"])
def test_a_receiver_follows(encoding, tmp_path):
    tensors = chain(6)
    target, receiver = copied(tensors[-1]), Receiver(tmp_path)
    assert receiver.update(target) is None
    publisher = Publisher(tmp_path, encoding=encoding)
    for number, each in enumerate(tensors):
        assert publisher.publish(each).name == f"weight_v{number:06d}"
        assert receiver.update(target) == publisher.version == number
        assert same(target, each)
        assert receiver.update(target) == number


def test_missed_versions_are_made_up_for(tmp_path):
    tensors = chain(6)
    published(tmp_path, tensors)
    for held in range(6):
        target, receiver = copied(tensors[held]), Receiver(tmp_path, held)
        assert receiver.update(target) == 5
        assert same(target, tensors[5])
    for gone in (1, 2):  # a checkpoint is at 3
        shutil.rmtree(tmp_path / f"weight_v00000{gone}")
    target, receiver = copied(tensors[0]), Receiver(tmp_path, 0)
    assert receiver.update(target) == 5
    assert same(target, tensors[5])
    shutil.rmtree(tmp_path / "weight_v000004")
    target, receiver = copied(tensors[0]), Receiver(tmp_path, 0)
    before = copied(target)
    with pytest.raises(Refused, match="lacks version 4, which the patches up to 5 build on"):
        receiver.update(target)
    assert same(target, before)


def test_a_damaged_patch_stops_the_receiver_at_the_version_before(tmp_path):
    tensors = chain(4)
    published(tmp_path, tensors, anchor_every=64)
    file = tmp_path / "weight_v000002" / "model-00000-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    target, receiver = copied(tensors[0]), Receiver(tmp_path, 0)
    with pytest.raises(Refused, match="weight_v000002"):
        receiver.update(target)
    assert receiver.version == 1
    assert same(target, tensors[1])


def test_a_damaged_checkpoint_is_refused(tmp_path):
    tensors = chain(1)
    published(tmp_path, tensors)
    file = tmp_path / "weight_v000000" / "model-00000-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    target = {name: np.zeros_like(each) for name, each in tensors[0].items()}
    with pytest.raises(ValueError, match="is damaged: its checksum is another"):
        Receiver(tmp_path).update(target)
    assert not any(each.any() for each in target.values())


def test_tensors_of_another_model_are_refused(tmp_path):
    tensors = chain(2)
    published(tmp_path, tensors)
    target = {**copied(tensors[0]), "layer.0": np.zeros(3, np.float16)}
    with pytest.raises(Refused, match=r"layer\.0: the checkpoint has float16\[500\], the target float16\[3\]"):
        Receiver(tmp_path).update(target)
    with pytest.raises(Refused, match=r"differ in their tensors: layer\.2"):
        Receiver(tmp_path).update({name: target[name] for name in ("layer.0", "layer.1")})
    with pytest.raises(ValueError, match="differ in their tensors"):
        Publisher(tmp_path).publish({"layer.0": np.zeros(3)})


def test_a_folder_is_brought_up_to_date(tmp_path):
    tensors = chain(5)
    publisher = published(tmp_path / "patches", tensors[:2])
    target = tmp_path / "target"
    receiver = Receiver(tmp_path / "patches")
    for count in (2, 4, 5):
        for each in tensors[publisher.version + 1 : count]:
            publisher.publish(each)
        assert receiver.update(target) == count - 1
        assert grace.patch.diff(tensors[count - 1], target).changed == 0
    assert Receiver(tmp_path / "patches").update(target) == 4  # the folder knows its version


def test_a_publisher_goes_on(tmp_path):
    tensors = chain(5)
    published(tmp_path, tensors[:2], anchor_every=64)
    again = Publisher(tmp_path, anchor_every=64)
    assert again.version == 1
    for each in tensors[2:]:
        again.publish(each)
    target, receiver = copied(tensors[0]), Receiver(tmp_path, 0)
    assert receiver.update(target) == 4
    assert same(target, tensors[4])


def test_old_versions_are_removed(tmp_path):
    tensors = chain(11)
    published(tmp_path, tensors, keep=2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["anchor_v000006", "anchor_v000009", *(f"weight_v{n:06d}" for n in (7, 8, 9, 10))]
    for held in (0, 6, 8, None):
        target = copied(tensors[held or 0])
        assert Receiver(tmp_path, held).update(target) == 10
        assert same(target, tensors[10])
    again = published(tmp_path, chain(1, seed=5))
    assert again.version == 11


def test_settings_are_checked(tmp_path):
    for wrong in ({"anchor_every": 0}, {"anchor_every": 65}, {"keep": -1}):
        with pytest.raises(ValueError):
            Publisher(tmp_path, **wrong)
    tensors = chain(2)
    published(tmp_path, tensors)
    with pytest.raises(Refused, match="ends at version 1, before the receiver's 9"):
        Receiver(tmp_path, 9).update(copied(tensors[0]))


def test_another_writers_chain_is_followed(tmp_path):
    """Versions as ModelExpress writes them, over a checkpoint that the receiver has."""
    tensors = chain(3)
    for number in (1, 2):
        folder = grace.patch.save(
            grace.patch.diff(tensors[number], tensors[number - 1]), tmp_path, number, number - 1, "xor"
        )
        index = json.loads((folder / INDEX).read_text())
        index["metadata"] |= {"version": f"v{number}", "base_version": f"v{number - 1}"}
        (folder / INDEX).write_text(json.dumps(index))
    target, receiver = copied(tensors[0]), Receiver(tmp_path, 0)
    assert receiver.update(target) == 2
    assert same(target, tensors[2])
