"""specbuild lock, and what --locked refuses."""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil

import fake_trtllm_build
import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

from specbuild.config import load_config
from specbuild.errors import ConfigError
from specbuild.lock import STAGES, check_lock, lock_path, run_lock

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MOVED = "fedcba9876543210fedcba9876543210fedcba98"
DIGESTS = [f"sha256:{letter * 64}" for letter in "ab"]


@pytest.fixture
def write(tmp_path, make_model, write_pair_yaml):
    """Return write(**sections): the YAML of a pair whose target is a copy that a test may change, calibrated on a text of its own."""
    shutil.copytree(make_model("llama", num_hidden_layers=3), tmp_path / "target")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("for line in lines: print(line)\n" * 50)
    (tmp_path / "text" / "b.txt").write_text("import os, sys\n" * 50)

    def make(**sections):
        quality = {"samples": 4, "data": "text"}
        target = {"model": "target", "quantize": {"quality": quality}, **sections.pop("target", {})}
        return write_pair_yaml(tmp_path, target=target, **sections)

    return make


@pytest.fixture
def locked(write):
    """A locked pair's YAML."""
    path = write()
    run_lock(load_config(path))
    return path


def refusal(path, stages=STAGES):
    with pytest.raises(ConfigError) as caught:
        check_lock(load_config(path), stages)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"Cannot use {path} as locked: ")
    assert text.endswith(f"Undo it, or run `specbuild lock {path}` if it is wanted.")
    return text


def test_what_was_locked_is_accepted_and_locking_again_changes_no_byte(locked):
    config = load_config(locked)
    before = lock_path(config).read_bytes()
    check_lock(config)
    assert run_lock(config) == []
    assert lock_path(config).read_bytes() == before
    assert [path.name for path in locked.parent.glob(".*")] == []


def test_a_lock_holds_digests_versions_and_every_value_of_the_yaml(locked):
    lock = yaml.safe_load(lock_path(load_config(locked)).read_text())
    model = locked.parent / "target"
    assert lock["models"]["target"]["files"] == {
        path.name: "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(model.iterdir())
    }
    assert lock["packages"] == {
        name: importlib.metadata.version(name)
        for name in (
            "numpy", "nvidia-pytriton", "onnx", "onnxruntime", "specbuild", "tokenizers", "torch", "tritonclient",
        )
    } | {"python": platform.python_version().rsplit(".", 1)[0]}  # fmt: skip
    assert sorted(lock["texts"]) == ["text/a.txt", "text/b.txt"]
    given = yaml.safe_load(locked.read_text())
    assert lock["values"]["target"]["quantize"]["group_size"] == given["target"]["quantize"]["group_size"]
    assert lock["values"]["build"]["max_draft_len"] is None  # a default is pinned too: a later version may have another
    assert "workdir" not in lock["values"]


def test_a_copy_of_the_pair_elsewhere_with_other_times_is_as_locked(locked, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "pair"
    shutil.copytree(locked.parent, elsewhere, copy_function=shutil.copyfile)
    for path in elsewhere.rglob("*"):
        os.utime(path, (1, 1))
    check_lock(load_config(elsewhere / "pair.yaml"))


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


CHANGES = {
    "weights": (lambda pair: flip(pair / "target" / "model.safetensors"), r"target file model\.safetensors is sha256:\w{12}, locked"),
    "a config": (lambda pair: flip(pair / "target" / "generation_config.json"), r"target file generation_config\.json is sha256:\w{12}"),
    "a file gone": (lambda pair: (pair / "target" / "generation_config.json").unlink(), r"target file generation_config\.json is gone"),
    "a new file": (lambda pair: (pair / "target" / "added_tokens.json").write_text("{}"), r"target file added_tokens\.json is new"),
    "a text": (lambda pair: flip(pair / "text" / "b.txt"), r"text text/b\.txt is sha256:\w{12}, locked sha256"),
    "a text gone": (lambda pair: (pair / "text" / "b.txt").unlink(), r"text text/b\.txt is gone"),
    "a new text": (lambda pair: (pair / "text" / "c.txt").write_text("x = 1\n"), r"text text/c\.txt is new"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "phrase"), CHANGES.values(), ids=CHANGES)
def test_a_changed_missing_or_new_file_is_named(locked, change, phrase):
    change(locked.parent)
    text = refusal(locked)
    assert text.count(";") == 0
    assert re.search(phrase, text), text


@pytest.mark.parametrize(
    ("sections", "phrase"),
    [
        ({"speculation": {"draft_len": 3}}, "key speculation.draft_len is 3, locked 4"),
        ({"name": "other"}, "key name is other, locked tiny"),
        ({"draft": {"quantize": {"scheme": "full_prec"}}}, "key draft.quantize.scheme is full_prec, locked int8_wo"),
        ({"serving": {"target_gpus": [0]}}, "key serving.target_gpus is [0], locked null"),
        ({"target": {"tp": 2}}, "key target.tp is 2, locked 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_changed_value_of_the_yaml_is_named(locked, write_pair_yaml, sections, phrase):
    values = yaml.safe_load(locked.read_text())
    fake_trtllm_build.merge(values, sections)
    locked.write_text(yaml.safe_dump(values))
    assert f"as locked: {phrase}. Undo" in refusal(locked)


def test_another_workdir_is_no_difference(locked):
    values = yaml.safe_load(locked.read_text())
    locked.write_text(yaml.safe_dump({**values, "workdir": "elsewhere"}))
    check_lock(load_config(locked))


@pytest.mark.parametrize("package", ["specbuild", "torch", "tokenizers", "onnx", "onnxruntime", "tritonclient", "numpy", "nvidia-pytriton"])
def test_another_version_of_a_package_is_named(locked, monkeypatch, package):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.9" if name == package else real(name))
    assert f"package {package} is 0.0.9, locked {real(package)}" in refusal(locked)


def test_another_python_is_named(locked, monkeypatch):
    monkeypatch.setattr(platform, "python_version_tuple", lambda: ("3", "99", "1"))
    assert "package python is 3.99, locked 3." in refusal(locked)


def test_calibration_pins_modelopt(write):
    calibration = {"data": "text", "samples": 2, "max_length": 32}
    path = write(target={"quantize": {"calibration": calibration, "quality": {"samples": 0}}})
    run_lock(load_config(path))
    packages = yaml.safe_load(lock_path(load_config(path)).read_text())["packages"]
    assert packages["nvidia-modelopt"] == importlib.metadata.version("nvidia-modelopt")


def test_every_difference_is_named_up_to_eight(locked):
    values = yaml.safe_load(locked.read_text())
    locked.write_text(yaml.safe_dump({**values, "build": {"max_batch_size": 2, "max_seq_len": 128}, "name": "other"}))
    text = refusal(locked)
    assert all(phrase in text for phrase in ("name is other", "max_batch_size is 2", "max_seq_len is 128"))
    for index in range(9):
        (locked.parent / "target" / f"{index}.json").write_text("{}")
    assert refusal(locked).count(";") == 8
    assert "; and 4 more." in refusal(locked)


# --- hub ids and adapters


@pytest.fixture
def hub(make_model, tmp_path, monkeypatch):
    """A cache with two commits of org/tiny; return move(commit), which sets the branch main."""
    from huggingface_hub import constants

    repository = tmp_path / "hub" / "models--org--tiny"
    for commit in (COMMIT, MOVED):
        shutil.copytree(make_model("llama", num_hidden_layers=1), repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def move(commit):
        (repository / "refs" / "main").write_text(commit)

    move(COMMIT)
    return move


def test_a_hub_id_is_pinned_to_its_commit_and_a_branch_that_moved_is_named(write, hub):
    path = write(draft={"model": "org/tiny", "revision": "main"})
    run_lock(load_config(path))
    assert yaml.safe_load(lock_path(load_config(path)).read_text())["models"]["draft"]["commit"] == COMMIT
    check_lock(load_config(path))
    hub(MOVED)
    assert f"draft revision is {MOVED}, locked {COMMIT}" in refusal(path)


def test_no_weights_are_read_when_the_revision_moved(write, hub, monkeypatch):
    path = write(draft={"model": "org/tiny"})
    run_lock(load_config(path))
    hub(MOVED)
    asked = []
    real = run_lock.__globals__["find_model_dir"]
    monkeypatch.setitem(run_lock.__globals__, "find_model_dir", lambda *a, weights: asked.append(weights) or real(*a, weights=weights))
    refusal(path)
    assert True not in asked


@pytest.fixture
def adapter(tmp_path):
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1}))
    save_file({"x": np.zeros(4)}, directory / "adapter_model.safetensors")
    return directory


def test_an_adapter_that_changed_is_named(write, adapter):
    path = write(target={"model": "target", "merge_lora": "adapter"})
    run_lock(load_config(path))
    check_lock(load_config(path))
    flip(adapter / "adapter_model.safetensors")
    assert "target adapter file adapter_model.safetensors is sha256:" in refusal(path)


def test_an_adapter_of_the_command_line_is_a_difference(locked, adapter, cli):
    code, out, err = cli("convert", locked, "--only", "target", "--merge-lora", adapter, "--locked")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "key target.merge_lora is " in err


# --- the container


@pytest.fixture
def tensorrt(write, monkeypatch):
    """Return make(version): the YAML of a pair for tensorrt, on a machine with a fake TensorRT-LLM, or none."""
    monkeypatch.delenv("SPECBUILD_CONTAINER_DIGEST", raising=False)

    def make(version=None):
        path = write(target={"model": "target", "quantize": {"group_size": 64}}, build={"compiler": "tensorrt"})
        if version:
            bin_dir = fake_trtllm_build.install(path.parent / "machine", version=version)
            monkeypatch.setenv("PATH", f"{bin_dir}:/usr/bin:/bin")
        return path

    return make


def container_of(path):
    return yaml.safe_load(lock_path(load_config(path)).read_text())["container"]


def test_the_container_is_pinned_by_its_tag_and_the_lock_says_so(tensorrt):
    path = tensorrt()
    run_lock(load_config(path))
    assert container_of(path) == {
        "image": "nvcr.io/nvidia/tritonserver:25.10-trtllm-python-py3", "digest": None, "tensorrt_llm": "1.0.0", "tensorrt": None,
    }  # fmt: skip
    assert "the tag alone is pinned" in lock_path(load_config(path)).read_text()


def test_a_digest_is_kept_on_locking_again_and_another_one_is_named(tensorrt, monkeypatch, cli):
    path = tensorrt()
    assert cli("lock", path, "--container-digest", DIGESTS[0])[0] == 0
    assert cli("lock", path)[0] == 0
    assert container_of(path)["digest"] == DIGESTS[0]
    assert "the tag alone" not in lock_path(load_config(path)).read_text()
    check_lock(load_config(path))  # this machine does not say which container it is
    monkeypatch.setenv("SPECBUILD_CONTAINER_DIGEST", DIGESTS[0])
    check_lock(load_config(path))
    monkeypatch.setenv("SPECBUILD_CONTAINER_DIGEST", DIGESTS[1])
    assert f"container digest is {DIGESTS[1][:19]}, locked {DIGESTS[0][:19]}" in refusal(path)


def test_another_tag_is_named_and_drops_the_digest(tensorrt, cli):
    path = tensorrt()
    cli("lock", path, "--container-digest", DIGESTS[0])
    file = lock_path(load_config(path))
    file.write_text(file.read_text().replace("25.10", "25.12"))
    assert "container image is nvcr.io/nvidia/tritonserver:25.10-trtllm-python-py3, locked nvcr.io/nvidia/tritonserver:25.12" in refusal(
        path
    )
    run_lock(load_config(path))
    assert container_of(path)["digest"] is None


def test_b_02_an_engine_builder_of_another_version_than_locked_is_refused_before_it_builds(tensorrt, cli):
    path = tensorrt("1.0.0")
    run_lock(load_config(path))
    assert (container_of(path)["tensorrt_llm"], container_of(path)["tensorrt"]) == ("1.0.0", "10.11.0.33")
    check_lock(load_config(path))
    tensorrt("1.1.0")
    code, out, err = cli("build", path, "--locked")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "container tensorrt_llm is 1.1.0, locked 1.0.0" in err


def test_packages_of_the_container_are_not_pinned_one_by_one(tensorrt):
    path = tensorrt()
    run_lock(load_config(path))
    assert sorted(yaml.safe_load(lock_path(load_config(path)).read_text())["packages"]) == ["python", "specbuild", "tokenizers", "torch"]


@pytest.mark.parametrize("digest", ["sha256:abc", "abc", f"sha512:{'a' * 64}"])
def test_what_is_no_digest_is_refused(tensorrt, cli, digest):
    path = tensorrt()
    code, _, err = cli("lock", path, "--container-digest", digest)
    assert (code, err.count("\n")) == (1, 1)
    assert "expected sha256:" in err
    assert not lock_path(load_config(path)).exists()


def test_a_digest_for_a_compiler_without_a_container_is_refused(locked, cli):
    code, _, err = cli("lock", locked, "--container-digest", DIGESTS[0])
    assert (code, err.count("\n")) == (1, 1)
    assert "onnx-cpu" in err


# --- the commands


@pytest.mark.parametrize("command", ["check", "convert", "quantize", "build", "package", "run", "serve"])
def test_every_stage_refuses_a_difference_and_writes_nothing(locked, cli, command):
    values = yaml.safe_load(locked.read_text())
    locked.write_text(yaml.safe_dump({**values, "name": "other"}))
    code, out, err = cli(command, locked, "--locked")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "key name is other, locked tiny" in err
    assert not (locked.parent / "work").exists()


def test_a_stage_is_held_to_what_it_reads(locked):
    """The weights are not on the machine that builds, nor its packages on the one that converts."""
    config = load_config(locked)
    (locked.parent / "target" / "model.safetensors").unlink()
    for stage in ("quantize", "build", "package"):
        check_lock(config, (stage,))
    flip(locked.parent / "target" / "tokenizer.json")
    check_lock(config, ("build",))
    for stage in ("quantize", "package"):
        assert "target file tokenizer.json" in refusal(locked, (stage,))


def test_a_pair_goes_through_all_stages_locked(write, cli):
    path = write(target={"model": "target", "quantize": {"quality": {"samples": 0}}})
    cli("lock", path)
    for command in ("check", "convert", "quantize", "build", "package"):
        code, _, err = cli(command, path, "--locked")
        assert code == 0, err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist. Run `specbuild lock"),
        ("", "the whole: "),
        ("- a\n", "the whole: "),
        ("version: [\n", "Cannot read lock"),
        ("version: 2\npackages: {}\nvalues: {}\n", "version: "),
        ("version: 1\npackages: {torch: 2}\nvalues: {}\n", "packages.torch: "),
        ("version: 1\npackages: {}\nvalues: {}\nmore: 1\n", "more: "),
        ("version: 1\npackages: {}\n", "values: "),
        ("version: 1\npackages: {}\nvalues: {day: 2026-13-45}\n", "month must be in 1..12"),
        ("[" * 5000, "Cannot read lock"),
    ],
)
def test_a_missing_or_damaged_lock_is_one_line(locked, cli, content, message):
    file = lock_path(load_config(locked))
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    code, out, err = cli("convert", locked, "--locked")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert message in err


def test_a_lock_that_cannot_be_written_leaves_the_one_before(locked, monkeypatch):
    before = lock_path(load_config(locked)).read_bytes()
    monkeypatch.setattr(type(locked), "replace", lambda self, target: (_ for _ in ()).throw(OSError(28, "No space left", str(target))))
    with pytest.raises(OSError, match="No space"):
        run_lock(load_config(locked))
    assert lock_path(load_config(locked)).read_bytes() == before
    assert [path.name for path in locked.parent.glob(".*")] == []


def test_what_changed_is_said_on_locking_again(locked, cli):
    values = yaml.safe_load(locked.read_text())
    locked.write_text(yaml.safe_dump({**values, "name": "other"}))
    code, out, err = cli("lock", locked)
    assert (code, out) == (0, "")
    assert err.splitlines() == ["key name is other, locked tiny", f"{lock_path(load_config(locked))} written"]


def test_package_is_held_to_the_weights_where_the_models_own_files_are_served(write, cli):
    plain = {"quantize": {"scheme": "full_prec"}}
    path = write(target=plain, draft=plain, speculation={"acceptance": "exact"}, build={"compiler": "llmapi"})
    run_lock(load_config(path))
    check_lock(load_config(path), ("package",))
    weights = path.parent / "target" / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b"\0")
    assert "model.safetensors" in refusal(path, ("package",))
