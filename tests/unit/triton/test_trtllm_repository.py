"""target/ and draft/ for TensorRT-LLM's backend: what it must find, what must not be there, and planted faults of both."""

import json
import shutil
from dataclasses import replace

import pytest
from google.protobuf import text_format
from tokenizers import Tokenizer, models
from tritonclient.grpc import model_config_pb2 as pb

from specbuild.errors import ServingError
from specbuild.triton.contract import ENGINE
from specbuild.triton.pbtxt import format_config, load_config
from specbuild.triton.repository import PairServing, check_repository, write_repository
from specbuild.triton.trtllm_model import Place

# Contract section 1.4: what the C++ backend reads, and what it makes of the value. A key that is not here would be ignored by it.
BOOL, INT, FLOAT, INTS, TEXT = ("true", "false"), int, float, lambda text: [int(part) for part in text.split(",")], str
READ = {
    "gpt_model_type": ("inflight_fused_batching", "inflight_batching", "V1", "v1"), "gpt_model_path": TEXT, "tokenizer_dir": TEXT,
    "xgrammar_tokenizer_info_path": TEXT, "guided_decoding_backend": ("", "xgrammar"), "max_beam_width": INT,
    "batch_scheduler_policy": ("guaranteed_no_evict", "max_utilization"), "max_tokens_in_paged_kv_cache": INT,
    "kv_cache_free_gpu_mem_fraction": FLOAT, "enable_kv_cache_reuse": BOOL, "exclude_input_in_output": BOOL,
    "enable_chunked_context": BOOL, "max_attention_window_size": INTS, "speculative_decoding_fast_logits": BOOL, "gpu_device_ids": INTS,
    "participant_ids": INTS,
}  # fmt: skip
MUST_EXIST = ("gpt_model_type", "gpt_model_path", "tokenizer_dir", "xgrammar_tokenizer_info_path", "guided_decoding_backend")
HARMFUL = ("lora_prefetch_dir", "encoder_model_path", "worker_path")
# Section 1.2, the inputs that the loop may send: (dtype, dims, optional, ragged, one number)
INPUTS = {
    "input_ids": ("TYPE_INT32", [-1], False, True, False), "input_lengths": ("TYPE_INT32", [1], False, False, True),
    "request_output_len": ("TYPE_INT32", [1], False, False, True), "draft_input_ids": ("TYPE_INT32", [-1], True, True, False),
    "draft_logits": ("TYPE_FP32", [-1, -1], True, True, False), "end_id": ("TYPE_INT32", [1], True, False, True),
    "pad_id": ("TYPE_INT32", [1], True, False, True), "runtime_top_k": ("TYPE_INT32", [1], True, False, True),
    "beam_width": ("TYPE_INT32", [1], True, False, True), "runtime_top_p": ("TYPE_FP32", [1], True, False, True),
    "temperature": ("TYPE_FP32", [1], True, False, True), "seed": ("TYPE_UINT64", [1], True, False, True),
    "return_generation_logits": ("TYPE_BOOL", [1], True, False, True), "exclude_input_in_output": ("TYPE_BOOL", [1], True, False, True),
    "stop": ("TYPE_BOOL", [1], True, False, True), "streaming": ("TYPE_BOOL", [1], True, False, True),
}  # fmt: skip
TARGET = Place(devices=(0, 1), participants=(), cache_tokens=4096, cache_fraction=0.2, windows=(8, 64))
DRAFT = Place(devices=(0,), participants=(), cache_tokens=2048, cache_fraction=0.125)


@pytest.fixture
def serving(tmp_path):
    for name, ranks in (("target", 2), ("draft", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"role": name}))
        for rank in range(ranks):
            (tmp_path / name / f"rank{rank}.engine").write_bytes(b"ftrt")
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    return PairServing(
        name="pair", target_engine=tmp_path / "target", draft_engine=tmp_path / "draft", tokenizer_dir=tmp_path, draft_len=4,
        max_draft_len=8, rule="rejection", drafter="model", max_batch_size=4, context=64, draft_context=64, end_ids=(2, 3), pad_id=0,
        vocab_size=10, compiler="tensorrt", places={"target": TARGET, "draft": DRAFT},
    )  # fmt: skip


@pytest.fixture
def repository(serving, tmp_path):
    write_repository(tmp_path / "repository", serving)
    return tmp_path / "repository"


def values(config):
    return {key: value.string_value for key, value in config.parameters.items()}


def edit(repository, model, change):
    config = load_config(repository / model / "config.pbtxt")
    change(config)
    (repository / model / "config.pbtxt").write_text(format_config(config))


def test_the_written_repository_is_sound_also_where_it_is_moved_to(repository, tmp_path):
    check_repository(repository)
    assert str(tmp_path) not in "".join(path.read_text() for path in repository.rglob("*.pbtxt"))
    check_repository(shutil.move(repository, tmp_path / "moved"))


@pytest.mark.parametrize("model", ["ensemble", "preprocessing", "speculative_decoding", "target", "draft"])
def test_t_01_every_config_parses_with_triton_s_protobuf_and_has_no_placeholder(repository, model):
    text = (repository / model / "config.pbtxt").read_text()
    assert text_format.Parse(text, pb.ModelConfig()).name == model
    assert "${" not in text


@pytest.mark.parametrize("fast_logits", [False, True])
@pytest.mark.parametrize("model", ["target", "draft"])
def test_every_parameter_is_one_that_the_backend_reads_with_a_value_that_it_takes(serving, tmp_path, model, fast_logits):
    places = {"target": replace(TARGET, participants=(2, 3)), "draft": replace(DRAFT, participants=(1,))}
    serving = replace(serving, fast_logits=fast_logits, places=places if fast_logits else serving.places)
    write_repository(tmp_path / "out", serving)
    found = values(load_config(tmp_path / "out" / model / "config.pbtxt"))
    assert set(MUST_EXIST) <= found.keys()
    assert not set(HARMFUL) & found.keys()
    for key, value in found.items():
        kind = READ[key]
        assert value in kind if isinstance(kind, tuple) else kind(value) is not None
    assert ("participant_ids" in found, "speculative_decoding_fast_logits" in found) == (fast_logits, fast_logits)
    assert ("max_attention_window_size" in found) == (model == "target")


def test_b_05_structure_and_tensors_are_upstream_s(repository):
    for model in ("target", "draft"):
        config = load_config(repository / model / "config.pbtxt")
        assert (config.backend, config.max_batch_size, config.model_transaction_policy.decoupled) == ("tensorrtllm", 4, False)
        assert [(group.count, group.kind) for group in config.instance_group] == [(1, pb.ModelInstanceGroup.KIND_CPU)]
        found = {
            tensor.name: (pb.DataType.Name(tensor.data_type), list(tensor.dims), tensor.optional, tensor.allow_ragged_batch,
                          tensor.HasField("reshape"))
            for tensor in config.input
        }  # fmt: skip
        assert found == {name: INPUTS[name] for name in found}
        assert found.keys() == {tensor.name for tensor in ENGINE.inputs}
        assert {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in config.output} == {
            "output_ids": (pb.TYPE_INT32, [-1, -1]), "sequence_length": (pb.TYPE_INT32, [-1]),
            "generation_logits": (pb.TYPE_FP32, [-1, -1, -1]),
        }  # fmt: skip
        assert values(config)["enable_kv_cache_reuse"] == "true"
        assert not (repository / model / "1" / "model.py").exists()


def test_numbers_of_a_place(repository):
    target, draft = (values(load_config(repository / model / "config.pbtxt")) for model in ("target", "draft"))
    names = ("gpt_model_path", "gpu_device_ids", "max_tokens_in_paged_kv_cache", "kv_cache_free_gpu_mem_fraction")
    assert [target[name] for name in names] == ["target/1/engine", "0,1", "4096", "0.2"]
    assert [draft[name] for name in names] == ["draft/1/engine", "0", "2048", "0.125"]
    assert target["max_attention_window_size"] == "8,64"


def test_without_a_draft_model(serving, tmp_path):
    write_repository(tmp_path / "out", replace(serving, draft_engine=None, drafter="ngram", places={"target": TARGET}))
    check_repository(tmp_path / "out")
    assert not (tmp_path / "out" / "draft").exists()


def parameter(key, value):
    return lambda config: setattr(config.parameters[key], "string_value", value)


FAULTS = {
    **{f"no {key}": (lambda config, key=key: config.parameters.pop(key), f"lacks parameter {key}") for key in MUST_EXIST},
    **{f"with {key}": (parameter(key, ""), f"parameter {key} breaks it") for key in HARMFUL},
    "B-05 reuse off": (parameter("enable_kv_cache_reuse", "false"), "enable_kv_cache_reuse is 'false', expected 'true'"),
    "no word for true": (parameter("enable_chunked_context", "yes"), "enable_chunked_context is 'yes'"),
    "prompts in answers": (lambda config: config.parameters.pop("exclude_input_in_output"), "exclude_input_in_output is None"),
    "beams": (parameter("max_beam_width", "4"), "max_beam_width is '4'"),
    "no engine": (parameter("gpt_model_path", "elsewhere"), "no engine at its gpt_model_path 'elsewhere'"),
    "too few GPUs": (parameter("gpu_device_ids", "0"), "gpu_device_ids is '0' for 2 ranks"),
    "one GPU twice": (parameter("gpu_device_ids", "0,0"), "gpu_device_ids is '0,0' for 2 ranks"),
    "no GPUs": (lambda config: config.parameters.pop("gpu_device_ids"), "gpu_device_ids is '' for 2 ranks"),
    "GPUs of two instances": (parameter("gpu_device_ids", "0,1;2,3"), "gpu_device_ids is '0,1;2,3', expected numbers"),
    "too few participants": (parameter("participant_ids", "1"), "participant_ids is '1' for 2 ranks"),
    "no batches": (lambda config: setattr(config, "max_batch_size", 0), "max_batch_size is 0"),
    "half logits": (lambda config: setattr(config.output[2], "data_type", pb.TYPE_FP16), "are not TYPE_FP32"),
    "decoupled": (lambda config: setattr(config.model_transaction_policy, "decoupled", True), "is decoupled"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), FAULTS.values(), ids=FAULTS)
def test_planted_faults(repository, change, message):
    edit(repository, "target", change)
    with pytest.raises(ServingError, match=message) as caught:
        check_repository(repository)
    assert "\n" not in str(caught.value)


def test_a_rank_that_was_lost_after_packaging(repository):
    (repository / "target" / "1" / "engine" / "rank1.engine").unlink()
    with pytest.raises(ServingError, match="for 1 ranks of its engine"):
        check_repository(repository)
