"""scripts/build_horovod.py: the rules that patch the sources, and the key of the cache. Nothing is built here."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "build_horovod.py"
spec = importlib.util.spec_from_file_location("build_horovod", SCRIPT)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)

# Examples for each rule: (file, text before, text after).
CASES = [
    ("CMakeLists.txt", "project(p)\nset(CMAKE_CXX_STANDARD 14)\n", "project(p)\nset(CMAKE_CXX_STANDARD 17)\n"),
    (
        "horovod/torch/CMakeLists.txt",
        "if(A)\n  set( CMAKE_CXX_STANDARD 14 )\n",
        "if(A)\n  set( CMAKE_CXX_STANDARD 17 )\n",
    ),
    (
        "horovod/tensorflow/CMakeLists.txt",
        'list(APPEND S "a/mpi_ops.cc")\nlist(APPEND S "a/xla_mpi_ops.cc")\nadd_library(t ${S})\n',
        'list(APPEND S "a/mpi_ops.cc")\nadd_library(t ${S})\n',
    ),
    (
        "CMakeLists.txt",
        'string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")\n',
        'set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O3 -DNDEBUG")\n',
    ),
    (
        "CMakeLists.txt",
        "project(p)\nadd_subdirectory(horovod/tensorflow)\n# b\nadd_subdirectory(horovod/torch)\nadd_subdirectory(b)\n",
        f"project(p){script.ONE_FILE}add_subdirectory(b)\n",
    ),
]
RULES = [(rule, *case) for rule, case in zip(script.MENDS, CASES, strict=True)]


@pytest.mark.parametrize("rule, file, before, after", RULES)
def test_rule_edits_what_it_must_and_nothing_else(rule, file, before, after):
    assert rule.file == file
    assert script.mend(before, rule) == after


@pytest.mark.parametrize("rule, file, before, after", RULES)
def test_rule_refuses_text_where_nothing_matches(rule, file, before, after):
    with pytest.raises(script.BuildError, match=file):
        script.mend(after, rule)


KEY = {
    "found": {"torch": "2.13.0", "tensorflow": "2.21.0"},
    "settings": {"HOROVOD_WITH_GLOO": "1"},
    "cxx": "g++ 12.2.0",
}


@pytest.mark.parametrize(
    "change",
    [
        {"found": {"torch": "2.13.1", "tensorflow": "2.21.0"}},
        {"found": {"torch": "2.13.0", "tensorflow": "2.20.0"}},
        {"found": {"torch": "2.13.0"}},
        {"settings": {"HOROVOD_WITH_GLOO": "1", "HOROVOD_WITH_MPI": "1"}},
        {"cxx": "g++ 13.1.0"},
    ],
)
def test_cache_key_changes_with_everything_the_wheel_depends_on(change):
    assert script.cache_key(**KEY) != script.cache_key(**{**KEY, **change})


def test_cache_key_is_the_same_again_and_a_plain_folder_name():
    key = script.cache_key(**KEY)
    assert key == script.cache_key(**KEY)
    assert "0.28.1" in key
    assert "torch2.13.0" in key
    assert not set(key) & set("/ \\:")


def test_cache_key_changes_with_the_rules(monkeypatch):
    before = script.cache_key(**KEY)
    monkeypatch.setattr(script, "MENDS", script.MENDS[:2])
    assert script.cache_key(**KEY) != before


@pytest.mark.parametrize("installed", ["torch", "tensorflow"])
def test_only_what_is_installed_is_built(installed):
    names = {"torch": "PYTORCH", "tensorflow": "TENSORFLOW"}
    settings = script.build_settings({installed: "1.0"}, {})
    for name, feature in names.items():
        assert (f"HOROVOD_WITH_{feature}" in settings) == (name == installed)
        assert (f"HOROVOD_WITHOUT_{feature}" in settings) == (name != installed)
    assert settings["HOROVOD_WITH_GLOO"] == settings["HOROVOD_WITHOUT_MPI"] == "1"


def test_the_users_own_switches_win():
    environ = {"HOROVOD_WITH_MPI": "1", "HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_RANK": "0", "PATH": "/bin"}
    settings = script.build_settings({"torch": "1.0"}, environ)
    assert settings["HOROVOD_WITH_MPI"] == "1"
    assert settings["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert not {"HOROVOD_WITHOUT_MPI", "HOROVOD_RANK", "PATH"} & set(settings)


def test_a_damaged_archive_is_refused(tmp_path):
    (tmp_path / "horovod-0.28.1.tar.gz").write_bytes(b"not it")
    with pytest.raises(script.BuildError, match="SHA-256"):
        script.sources(tmp_path, tmp_path / "into")


def test_a_failed_build_names_its_log_and_shows_its_end(tmp_path):
    log = tmp_path / "build.log"
    command = [script.sys.executable, "-c", "print('the reason'); raise SystemExit(3)"]
    with pytest.raises(script.BuildError, match="the reason") as caught:
        script.run_logged(command, log, tmp_path, {})
    assert str(log) in str(caught.value)
