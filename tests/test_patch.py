"""grace.patch: the laws of lossless patches, over dtypes, layouts and encodings."""

import json
import subprocess
import sys
import tempfile
import zlib
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.patches import TENSOR, changed, copied, random_bits, same, versions

import grace
from grace.kernels import library
from grace.patch import delta as deltas
from grace.patch.files import INDEX, Safetensors

zstandard = pytest.importorskip("zstandard")
xxhash = pytest.importorskip("xxhash")
ENCODINGS = ("steps", "xor", "overwrite")
ROOT = Path(__file__).parents[1]


@contextmanager
def by(way):
    """Run with the native kernels, or by NumPy alone."""
    if way == "native" and library() is None:
        pytest.skip("the kernels are not built")
    with pytest.MonkeyPatch.context() as patch:
        if way == "numpy":
            patch.setattr(deltas, "library", lambda: None)
        yield


def elements_of(array):
    """The bytes of each element, uint8[n, bytes]."""
    return np.frombuffer(array.tobytes(), np.uint8).reshape(array.size, array.itemsize)


def saved(patch, encoding="steps", version=7, base=6):
    """A patch that was written and read."""
    folder = tempfile.mkdtemp()
    grace.patch.save(patch, folder, version, base, encoding)
    return grace.patch.load(folder)


def two(n=70000, dtype="float32", density=0.05, seed=0):
    return versions(seed, [(dtype, (n,), "plain", density), ("float16", (9, 5), "plain", 0.5)])


# -- laws --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", ["native", "numpy"])
@pytest.mark.parametrize("encoding", [None, *ENCODINGS])
@settings(max_examples=30, deadline=None)
@example(seed=1, kinds=[("float32", (70000,), "plain", 0.3), ("int64", (99,), "strided", 1.0)])
@given(seed=st.integers(0, 2**32), kinds=st.lists(TENSOR, min_size=1, max_size=3))
def test_a_patch_leads_from_base_to_new(way, seed, kinds, encoding):
    base, new = versions(seed, kinds)
    target = copied(base)
    with by(way):
        patch = grace.patch.diff(new, base)
        grace.patch.apply(patch if encoding is None else saved(patch, encoding), target, version=6)
    assert same(target, new)
    elements = sum(each.size for each in new.values())
    differ = sum((elements_of(new[name]) != elements_of(base[name])).any(1).sum() for name in new)
    assert patch.changed == differ
    assert patch.density == differ / max(1, elements)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), kinds=st.lists(TENSOR, min_size=1, max_size=2), encoding=st.sampled_from(ENCODINGS))
def test_both_ways_write_the_same_bytes(seed, kinds, encoding):
    base, new = versions(seed, kinds)
    files = []
    for way in ("native", "numpy"):
        with by(way):
            patch = grace.patch.diff(new, base)
            files.append({each.name: bytes(patch.data_of(each, encoding)) for each in patch.entries if each.changed})
    assert files[0] == files[1]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), kinds=st.lists(TENSOR, min_size=1, max_size=2), encoding=st.sampled_from(ENCODINGS))
def test_a_chain_equals_its_composition(seed, kinds, encoding):
    first, second, third = versions(seed, kinds, 3)
    target, other = copied(first), copied(first)
    for version, (new, base) in enumerate([(second, first), (third, second)]):
        grace.patch.apply(saved(grace.patch.diff(new, base), encoding, version + 1, version), target, version=version)
    grace.patch.apply(grace.patch.diff(third, first), other)
    assert same(target, third)
    assert same(other, third)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    kinds=st.lists(TENSOR, min_size=1, max_size=2),
    encoding=st.sampled_from((None, *ENCODINGS)),
)
def test_items_are_the_changed_elements_and_their_values(seed, kinds, encoding):
    base, new = versions(seed, kinds)
    patch = grace.patch.diff(new, base)
    items = list(patch.items() if encoding is None else saved(patch, encoding).items(base))
    target = {name: np.array(each).reshape(-1) for name, each in base.items()}
    for item in items:
        assert (np.diff(item.indices) > 0).all()
        assert item.shape == new[item.name].shape
        assert item.dtype == new[item.name].dtype.name
        before = target[item.name][item.indices]
        differ = before.view(np.uint8).reshape(before.size, -1) != item.values.view(np.uint8).reshape(before.size, -1)
        assert differ.any(1).all()
        target[item.name][item.indices] = item.values.view(target[item.name].dtype)
    assert same(target, new)


def test_special_numbers_keep_their_bits():
    quiet = np.array([0x7FC00001, 0x7F800001, 0xFFC12345, 0x80000000, 0, 1, 0x807FFFFF], np.uint32).view(np.float32)
    for base, new in [(quiet, quiet[::-1].copy()), (np.zeros(7, "f4"), quiet), (quiet, -np.zeros(7, "f4"))]:
        target = {"w": base.copy()}
        grace.patch.apply(saved(grace.patch.diff({"w": new}, {"w": base})), target)
        assert target["w"].tobytes() == new.tobytes()
    assert grace.patch.diff({"w": np.float32([-0.0])}, {"w": np.float32([0.0])}).changed == 1
    assert grace.patch.diff({"w": np.float32([np.nan])}, {"w": np.float32([np.nan])}).changed == 0


def test_tied_weights_are_compared_and_sent_once():
    base, new = two()
    one, other = (({**each, "head": each["layer.0"]}) for each in (new, base))
    patch = grace.patch.diff(one, other)
    assert patch.elements == sum(each.size for each in new.values())
    assert patch.bytes == grace.patch.diff(new, base).bytes
    tied, apart = copied(base), copied(base)
    tied["head"] = tied["layer.0"]
    apart["head"] = base["layer.0"].copy()
    for target in (tied, apart):
        grace.patch.apply(saved(patch), target)
        assert same(target, one)


def test_a_patch_takes_the_memory_of_its_changes():
    n = 1 << 20
    base = {"w": random_bits(np.random.default_rng(0), (n,), "float16")}
    patch = grace.patch.diff({"w": changed(np.random.default_rng(1), base["w"], 0.05)}, base)
    assert patch.entries[0].delta.nbytes <= 6 * patch.changed + n // 65536 * 4


def test_threads_change_nothing():
    base, new = versions(0, [("float16", (1000, 99), "plain", 0.1)] * 6)
    one, other = (grace.patch.diff(new, base, threads=threads) for threads in (1, 3))
    assert [bytes(one.data_of(each)) for each in one.entries] == [bytes(other.data_of(each)) for each in other.entries]
    target = copied(base)
    grace.patch.apply(other, target, threads=3)
    assert same(target, new)


# -- what is refused ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_patches_out_of_turn_are_refused_with_what_is_missing(encoding):
    chain = versions(0, [("float32", (5000,), "plain", 0.1), ("int8", (70,), "plain", 0.5)], 4)
    patches = [saved(grace.patch.diff(b, a), encoding, n + 1, n) for n, (a, b) in enumerate(pairwise(chain))]
    target = copied(chain[0])

    def refused(patch, version, text):
        before = copied(target)
        with pytest.raises(grace.patch.Refused, match=text):
            grace.patch.apply(patch, target, version=version)
        assert same(target, before)

    refused(patches[1], 0, "missing are the patches from 0 to 1")
    refused(patches[2], 0, "missing are the patches from 0 to 2")
    refused(patches[1], None, "checksum of the result")
    grace.patch.apply(patches[0], target, version=0)
    refused(patches[0], 1, "applied before")
    refused(patches[2], 1, "missing are the patches from 1 to 2")
    if encoding != "overwrite":  # which says the same twice
        refused(patches[0], None, "checksum of the result")
    grace.patch.apply(patches[1], target, version=1)
    assert same(target, chain[2])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_foreign_tensors_are_refused(encoding):
    base, new = two()
    patch = saved(grace.patch.diff(new, base), encoding)
    with pytest.raises(grace.patch.Refused, match=r"lacks layer\.1"):
        grace.patch.apply(patch, {"layer.0": base["layer.0"].copy()})
    for wrong in (base["layer.0"][:-1], np.zeros(70000), random_bits(np.random.default_rng(3), (70000,), "float32")):
        target = {**copied(base), "layer.0": wrong.copy()}
        before = copied(target)
        with pytest.raises(grace.patch.Refused, match=r"layer\.0"):
            grace.patch.apply(patch, target)
        assert same(target, before)


def test_steps_also_checks_what_did_not_change():
    base, new = two(density=0.0)
    patch = saved(grace.patch.diff(new, base))
    target = copied(base)
    target["layer.0"][3] += 1
    with pytest.raises(grace.patch.Refused, match=r"layer\.0"):
        grace.patch.apply(patch, target)
    with pytest.raises(grace.patch.Refused, match="knows nothing of more"):
        grace.patch.apply(patch, {**copied(base), "more": np.zeros(3)})


def test_different_tensors_have_no_difference():
    base, new = two()
    with pytest.raises(ValueError, match=r"layer\.1"):
        grace.patch.diff({"layer.0": new["layer.0"]}, base)
    with pytest.raises(ValueError, match=r"new is float32\[2, 35000\], base is float32\[70000\]"):
        grace.patch.diff({**new, "layer.0": new["layer.0"].reshape(2, -1)}, base)
    with pytest.raises(TypeError, match="object"):
        grace.patch.diff({"w": np.array([None])}, {"w": np.array([None])})
    with pytest.raises(ValueError, match="choose one of xxh3-128"):
        grace.patch.diff(new, base, checksum="crc")


def test_versions_and_encodings_are_checked_before_anything_is_written(tmp_path):
    patch = grace.patch.diff(*reversed(two()))
    for wrong in ((3, 3, "steps"), (3, 4, "steps"), (3, 2, "zip"), (1, -1, "steps")):
        with pytest.raises(ValueError):
            grace.patch.save(patch, tmp_path / "patches", *wrong)
    assert not (tmp_path / "patches").exists()
    grace.patch.save(patch, tmp_path, 3, 2)
    with pytest.raises(FileExistsError, match="weight_v000003"):
        grace.patch.save(patch, tmp_path, 3, 2)
    with pytest.raises(grace.patch.Refused, match="is for version 2, not 1"):
        grace.patch.load(tmp_path, base=1)
    with pytest.raises(FileNotFoundError, match="no complete version 9"):
        grace.patch.load(tmp_path, 9)
    with pytest.raises(ValueError, match="make a new one by diff"):
        grace.patch.save(grace.patch.load(tmp_path), tmp_path, 4, 3, "xor")


def test_an_interrupted_write_is_undone(monkeypatch):
    from grace.patch import changes

    base, new = versions(0, [("float32", (500,), "plain", 0.5)] * 3)
    patch, target, calls = grace.patch.diff(new, base), copied(base), []
    scatter = changes.scatter

    def interrupted(*arguments):
        calls.append(1)
        scatter(*arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(changes, "scatter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        grace.patch.apply(patch, target)
    assert same(target, base)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_damaged_patches_give_no_wrong_result(encoding, tmp_path):
    """A quick portion; python -m benchmarks.patch_faults has 10,000."""
    found = faults().fuzz(tmp_path, encoding, 150, seed=1)
    assert found["wrong"] == found["crashed"] == found["changed"] == 0
    assert found["refused"] + found["harmless"] == 150
    assert found["refused"] > 100
    if encoding == "steps":
        assert found["harmless"] == 0


@pytest.mark.slow
def test_a_killed_process_leaves_the_old_or_the_new_version(tmp_path):
    """A quick portion; python -m benchmarks.patch_faults has 100 of each kind. It forks, so in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.patch_faults", "--only", "killed", "--kills", "15"]
    done = subprocess.run([*command, "--json", tmp_path / "found.json"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    killed = json.loads((tmp_path / "found.json").read_text())["killed"]
    for found in killed.values():
        assert found["between"] == 0
        assert found["old"] + found["new"] == 15
        assert found["went on"] == found["old"] > 0, "what was left does not disturb the next one"


def faults():
    from benchmarks import patch_faults

    return patch_faults


# -- the shared format -------------------------------------------------------------------------------------------------
def oracle(folder, base):
    """The shared format as its documentation describes it: uint8 streams in safetensors files, decoded alone."""
    from safetensors import safe_open

    index = json.loads((folder / INDEX).read_text())
    how, new = index["metadata"], dict(base)
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "numpy") as opened:
            stream, wanted = opened.get_tensor(name), opened.metadata()[name]
        data = zstandard.ZstdDecompressor().decompress(stream.tobytes(), max_output_size=1 << 24)
        old = np.frombuffer(base[name].tobytes(), np.uint8)
        if how["delta_encoding"] == "xor":
            bits = old ^ np.frombuffer(data, np.uint8)
        else:
            count = int.from_bytes(data[:4], "little")
            bits = old.copy()
            bits[np.frombuffer(data[4 : 4 + 4 * count], "<u4")] = np.frombuffer(data[4 + 4 * count :], np.uint8)
        sums = {"adler32": f"{zlib.adler32(bits):08x}", "xxh3-128": xxhash.xxh3_128_hexdigest(bits.tobytes())}
        assert sums[how["checksum_format"]] == wanted
        new[name] = bits.view(base[name].dtype).reshape(base[name].shape)
    return new


def written(folder, new, base, encoding, checksum):
    """The oracle's writer: by the library safetensors, with versions as ModelExpress writes them."""
    from safetensors.numpy import save_file

    tensors, sums = {}, {}
    for name in new:
        bits, old = (np.frombuffer(each[name].tobytes(), np.uint8) for each in (new, base))
        where = np.flatnonzero(bits != old).astype("<u4")
        if not where.size:
            continue
        data = (
            (bits ^ old).tobytes()
            if encoding == "xor"
            else len(where).to_bytes(4, "little") + where.tobytes() + bits[where].tobytes()
        )
        stream = zstandard.ZstdCompressor(level=1, write_content_size=encoding == "xor").compress(data)
        tensors[name] = np.frombuffer(stream, np.uint8)
        sums[name] = f"{zlib.adler32(bits):x}" if checksum == "adler32" else xxhash.xxh3_128_hexdigest(bits.tobytes())
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model-00000-of-00001.safetensors", sums)
    metadata = {"version": "v7", "base_version": "v6", "delta_encoding": encoding, "compression_format": "zstd"}
    index = {
        "metadata": {**metadata, "checksum_format": checksum},
        "weight_map": dict.fromkeys(tensors, "model-00000-of-00001.safetensors"),
    }
    (folder / INDEX).write_text(json.dumps(index))


SHARED = pytest.mark.parametrize("encoding, checksum", [(e, c) for e in ENCODINGS[1:] for c in ("adler32", "xxh3-128")])


@SHARED
def test_another_reader_reads_what_is_written(encoding, checksum, tmp_path):
    pytest.importorskip("safetensors")
    base, new = versions(
        5, [("float16", (300, 451), "plain", 0.03), ("int64", (7,), "plain", 0.0), ("float32", (), "plain", 1.0)]
    )
    folder = grace.patch.save(grace.patch.diff(new, base, checksum=checksum), tmp_path, 7, 6, encoding)
    assert folder.name == "weight_v000007"
    assert sorted(path.name for path in folder.iterdir()) == ["model-00000-of-00001.safetensors", INDEX]
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"] == {
        "version": "000007",
        "base_version": "000006",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": checksum,
    }
    assert "layer.1" not in index["weight_map"], "unchanged tensors are absent"
    assert same(oracle(folder, base), new)


@SHARED
def test_what_another_writer_writes_is_read(encoding, checksum, tmp_path):
    pytest.importorskip("safetensors")
    base, new = versions(
        6, [("float16", (300, 451), "plain", 0.03), ("int64", (7,), "plain", 0.0), ("bool", (99,), "plain", 1.0)]
    )
    written(tmp_path / "weight_v000007", new, base, encoding, checksum)
    patch, target = grace.patch.load(tmp_path), copied(base)
    assert (patch.version, patch.base_version, patch.encoding) == (7, 6, encoding)
    grace.patch.apply(patch, target, version=6)
    assert same(target, new)


def test_a_large_patch_goes_on_in_further_files(tmp_path, monkeypatch):
    monkeypatch.setattr("grace.patch.folders.SHARD", 1000)
    base, new = versions(0, [("float16", (3000,), "plain", 0.5)] * 4)
    for encoding in ENCODINGS:
        folder = grace.patch.save(grace.patch.diff(new, base), tmp_path / encoding, 1, 0, encoding)
        assert (folder / "model-00003-of-00004.safetensors").exists()
        patch, target = grace.patch.load(folder), copied(base)
        grace.patch.apply(patch, target)
        assert same(target, new)
        if encoding == "steps":
            assert patch.changed == grace.patch.diff(new, base).changed


def test_positions_beyond_32_bits_are_refused():
    from grace.patch.coding import encode
    from grace.patch.delta import Delta

    one = np.array([1], np.uint16)
    with pytest.raises(ValueError, match="use the encoding xor or steps"):
        encode(Delta((1 << 31) + 1, np.array([1], np.int32), one, one, one), "overwrite")


# -- folders -----------------------------------------------------------------------------------------------------------
def checkpoint(folder, tensors, files=1):
    """A checkpoint as the library safetensors writes it."""
    from safetensors.numpy import save_file

    folder.mkdir()
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    where = {name: f"model-{n % files:05d}-of-{files:05d}.safetensors" for n, name in enumerate(names)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in names if where[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": where}))
    return folder


def content(folder):
    from safetensors.numpy import load_file

    index = folder / INDEX
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    return {name: each for file in files for name, each in load_file(folder / file).items()}


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_folders_are_compared_and_patched(files, encoding, tmp_path):
    pytest.importorskip("safetensors")
    chain = versions(0, [(dtype, (70, 51), "plain", 0.2) for dtype in ("float16", "float32", "int8", "float64")], 3)
    folders = [checkpoint(tmp_path / f"{n}", each, files) for n, each in enumerate(chain)]
    for n in (0, 1):
        patch = saved(
            grace.patch.diff(folders[n + 1], folders[n]) if n else grace.patch.diff(chain[1], chain[0]),
            encoding,
            n + 1,
            n,
        )
        grace.patch.apply(patch, folders[0])
        assert same(content(folders[0]), chain[n + 1])
        with pytest.raises(grace.patch.Refused, match="applied before"):
            grace.patch.apply(patch, folders[0])
        if n == 0:
            folders[1] = checkpoint(tmp_path / "again", chain[1], files)
    assert len(list(folders[0].iterdir())) == files + (files > 1), "nothing old is left"


def test_a_folder_is_mapped_not_read(tmp_path):
    pytest.importorskip("safetensors")
    base, _ = two()
    file = Safetensors(checkpoint(tmp_path / "a", base) / "model.safetensors")
    assert file.data("layer.0").readonly
    assert bytes(file.data("layer.0")) == base["layer.0"].tobytes()
    (tmp_path / "a" / "model.safetensors").write_bytes(b"\0" * 5)
    with pytest.raises(ValueError, match="is damaged"):
        grace.patch.diff(base, tmp_path / "a")


def test_checksums_of_adler32_may_lack_zeros(tmp_path):
    base = {"w": np.zeros(3, np.uint8)}
    new = {"w": np.array([0, 0, 1], np.uint8)}
    patch = saved(grace.patch.diff(new, base, checksum="adler32"), "xor")
    patch.entries[0].checksum = patch.entries[0].checksum.lstrip("0").upper()
    grace.patch.apply(patch, base)
    assert same(base, new)


def test_no_toolkit_is_loaded():
    names = ("torch", "tensorflow", "jax", "zstandard", "xxhash")
    code = f"import sys, grace; grace.patch.diff; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs xxhash: pip install '\.\[patch\]'"):
        grace.patch.diff(*two())


def test_the_page_has_the_tables_of_the_stored_results():
    from benchmarks.patch import RESULT, tables

    page = (ROOT / "docs" / "patch.md").read_text()
    for name, table in tables(json.loads(RESULT.read_text())).items():
        assert table in page, f"{name}: python -m benchmarks.patch --show"
    stored = json.loads(RESULT.with_name("patch-faults.json").read_text())
    refused = sum(each["refused"] for each in stored["damaged"].values())
    assert f"{refused:,} refused" in page
    assert sum(sum(each.values()) for each in stored["damaged"].values()) == 10_000
    assert [each["between"] for each in stored["killed"].values()] == [0, 0]
