"""Bad input through the command line: exit code 1, one line that says what to do, and nothing left behind."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import yaml

SHARD_2 = "model-00002-of-"


def left_behind(directory):
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*")) if directory.exists() else []


def assert_one_line(result, parts):
    code, out, err = result
    assert code == 1
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert err.endswith(".\n")
    assert "Traceback" not in err
    for part in parts:
        assert part in err, err


# --- damaged directories: each takes a copy of a sharded model and spoils it


def second_shard(directory):
    return next(path for path in directory.glob("*.safetensors") if path.name.startswith(SHARD_2))


def cut_shard(directory):
    path = second_shard(directory)
    path.write_bytes(path.read_bytes()[:-100])


def point_shard(directory):
    second_shard(directory).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")


def edit_index(directory, change):
    path = directory / "model.safetensors.index.json"
    values = json.loads(path.read_text())
    change(values["weight_map"])
    path.write_text(json.dumps(values))


def edit_tensors(directory, change):
    from safetensors.torch import load_file, save_file

    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)


def remove_tensor(directory, name):
    edit_tensors(directory, lambda tensors: tensors.pop(name, None))
    edit_index(directory, lambda weight_map: weight_map.pop(name))


def add_tensor(directory):
    import torch

    def change(tensors):
        if "model.norm.weight" in tensors:
            tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(4)

    edit_tensors(directory, change)


def set_value(name, row, value):
    def change(tensors):
        if name in tensors:
            tensors[name][row] = value

    return lambda directory: edit_tensors(directory, change)


def resize(name):
    def change(tensors):
        if name in tensors:
            tensors[name] = tensors[name][:-1].clone()

    return lambda directory: edit_tensors(directory, change)


def edit_config(**changes):
    def edit(directory):
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def empty(directory):
    for path in directory.iterdir():
        path.unlink()


def make_adapter(directory, text="{}"):
    empty(directory)
    (directory / "adapter_config.json").write_text(text)
    (directory / "adapter_model.safetensors").write_bytes(b"")


def make_bin_only(directory):
    for path in directory.glob("model*"):
        path.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
DAMAGES = {
    "missing shard": (lambda d: second_shard(d).unlink(), [f"missing {SHARD_2}", "Fetch"]),
    "two missing shards": (lambda d: [path.unlink() for path in sorted(d.glob("*.safetensors"))[:2]], ["model-00001-of-", SHARD_2]),
    "truncated shard": (cut_shard, [SHARD_2, "bytes but its header promises", "truncated", "fetch it again"]),
    "empty shard": (lambda d: second_shard(d).write_bytes(b""), [SHARD_2, "0 bytes"]),
    "Git LFS pointer": (point_shard, [SHARD_2, "Git LFS pointer", "git lfs pull"]),
    "index naming an absent file": (
        lambda d: edit_index(d, lambda m: m.update({Q_PROJ: "model-00099-of-00099.safetensors"})),
        ["missing model-00099-of-00099.safetensors"],
    ),
    "index naming a wrong shard": (lambda d: edit_index(d, lambda m: m.update({Q_PROJ: m["lm_head.weight"]})), ["promises tensor", Q_PROJ]),
    "index that is no JSON": (lambda d: (d / "model.safetensors.index.json").write_text("{"), ["model.safetensors.index.json"]),
    "index without a map": (lambda d: (d / "model.safetensors.index.json").write_text("{}"), ["has no weight_map"]),
    "missing tensor": (lambda d: remove_tensor(d, Q_PROJ), ["1 tensors are missing", Q_PROJ]),
    "unexpected tensor": (add_tensor, ["unexpected tensor model.layers.0.self_attn.q_norm.weight", "LlamaForCausalLM"]),
    "misshapen tensor": (resize("model.layers.0.mlp.up_proj.weight"), ["mlp.up_proj.weight is (127, 64), expected (128, 64)"]),
    "NaN": (set_value(Q_PROJ, 5, float("nan")), [Q_PROJ, "row 5", "NaN"]),
    "infinity": (set_value("model.norm.weight", 3, float("inf")), ["model.norm.weight", "row 3", "infinity"]),
    "no config.json": (lambda d: (d / "config.json").unlink(), ["config.json is missing"]),
    "config.json that is no JSON": (lambda d: (d / "config.json").write_text("<html>"), ["config.json"]),
    "config.json without sizes": (
        lambda d: (d / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}'), ["has no hidden_size"]
    ),
    "unsupported architecture": (
        edit_config(architectures=["FooForCausalLM"], auto_map={"AutoModelForCausalLM": "foo.Foo"}),
        ["FooForCausalLM", "LlamaForCausalLM, MistralForCausalLM", "Remote code is never run"],
    ),
    "rope scaling": (edit_config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}), ["'longrope'", "expected default, linear"]),
    "adapter": (make_adapter, ["an adapter", "Merge it"]),
    "DoRA adapter": (lambda d: make_adapter(d, '{"use_dora": true}'), ["a DoRA adapter", "Merge it"]),
    "a .bin that holds no tensors": (make_bin_only, ["Cannot read weights in", "pytorch_model.bin", "Fetch it again"]),
    "empty directory": (empty, ["config.json is missing"]),
}  # fmt: skip


@pytest.mark.parametrize("command", ["check", "convert"])
@pytest.mark.parametrize(("damage", "parts"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_model_directory(cli, tmp_path, make_model, write_pair_yaml, command, damage, parts):
    model = shutil.copytree(make_model(max_shard_size="60KB"), tmp_path / "model")
    damage(model)
    path = write_pair_yaml(tmp_path, target={"model": "model"})  # relative to the YAML
    if command == "check" and ("NaN" in parts or "infinity" in parts):
        assert cli(command, path)[0] == 0  # check reads no weights
        return
    assert_one_line(cli(command, path), parts)
    assert not (tmp_path / "work").exists()


SETTINGS = {
    "group size": ({"target": {"quantize": {"group_size": 48}}}, ["64 input columns", "group_size 48", "Use group_size 64 or 32"]),
    "tp": ({"target": {"tp": 3}}, ["tp=3", "4 attention heads", "Use a tp that divides 4"]),
    "tp of the draft": ({"draft": {"tp": 8}}, ["tp=8", "4 attention heads"]),
    "pp": ({"target": {"pp": 2}}, ["pp=2", "3 layers"]),
    "scheme": ({"target": {"quantize": {"scheme": "int3"}}}, ["'int3'", "full_prec, int8_wo, int4_wo, int4_awq"]),
    "compiler": ({"build": {"compiler": "tvm"}}, ["'tvm'", "onnx-cpu"]),
    "rule": ({"speculation": {"acceptance": "typical"}}, ["'typical'", "exact, rejection"]),
    "drafter": ({"speculation": {"drafter": "medusa"}}, ["'medusa'", "model"]),
    "unknown key": ({"targets": {}}, ["unknown key targets", "Did you mean 'target'?"]),
    "calibration": (
        {"target": {"quantize": {"calibration": "c4"}}},
        ["target.quantize.calibration is 'c4'", "Expected a mapping with data, samples and max_length, or null"],
    ),
    "no such directory": ({"target": {"model": "./nowhere"}}, ["./nowhere", "is not a directory", "relative to"]),
    "revision of a directory": ({"target": {"revision": "main"}}, ["revision 'main'", "local directory"]),
    "max_seq_len": ({"build": {"max_seq_len": 4096}}, ["4096", "512 positions"]),
}


@pytest.mark.parametrize(("sections", "parts"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_that_cannot_work(cli, tmp_path, write_pair_yaml, sections, parts):
    assert_one_line(cli("check", write_pair_yaml(tmp_path, **sections)), parts)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("command", ["convert", "quantize", "build", "package"])
@pytest.mark.parametrize("name", ["scheme", "compiler", "rule", "drafter"])
def test_every_stage_refuses_an_unknown_name_before_it_starts(cli, tmp_path, write_pair_yaml, command, name):
    sections, parts = SETTINGS[name]
    assert_one_line(cli(command, write_pair_yaml(tmp_path, **sections)), parts)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        ("quantize", "target/checkpoint"),
        ("build", "target/quantized"),
        ("package", "target/engine"),
        ("verify", "target/engine"),
        ("generate", "target/engine"),
    ],
)
def test_a_stage_whose_input_was_not_made_names_it(cli, tmp_path, write_pair_yaml, command, missing):
    extra = ["--prompt", "x"] if command == "generate" else []
    assert_one_line(cli(command, write_pair_yaml(tmp_path), *extra), [missing, "specbuild" if "engine" in missing else "config.json"])
    assert not (tmp_path / "work").exists()


def test_vocabularies_that_differ(cli, tmp_path, make_model, write_pair_yaml):
    draft = shutil.copytree(make_model(seed=1, num_hidden_layers=1), tmp_path / "draft")
    values = json.loads((draft / "tokenizer.json").read_text())
    vocab = values["model"]["vocab"]
    first, second = (token for token, index in sorted(vocab.items(), key=lambda item: item[1]) if index in (40, 41))
    vocab[first], vocab[second] = 41, 40
    (draft / "tokenizer.json").write_text(json.dumps(values))
    path = write_pair_yaml(tmp_path, draft={"model": "draft"})
    assert_one_line(cli("check", path), ["2 token ids differ", "first id 40", repr(first), repr(second), "target's tokenizer"])


@pytest.mark.parametrize(("content", "part"), [(None, "no tokenizer.json"), ("{", "tokenizer.json"), ("{}", "tokenizer.json")])
def test_a_tokenizer_that_is_none(cli, tmp_path, make_model, write_pair_yaml, content, part):
    model = shutil.copytree(make_model(), tmp_path / "model")
    if content is None:
        (model / "tokenizer.json").unlink()
    else:
        (model / "tokenizer.json").write_text(content)
    assert_one_line(cli("check", write_pair_yaml(tmp_path, target={"model": "model"})), [part])


def test_nan_in_the_second_model_leaves_the_first_one_whole(cli, tmp_path, make_model, write_pair_yaml):
    draft = shutil.copytree(make_model(max_shard_size="60KB", seed=1), tmp_path / "draft")
    set_value(Q_PROJ, 5, float("nan"))(draft)
    code, _, err = cli("convert", write_pair_yaml(tmp_path, draft={"model": "draft"}))
    assert code == 1
    assert err.splitlines()[-1].startswith("Error: ")
    files = [f"target/checkpoint/{name}" for name in ("config.json", "rank0.safetensors", "specbuild.json")]
    assert left_behind(tmp_path / "work") == ["target", "target/checkpoint", *files]


def test_a_hub_id_that_is_not_cached_while_offline(tmp_path, write_pair_yaml):
    path = write_pair_yaml(tmp_path, target={"model": "nobody/no-such-model"})
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", "from specbuild.cli import main; main()", "check", str(path)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert_one_line((result.returncode, result.stdout, result.stderr), ["nobody/no-such-model", "HF_HUB_OFFLINE", "Give a directory"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["check"],
        ["check", "a.yaml", "b.yaml"],
        ["check", "a.yaml", "--nonsense"],
        ["convert", "a.yaml", "--only", "both"],
        ["verify", "a.yaml", "--draft-len", "0"],
        ["generate", "a.yaml"],
        ["generate", "a.yaml", "--prompt", "x", "--prompt-file", "y"],
        ["generate", "a.yaml", "--prompt", "x", "--max-tokens", "many"],
        ["serve", "a.yaml", "--http-port", "70000"],
        ["--nonsense"],
    ],
)
def test_usage_errors_exit_with_2(cli, arguments):
    code, out, err = cli(*arguments)
    assert code == 2
    assert out == ""
    assert "Error: " in err
    assert "Traceback" not in err


def test_a_configuration_that_is_not_there_is_no_usage_error(cli, tmp_path):
    assert_one_line(cli("check", tmp_path / "none.yaml"), ["none.yaml", "No such file"])


def test_an_error_of_several_lines_is_printed_as_one(cli, tmp_path):
    path = tmp_path / "pair.yaml"
    path.write_text("name: [\nx\n")
    assert_one_line(cli("check", path), ["not valid YAML"])
    path.write_text(yaml.safe_dump({"name": "two\nlines", "target": {"model": "t"}, "draft": {"model": "d"}}))
    assert_one_line(cli("check", path), ["name is 'two"])
