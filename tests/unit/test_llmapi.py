"""compiler llmapi: a repository for TensorRT-LLM 1.3 and later, whose runtime loads the Hugging Face checkpoints themselves."""

import os
import subprocess
import sys

import pytest
import yaml
from tritonclient.grpc import model_config_pb2 as pb

from specbuild.build import run_build
from specbuild.compilers import llmapi
from specbuild.config import load_config
from specbuild.errors import EngineError
from specbuild.package import run_package
from specbuild.triton.pbtxt import load_config as load_pbtxt
from specbuild.triton.repository import check_repository

PLAIN = {"scheme": "full_prec"}
# triton-contract.md, section 5: names, types and dims of upstream's template.
INPUTS = {
    "text_input": ("TYPE_STRING", [-1], False), "streaming": ("TYPE_BOOL", [1], True), "stop": ("TYPE_BOOL", [1], True),
    "sampling_param_best_of": ("TYPE_INT32", [1], True), "sampling_param_temperature": ("TYPE_FP32", [1], True),
    "sampling_param_top_k": ("TYPE_INT32", [1], True), "sampling_param_top_p": ("TYPE_FP32", [1], True),
    "sampling_param_frequency_penalty": ("TYPE_FP32", [1], True), "sampling_param_presence_penalty": ("TYPE_FP32", [1], True),
    "sampling_param_max_tokens": ("TYPE_INT32", [1], True), "sampling_param_stop": ("TYPE_STRING", [-1], True),
    "sampling_param_seed": ("TYPE_UINT64", [1], True), "sampling_param_exclude_input_from_output": ("TYPE_BOOL", [1], True),
    "sampling_param_return_perf_metrics": ("TYPE_BOOL", [1], True), "return_finish_reason": ("TYPE_BOOL", [1], True),
    "return_stop_reason": ("TYPE_BOOL", [1], True), "return_cumulative_logprob": ("TYPE_BOOL", [1], True),
}  # fmt: skip
OUTPUTS = {
    "text_output": "TYPE_STRING", "finish_reason": "TYPE_STRING", "stop_reason": "TYPE_STRING", "cumulative_logprob": "TYPE_FP32",
    "kv_cache_reused_block": "TYPE_INT32", "kv_cache_missed_block": "TYPE_INT32", "kv_cache_alloc_new_blocks": "TYPE_INT32",
    "kv_cache_alloc_total_blocks": "TYPE_INT32", "kv_cache_hit_rate": "TYPE_FP32", "arrival_time_ns": "TYPE_INT64",
    "first_scheduled_time_ns": "TYPE_INT64", "first_token_time_ns": "TYPE_INT64", "last_token_time_ns": "TYPE_INT64",
    "acceptance_rate": "TYPE_FP32", "total_accepted_draft_tokens": "TYPE_INT32", "total_draft_tokens": "TYPE_INT32",
}  # fmt: skip


@pytest.fixture
def make_pair(write_pair_yaml, tmp_path):
    """Return make(**sections): the YAML of a pair for llmapi."""

    def make(**sections):
        defaults = {
            "target": {"quantize": PLAIN}, "draft": {"quantize": PLAIN}, "speculation": {"acceptance": "exact", "draft_len": 3},
            "build": {"compiler": "llmapi", "max_seq_len": 64, "max_batch_size": 2}, "workdir": str(tmp_path / "work"),
        }  # fmt: skip
        merged = {key: {**value, **sections.get(key, {})} if isinstance(value, dict) else value for key, value in defaults.items()}
        merged |= {key: value for key, value in sections.items() if key not in merged}
        return write_pair_yaml(tmp_path, **merged)

    return make


def test_the_repository_is_upstream_s_contract_and_can_be_moved(make_pair, tmp_path):
    config = load_config(make_pair())
    assert run_package(config)
    assert not run_package(config)  # up to date
    moved = config.repository_dir.rename(tmp_path / "moved")
    check_repository(moved)
    model = load_pbtxt(moved / "tensorrt_llm" / "config.pbtxt")
    assert (model.backend, model.max_batch_size, model.HasField("model_transaction_policy")) == ("python", 0, False)
    assert model.instance_group[0].kind == pb.ModelInstanceGroup.KIND_CPU
    assert {each.name: (pb.DataType.Name(each.data_type), list(each.dims), each.optional) for each in model.input} == INPUTS
    assert {each.name: pb.DataType.Name(each.data_type) for each in model.output} == OUTPUTS
    version_dir = moved / "tensorrt_llm" / "1"
    settings = yaml.safe_load((version_dir / "model.yaml").read_text())
    assert settings["speculative_config"] == {"decoding_type": "Draft_Target", "max_draft_len": 3, "speculative_model": "draft"}
    assert settings["triton_config"] == {"max_batch_size": 0, "decoupled": True, "cancellation_check_period_ms": 100}
    assert (settings["backend"], settings["tensor_parallel_size"], settings["max_batch_size"], settings["max_seq_len"]) == (
        "pytorch",
        1,
        2,
        64,
    )
    for role in ("target", "draft"):
        assert (version_dir / role / "config.json").is_file()
        assert (version_dir / role / "model.safetensors").is_file()
    assert settings["model"] == "target"


def test_without_drafts_there_is_no_speculative_config(make_pair):
    config = load_config(make_pair(speculation={"draft_len": 0}))
    run_package(config)
    assert "speculative_config" not in yaml.safe_load((config.repository_dir / "tensorrt_llm" / "1" / "model.yaml").read_text())


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"target": {"quantize": {"scheme": "int4_awq", "group_size": 32}}}, "as int4_awq with llmapi"),
        ({"speculation": {"acceptance": "rejection"}}, "Set speculation.acceptance: exact"),
        ({"speculation": {"drafter": "ngram"}}, "drafter 'ngram' with llmapi"),
        ({"draft": {"tp": 2}}, "it runs on the target's ranks"),
        ({"serving": {"target_gpus": [1]}}, "serving.target_gpus and llmapi"),
        ({"serving": {"fast_logits": True}}, "serving.fast_logits and llmapi"),
    ],
)
def test_what_the_runtime_would_pass_over_is_refused_before_anything_is_written(make_pair, cli, tmp_path, sections, line):
    for command in ("check", "package", "run"):
        code, out, err = cli(command, make_pair(**sections))
        assert (code, out) == (1, "")
        assert line in err
        assert err.count("\n") == 1
    assert not (tmp_path / "work" / "model_repository").exists()


def test_what_changes_weights_is_refused(make_pair):
    with pytest.raises(EngineError, match="merge_lora and dequantize change weights"):
        llmapi.check_pair(load_config(make_pair(target={"dequantize": True})), {})


def test_build_says_that_there_is_nothing_to_build(make_pair):
    with pytest.raises(EngineError, match="it has no engines"):
        run_build(load_config(make_pair()), "target")


def test_run_goes_from_check_to_the_repository(make_pair, cli, tmp_path):
    code, out, err = cli("run", make_pair())
    assert (code, out) == (0, "")
    assert "the model is tensorrt_llm" in err
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["model_repository"]


@pytest.mark.parametrize("sections", [{"speculation": {"draft_len": 5}}, {"build": {"max_batch_size": 4}}, {"target": {"tp": 2}}])
def test_serve_refuses_a_repository_of_another_yaml(make_pair, cli, sections):
    run_package(load_config(make_pair()))
    code, out, err = cli("serve", make_pair(**sections), "--dry-run")
    assert (code, out) == (1, "")
    assert "it was made for" in err


def test_serve_prints_the_command_and_says_where_it_can_run(make_pair, cli, monkeypatch, tmp_path):
    path = make_pair()
    run_package(load_config(path))
    code, out, _ = cli("serve", path, "--dry-run")
    assert code == 0
    assert "--model-repository=" in out
    assert "--disable-auto-complete-config" not in out  # model.yaml completes the config
    monkeypatch.setenv("SPECBUILD_LLMAPI_DIR", str(tmp_path / "absent"))
    code, _, err = cli("serve", path)
    assert code == 1
    assert "no model.py in" in err


def test_the_model_runs_upstream_s_own_beside_our_model_yaml(make_pair, tmp_path):
    """A stand-in for upstream's template: it imports its neighbour, and reads model.yaml and the checkpoints from where it runs."""
    config = load_config(make_pair())
    run_package(config)
    upstream = tmp_path / "upstream"
    upstream.mkdir()
    (upstream / "helpers.py").write_text("NAME = 'neighbour'\n")
    (upstream / "model.py").write_text(
        "import os\nfrom dataclasses import dataclass\nfrom helpers import NAME\n\n@dataclass\nclass Data:\n    x: int\n\n"
        "class TritonPythonModel:\n    seen = (NAME, sorted(os.listdir('.')))\n"
    )
    model = config.repository_dir.resolve() / "tensorrt_llm" / "1" / "model.py"
    code = f"import runpy; print(runpy.run_path({str(model)!r})['TritonPythonModel'].seen)"
    environment = {**os.environ, "SPECBUILD_LLMAPI_DIR": str(upstream), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True, timeout=60)
    assert done.stdout.strip() == "('neighbour', ['draft', 'model.py', 'model.yaml', 'target'])"
