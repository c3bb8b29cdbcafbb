"""compiler: tensorrt, against a fake trtllm-build that takes and refuses what the real one does."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_trtllm_build
import pytest
from click.testing import CliRunner
from one_line import problem

from specbuild.build import check_build, describe_build, run_build
from specbuild.check import check_pair
from specbuild.cli import cli
from specbuild.compilers import tensorrt
from specbuild.config import load_config
from specbuild.convert import run_convert
from specbuild.errors import ConfigError, EngineError
from specbuild.package import run_package
from specbuild.quant import find_scheme
from specbuild.quantize import run_quantize
from specbuild.serve import check_engines
from specbuild.shape import ModelShape, RopeScaling

ROLES = ("target", "draft")
TENSORRT = {"target": {"quantize": {"group_size": 64}}, "build": {"compiler": "tensorrt"}}
H100 = "NVIDIA H100 80GB HBM3, 9.0, 575.57.08"
MODEL = {"hidden_size": 256, "intermediate_size": 512}  # tp 2 in tiles of 64 and 128


def merged(*changes):
    values = {}
    for change in changes:
        fake_trtllm_build.merge(values, json.loads(json.dumps(change)))
    return values


@pytest.fixture(scope="module")
def write_pair_yaml(write_pair_yaml, make_model):
    """Write the tiny pair's YAML, its heads of a size that the attention kernels have."""
    models = {
        "target": make_model("llama", num_hidden_layers=3, head_dim=32),
        "draft": make_model("llama", seed=1, num_hidden_layers=1, head_dim=32),
    }

    def write(directory, **sections):
        return write_pair_yaml(directory, **merged({role: {"model": str(model)} for role, model in models.items()}, sections))

    return write


@pytest.fixture(scope="module")
def quantized(tmp_path_factory, write_pair_yaml):
    """The directory of a pair whose checkpoints are quantized, its target for two ranks. Do not write into it."""
    directory = tmp_path_factory.mktemp("tensorrt")
    write_pair_yaml(directory, **TENSORRT)
    return quantize(directory, write_pair_yaml(directory, **TENSORRT))


def quantize(directory, path):
    config = load_config(path)
    for stage in (run_convert, run_quantize):
        for role in ROLES:
            stage(config, role)
    return directory


@pytest.fixture
def pair(tmp_path, quantized, write_pair_yaml):
    """Return make(**sections): a configuration whose checkpoints are the quantized ones."""

    def make(**sections):
        if not (tmp_path / "work").exists():
            shutil.copytree(quantized / "work", tmp_path / "work")
        return load_config(write_pair_yaml(tmp_path, **merged(TENSORRT, sections)))

    return make


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return make(**facts): put a fake trtllm-build, its Python and an nvidia-smi on PATH."""

    def make(told=None, **facts):
        bin_dir = fake_trtllm_build.install(tmp_path / "machine", **facts)
        monkeypatch.setenv("PATH", f"{bin_dir}:/usr/bin:/bin")
        monkeypatch.setenv("FAKE_TRTLLM", json.dumps(told or {}))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("CUDA_VERSION", raising=False)
        return bin_dir

    return make


def build(config):
    return [run_build(config, role) for role in ROLES]


def test_both_engines_are_built_checked_and_have_a_card(pair, machine):
    machine()
    config = pair()
    assert build(config) == [True, True]
    for role in ROLES:
        out = config.dir_of(role, "engine")
        assert sorted(path.name for path in out.iterdir()) == [
            "build.log", "config.json", "engine_card.json", "rank0.engine", "specbuild.json"
        ]  # fmt: skip
        assert "Engine serialized" in (out / "build.log").read_text()
        card = json.loads((out / "engine_card.json").read_text())
        digests = card.pop("checkpoint_digests")
        assert digests.keys() == {"specbuild.json", "config.json", "rank0.safetensors"}
        assert card == {
            "tensorrt_llm": "1.0.0", "tensorrt": "10.11.0.33", "cuda": "12.9", "driver": "575.57.08", "gpu": "NVIDIA H100 80GB HBM3",
            "compute_capability": "9.0",
        }  # fmt: skip
    build_config = json.loads((config.dir_of("target", "engine") / "config.json").read_text())["build_config"]
    assert (build_config["speculative_decoding_mode"], build_config["max_draft_len"], build_config["max_seq_len"]) == (2, 8, 264)
    assert build_config["gather_generation_logits"]
    assert build(config) == [False, False]


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)], ids=["tp 2", "pp 2"])
def test_every_rank_is_built_of_a_model_for_two(tmp_path, write_pair_yaml, make_model, machine, tp, pp):
    target = {"model": str(make_model(**{**MODEL, "num_hidden_layers": 2})), "tp": tp, "pp": pp, "quantize": {"group_size": 128}}
    exact = {"speculation": {"acceptance": "exact"}}  # an odd vocabulary for two has padding in its logits
    path = write_pair_yaml(tmp_path, **merged(TENSORRT, {"target": target, **exact}))
    quantize(tmp_path, path)
    machine(gpus=(H100, H100))
    assert build(load_config(path)) == [True, True]
    engine = tmp_path / "work" / "target" / "engine"
    assert [(engine / f"rank{rank}.engine").is_file() for rank in range(3)] == [True, True, False]
    assert "2 workers" in (engine / "build.log").read_text()
    assert "--workers 2" in describe_build(load_config(path), ("target",))
    machine(gpus=(H100, H100), told={"skip": ["rank1.engine"]})
    assert "rank1.engine" in problem(run_build, load_config(path), "target", True)


@pytest.mark.parametrize(
    ("before", "after", "redone"),
    [
        ({}, {"gpus": ("NVIDIA H100 80GB HBM3, 9.0, 580.95.05",)}, False),  # a newer driver
        ({}, {"version": "1.1.0"}, True),
        ({}, {"gpus": ("NVIDIA L4, 8.9, 575.57.08",)}, True),
    ],
)
def test_an_engine_is_built_again_for_another_machine(pair, machine, before, after, redone):
    machine(**before)
    build(pair())
    machine(**after)
    assert build(pair()) == [redone, redone]


@pytest.mark.parametrize(("change", "redone"), [({"build": {"kernels": "fast"}}, False), ({"speculation": {"acceptance": "exact"}}, True)])
def test_an_engine_is_built_again_for_what_its_command_depends_on(pair, machine, change, redone):
    machine()
    build(pair())
    assert build(pair(**change)) == [redone, redone]


@pytest.mark.parametrize("version", ["1.0.0", "1.0.3.2510", "1.1.0", "1.2.0rc8", "1.2.1"])
def test_an_accepted_version_builds(pair, machine, version):
    machine(version=version)
    assert build(pair()) == [True, True]


# --- machines that cannot build: nothing runs, nothing is written

MACHINES = {
    "nothing": ({"version": None, "gpus": (), "builder": False}, ["no NVIDIA GPU", "no trtllm-build on PATH", "docker run", "onnx-cpu"]),
    "no GPU": (
        {"gpus": ()},
        ["it has no NVIDIA GPU", "docker run --gpus all", "tritonserver:25.10-trtllm-python-py3", "compiler: onnx-cpu"],
    ),
    "no builder": ({"version": None, "builder": False}, ["it has no trtllm-build on PATH", "TensorRT-LLM 1.0.0", "onnx-cpu"]),
    "no package": ({"version": None}, ["whose Python has no tensorrt_llm"]),
    "removed": (
        {"version": "1.3.0"},
        ["TensorRT-LLM 1.3.0", "the engine path was removed upstream", "25.10-trtllm-python-py3", "onnx-cpu"],
    ),
    "removed, no builder": ({"version": "1.3.0rc20", "builder": False}, ["1.3.0rc20", "the engine path was removed upstream"]),
    "removed, no GPU": ({"version": "1.4.0", "gpus": ()}, ["the engine path was removed upstream"]),
    "old": ({"version": "0.20.0"}, ["TensorRT-LLM 0.20.0", "expected 1.0.0 to 1.2.1", "25.10-trtllm-python-py3"]),
    "unknown": ({"version": "1.2.2"}, ["TensorRT-LLM 1.2.2", "expected 1.0.0 to 1.2.1"]),
    "SM 75": ({"gpus": ("Tesla T4, 7.5, 575.57.08",)}, ["Tesla T4 (SM 75)", "SM 80 or later"]),
    "SM 100": ({"gpus": ("NVIDIA B200, 10.0, 575.57.08",)}, ["int4_awq", "NVIDIA B200 (SM 100)", "SM 100 to 119", "full_prec"]),
    "SM 103": ({"gpus": ("NVIDIA B300, 10.3, 575.57.08",)}, ["NVIDIA B300 (SM 103)"]),
}


@pytest.mark.parametrize(("facts", "parts"), MACHINES.values(), ids=MACHINES)
def test_a_machine_that_cannot_build_is_refused_with_the_ways_on(pair, machine, facts, parts):
    machine(**facts)
    config = pair()
    text = problem(check_build, config, "target")
    for part in parts:
        assert part in text
    assert ("removed upstream" in text) == any("removed" in part for part in parts)
    problem(run_build, config, "target")
    assert not config.dir_of("target", "engine").exists()


@pytest.mark.parametrize("gpu", ["NVIDIA A100-SXM4-80GB, 8.0, 575.57.08", "NVIDIA RTX PRO 6000, 12.0, 575.57.08"])
def test_generations_around_the_refused_ones_build(pair, machine, gpu):
    machine(gpus=(gpu,))
    assert build(pair()) == [True, True]


def test_float_weights_build_on_the_generation_that_has_no_int4(tmp_path, write_pair_yaml, machine):
    full = {"quantize": {"scheme": "full_prec"}}
    path = write_pair_yaml(tmp_path, **merged(TENSORRT, {"target": full, "draft": full}))
    quantize(tmp_path, path)
    machine(gpus=("NVIDIA B200, 10.0, 575.57.08",))
    assert build(load_config(path)) == [True, True]


def test_the_first_visible_gpu_is_the_one_that_counts(pair, machine, monkeypatch):
    machine(gpus=("Tesla T4, 7.5, 575.57.08", H100))
    assert "SM 75" in problem(check_build, pair(), "target")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert check_build(pair(), "target").parameters["gpu"] == "NVIDIA H100 80GB HBM3"


def test_hidden_gpus_are_none(pair, machine, monkeypatch):
    machine()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "no NVIDIA GPU" in problem(check_build, pair(), "target")


# --- pairs that cannot decode together

AWQ, INT8 = {"scheme": "int4_awq", "group_size": 64}, {"scheme": "int8_wo"}
PAIRS = {
    "int8 cache": (
        {"target": {"quantize": {"kv_cache": "int8"}}},
        ["kv_cache 'int8'", "target", "paged context attention", "kv_cache: null"],
    ),
    "fp8 cache": ({"draft": {"quantize": {"kv_cache": "fp8"}}}, ["kv_cache 'fp8'", "draft"]),
    "int8 cache, other compiler": (
        {"draft": {"quantize": {"kv_cache": "int8"}}, "build": {"compiler": "onnx-cpu"}},
        ["onnx-cpu has float32"],
    ),
    "float32": ({"draft": {"dtype": "float32"}}, ["the draft as float32 with tensorrt", "dtype bfloat16"]),
    "beams": ({"build": {"max_beam_width": 4}}, ["max_beam_width 4", "expected 1", "Remove build.max_beam_width"]),
    "group": ({"target": {"quantize": {"group_size": 32}}}, ["group_size 32", "64 and 128"]),
    "drafts": ({"speculation": {"draft_len": 6}, "build": {"max_draft_len": 5}}, ["Cannot draft 6 tokens with max_draft_len 5", "Raise"]),
    "target context": ({"build": {"max_seq_len": 513}}, ["max_seq_len 513", "the target has 512 positions", "max_seq_len 512 or less"]),
}


@pytest.mark.parametrize(("sections", "parts"), PAIRS.values(), ids=PAIRS)
def test_a_pair_that_could_not_work_is_refused_by_check(tmp_path, write_pair_yaml, sections, parts):
    text = problem(check_pair, load_config(write_pair_yaml(tmp_path, **merged(TENSORRT, sections))))
    for part in parts:
        assert part in text


MODELS = {  # the model of a role, its section, parts of the message
    "draft context": ("draft", {"max_position_embeddings": 128}, INT8, {}, ["the draft has 128 positions", "max_seq_len 128 or less"]),
    "vocabulary": ("draft", {"vocab_size": 128}, INT8, {}, ["vocab_size is 101 and 128", "target's vocab_size", "onnx-cpu"]),
    "head size": ("target", {"hidden_size": 40, "num_attention_heads": 4, "head_dim": None}, {"scheme": "full_prec"}, {},
                  ["head size 10 has no attention kernels", "one of 32, 48, 64", "onnx-cpu"]),
    "head size 16": ("draft", {"head_dim": 16}, INT8, {}, ["head size 16 has no attention kernels"]),
    "int8 rows": ("draft", {"intermediate_size": 96}, INT8, {}, ["mlp.fc as int8_wo", "96 output rows", "a multiple of 64", "full_prec"]),
    "int4 rows": ("target", {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 1},
                  {"scheme": "int4_awq", "group_size": 128}, {},
                  ["attention.qkv as int4_awq", "192 output rows", "a multiple of 128", "Use group_size 64, or scheme full_prec"]),
    "ranks": ("target", {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 128}, INT8, {"tp": 2},
              ["attention.qkv as int8_wo with tensorrt for tp=2", "192 output rows", "a multiple of 128", "a smaller tp"]),
}  # fmt: skip


@pytest.mark.parametrize(("role", "shape", "quantize", "more", "parts"), MODELS.values(), ids=MODELS)
def test_a_model_that_could_not_work_is_refused_by_check(tmp_path, write_pair_yaml, make_model, role, shape, quantize, more, parts):
    section = {"model": str(make_model(seed=3, num_hidden_layers=1, **{"head_dim": 32, **shape})), "quantize": quantize, **more}
    text = problem(check_pair, load_config(write_pair_yaml(tmp_path, **merged(TENSORRT, {role: section}))))
    for part in parts:
        assert part in text


LLAMA_8B = {
    "architecture": "LlamaForCausalLM", "layers": 2, "hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128,
    "vocab": 128256, "max_positions": 8192, "rope_theta": 5e5, "norm_eps": 1e-5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "pp", "part"),
    [
        ({"rope_scaling": RopeScaling.make({"rope_type": "yarn", "factor": 4.0})}, 1, "'yarn'"),
        ({"rope_scaling": RopeScaling.make({"type": "dynamic", "factor": 4.0})}, 1, "'dynamic'"),
        ({"rope_scaling": RopeScaling.make({"rope_type": "linear", "factor": 8.0}), "rope_theta_local": 1e4}, 1, "'linear'"),
        ({"architecture": "Phi3ForCausalLM", "hidden_act": "swiglu"}, 2, "for pp=2: .* Use pp: 1"),
    ],
    ids=["yarn", "dynamic", "Gemma 3 linear", "Phi-3 pp"],
)
def test_a_model_that_upstream_computes_otherwise_is_refused(changes, pp, part):
    shape = ModelShape(**{**LLAMA_8B, **changes})
    with pytest.raises(EngineError, match=rf"^Cannot build {shape.architecture} with tensorrt[^\n]*{part}[^\n]*$"):
        tensorrt.check(shape, find_scheme("int4_awq"), 128, 1, pp)


@pytest.mark.parametrize("kind", [None, {"rope_type": "llama3", "factor": 8.0}, {"type": "linear", "factor": 4.0}], ids=str)
def test_a_model_that_upstream_computes_as_trained_is_accepted(kind):
    shape = ModelShape(**LLAMA_8B, rope_scaling=RopeScaling.make(kind) if kind else None)
    tensorrt.check(shape, find_scheme("int4_awq"), 128, 2, 2)


def test_build_refuses_what_check_does_before_anything_runs(pair, machine):
    machine(told={"do": "fail"})
    assert "max_seq_len 600" in problem(run_build, pair(build={"max_seq_len": 600}), "target")
    assert "as float32" in problem(run_build, pair(draft={"dtype": "float32"}), "draft")


# --- builders that fail, hang, or write something else


def test_a_failed_build_quotes_the_log_and_keeps_it(pair, machine):
    machine(told={"do": "fail"})
    config = pair()
    text = problem(run_build, config, "target")
    log = config.dir_of("target", "engine").parent / "failed-build.log"
    assert "ended with code 1" in text
    assert "RuntimeError: Engine building failed, please check the error log" in text
    assert str(log) in text
    assert "OutOfMemory" in log.read_text()
    assert len(text) < 700 + 2 * len(str(log))
    assert sorted(path.name for path in log.parent.iterdir()) == ["checkpoint", "failed-build.log", "quantized"]
    machine()
    assert run_build(config, "target")
    assert not log.exists()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"build_config": {"speculative_decoding_mode": 1}}, ["speculative_decoding_mode is 1, expected 2"]),
        ({"build_config": {"max_draft_len": 3}}, ["max_draft_len is 3, expected 8"]),
        ({"build_config": {"plugin_config": {"use_paged_context_fmha": False}}}, ["use_paged_context_fmha is False, expected True"]),
        ({"build_config": {"kv_cache_type": "CONTINUOUS"}}, ["kv_cache_type is 'CONTINUOUS', expected 'PAGED'"]),
        ({"build_config": {"max_seq_len": 256}}, ["max_seq_len is 256, expected 264"]),
        ({"build_config": {"max_batch_size": 2048}}, ["max_batch_size is 2048, expected 4"]),
        ({"pretrained_config": {"vocab_size": 128}}, ["vocab_size is 128, expected 101"]),
        ({"pretrained_config": {"mapping": {"world_size": 2}}}, ["world_size is 2, expected 1"]),
        ({"build_config": None}, ["speculative_decoding_mode"]),
    ],
)
def test_an_engine_that_is_not_what_was_asked_for_is_refused(pair, machine, change, parts):
    machine(told={"config": change})
    config = pair()
    text = problem(run_build, config, "target")
    for part in parts:
        assert part in text
    assert not config.dir_of("target", "engine").exists()
    assert (config.dir_of("target", "engine").parent / "failed-build.log").exists()


@pytest.mark.parametrize(("name", "part"), [("rank0.engine", "rank0.engine is missing"), ("config.json", "config.json is missing")])
def test_an_engine_with_a_file_missing_is_refused(pair, machine, name, part):
    machine(told={"skip": [name]})
    assert part in problem(run_build, pair(), "target")


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_a_build_that_hangs_can_be_stopped_and_leaves_nothing(pair, machine, tmp_path, number, code):
    pids = tmp_path / "pids"
    machine(told={"do": "hang", "pids": str(pids)})
    config = pair()
    command = [sys.executable, "-c", "from specbuild.cli import main; main()", "build", str(tmp_path / "pair.yaml"), "--only", "target"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (pids.exists() and pids.read_text()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code, err
    assert err.endswith("Interrupted.\n")
    assert [pid for pid in pids.read_text().split() if alive(pid)] == []  # neither the builder nor its worker
    assert sorted(path.name for path in config.dir_of("target", "engine").parent.iterdir()) == ["checkpoint", "quantized"]


def test_a_builder_does_not_outlive_a_killed_stage(pair, machine, tmp_path):
    pids = tmp_path / "pids"
    machine(told={"do": "hang", "pids": str(pids)})
    pair()
    command = [sys.executable, "-c", "from specbuild.cli import main; main()", "build", str(tmp_path / "pair.yaml"), "--only", "target"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (pids.exists() and pids.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    builder, worker = map(int, pids.read_text().split())
    process.kill()
    process.wait()
    while alive(builder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(builder)
    if alive(worker):
        os.kill(worker, signal.SIGKILL)


# --- after the build


MOVED = {
    "TensorRT-LLM": ({"version": "1.1.0"}, ["built for TensorRT-LLM 1.0.0, this machine has 1.1.0", "Run `specbuild build` here"]),
    "TensorRT": ({"tensorrt": "10.13.3.9"}, ["built for TensorRT 10.11.0.33, this machine has 10.13.3.9"]),
    "GPU": ({"gpus": ("NVIDIA L4, 8.9, 575.57.08",)}, ["built for GPUs of compute capability 9.0, this machine has 8.9"]),
}


@pytest.mark.parametrize(("facts", "parts"), MOVED.values(), ids=MOVED)
def test_an_engine_of_another_machine_is_packaged_and_not_served(pair, machine, facts, parts):
    machine()
    config = pair()
    build(config)
    machine(**facts)
    assert run_package(config)
    text = problem(check_engines, config)
    for part in parts:
        assert part in text


def test_an_engine_is_served_on_another_gpu_of_its_generation(pair, machine):
    machine()
    config = pair()
    build(config)
    machine(gpus=("NVIDIA H200, 9.0, 580.95.05",))
    check_engines(config)


@pytest.mark.parametrize("words", [["generate", "--prompt", "def"], ["verify"]], ids=["generate", "verify"])
def test_decoding_in_process_needs_the_other_compiler(pair, machine, tmp_path, cli, words):
    machine()
    build(pair())
    code, out, err = cli(words[0], tmp_path / "pair.yaml", *words[1:])
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "it is a TensorRT engine, expected one of compiler onnx-cpu" in err


def test_run_ends_after_packaging_and_says_so(tmp_path, write_pair_yaml, machine, cli):
    machine()
    code, out, err = cli("run", write_pair_yaml(tmp_path, **TENSORRT))
    assert (code, out) == (0, "")
    last = "packaged, not verified: tensorrt engines run in Triton only; `specbuild serve`, then `specbuild verify --url`\n"
    assert err.endswith(last)
    assert (tmp_path / "work" / "model_repository" / "draft" / "1" / "engine" / "rank0.engine").exists()


def test_run_refuses_a_place_that_cannot_be_before_it_converts(tmp_path, write_pair_yaml, machine, cli):
    machine()
    code, out, err = cli("run", write_pair_yaml(tmp_path, **TENSORRT, serving={"target_gpus": [0, 1]}))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "Cannot place the target on GPUs [0, 1]" in err
    assert not (tmp_path / "work").exists()


def test_run_refuses_a_machine_that_cannot_build_before_it_converts(tmp_path, write_pair_yaml, machine, cli):
    machine(gpus=())
    code, out, err = cli("run", write_pair_yaml(tmp_path, **TENSORRT))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "no NVIDIA GPU" in err
    assert not (tmp_path / "work").exists()


def test_build_checks_both_models_before_it_builds_one(tmp_path, write_pair_yaml, machine, cli):
    path = write_pair_yaml(tmp_path, **merged(TENSORRT, {"target": {"quantize": {"scheme": "full_prec"}}}))
    quantize(tmp_path, path)
    machine(gpus=("NVIDIA B200, 10.0, 575.57.08",))
    code, _, err = cli("build", path)
    assert (code, err.count("\n")) == (1, 1)
    assert "Cannot build int8_wo for NVIDIA B200" in err
    assert not (tmp_path / "work" / "target" / "engine").exists()


def test_a_beam_width_of_one_is_no_error(tmp_path, write_pair_yaml):
    assert check_pair(load_config(write_pair_yaml(tmp_path, **merged(TENSORRT, {"build": {"max_beam_width": 1}}))))
    with pytest.raises(ConfigError, match="max_beam_width is 0"):
        load_config(write_pair_yaml(tmp_path, build={"max_beam_width": 0}))


# --- the fake itself


@pytest.mark.parametrize(
    "words",
    [
        ["--paged_fmha", "enable"],
        ["--use_paged_context_fmha", "true"],
        ["--max_batch", "8"],
        ["--max_draft_len", "four"],
        ["--logits_dtype", "bfloat16"],
        ["--speculative_decoding_mode", "draft_target"],
    ],
)
def test_the_fake_refuses_flags_and_values_that_upstream_does_not_have(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        fake_trtllm_build.make_parser("1.0.0").parse_args(words)


def test_the_fake_has_the_flags_of_a_version(capsys):
    assert fake_trtllm_build.make_parser("1.0.0").parse_args(["--auto_parallel", "2"]).auto_parallel == 2
    with pytest.raises(SystemExit, match="2"):
        fake_trtllm_build.make_parser("1.1.0").parse_args(["--auto_parallel", "2"])


CHECKPOINT = {"max_position_embeddings": 512, "quantization": {"quant_algo": "W4A16_AWQ", "kv_cache_quant_algo": None}}
TARGET = ["--speculative_decoding_mode", "draft_tokens_external", "--max_draft_len", "8"]


@pytest.mark.parametrize(
    ("words", "quantization", "sm", "message"),
    [
        ([*TARGET, "--gather_context_logits"], {}, 90, "context logits"),
        (["--opt_num_tokens", "8", "--multiple_profiles", "enable"], {}, 90, "opt_num_tokens"),
        ([], {}, 100, "not supported on SM>=100"),
        ([], {"calibration": None}, 90, "unexpected keyword argument 'calibration'"),
    ],
)
def test_the_fake_refuses_what_upstream_refuses(words, quantization, sm, message):
    args = fake_trtllm_build.make_parser("1.0.0").parse_args(words)
    with pytest.raises((RuntimeError, TypeError), match=message):
        fake_trtllm_build.make_build_config(args, merged(CHECKPOINT, {"quantization": quantization}), sm)


@pytest.mark.parametrize(("words", "cache"), [(["--context_fmha", "disable"], None), ([], "INT8"), ([], "FP8")])
def test_the_fake_turns_paged_context_attention_off_where_upstream_does(words, cache):
    args = fake_trtllm_build.make_parser("1.0.0").parse_args([*TARGET, *words])
    config = fake_trtllm_build.make_build_config(args, merged(CHECKPOINT, {"quantization": {"kv_cache_quant_algo": cache}}), 90)
    assert config["plugin_config"]["use_paged_context_fmha"] is False


@pytest.mark.parametrize(
    ("kind", "changes", "windows"),
    [
        ("mistral", {"sliding_window": 8, "head_dim": 32}, [8, 8, 8]),
        ("gemma2", {"sliding_window": 8, "head_dim": 32, "pad_token_id": None, "query_pre_attn_scalar": 24}, [8, 264, 8]),
        ("llama", {"head_dim": 32}, None),
    ],
    ids=["C-17 every layer", "C-17 every other layer", "no window"],
)
def test_the_card_has_the_window_that_the_runtime_must_be_told(tmp_path, write_pair_yaml, make_model, machine, kind, changes, windows):
    machine()
    model = str(make_model(kind, num_hidden_layers=3, **changes))
    config = load_config(
        write_pair_yaml(tmp_path, target={"model": model, "quantize": {"scheme": "full_prec"}}, build={"compiler": "tensorrt"})
    )
    run_convert(config, "target")
    run_quantize(config, "target")
    run_build(config, "target")
    card = json.loads((config.dir_of("target", "engine") / "engine_card.json").read_text())
    assert card.get("max_attention_window_size") == windows


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"target": {"tp": 2}}, "their logits are {'target': 102, 'draft': 101} wide"),
        ({"target": {"tp": 2}, "draft": {"tp": 2}}, "their logits are {'target': 102, 'draft': 102} wide"),
        ({"serving": {"target_gpus": [0, 1]}}, "Cannot place the target on GPUs [0, 1]: it has 1 ranks"),
        ({"serving": {"draft_gpus": [8]}}, "Cannot place the draft on GPU 8"),
        ({"serving": {"gpu": "h1000"}}, "Cannot plan the caches on serving.gpu 'h1000'"),
        (
            {"serving": {"fast_logits": True}, "speculation": {"acceptance": "exact"}},
            "Cannot use serving.fast_logits with acceptance exact",
        ),
    ],
)
def test_check_refuses_before_anything_is_built_what_packaging_would(tmp_path, write_pair_yaml, make_model, sections, expected):
    both = {role: {"model": str(make_model(**MODEL, seed=seed))} for role, seed in (("target", 0), ("draft", 1))}
    path = write_pair_yaml(tmp_path, **merged(TENSORRT, both, sections))
    assert expected in problem(lambda: CliRunner().invoke(cli, ["check", str(path)], catch_exceptions=False))
