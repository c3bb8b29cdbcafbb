"""Contract tables become configs that Triton's own parser reads back unchanged."""

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from specbuild.errors import ServingError
from specbuild.triton import contract
from specbuild.triton.pbtxt import format_config, load_config, make_model

# What genai-perf and Triton's OpenAI front end send to a TensorRT-LLM model.
SENT_BY_CLIENTS = {
    "text_input", "max_tokens", "stream", "stop_words", "bad_words", "temperature", "top_k", "top_p", "seed", "end_id", "pad_id",
    "min_tokens", "min_length", "beam_width", "repetition_penalty", "presence_penalty", "frequency_penalty", "exclude_input_in_output",
    "return_num_input_tokens", "return_num_output_tokens", "num_draft_tokens",
}  # fmt: skip


def test_standard_clients_find_every_input_they_send():
    assert {tensor.name for tensor in contract.PUBLIC.inputs} >= SENT_BY_CLIENTS


def test_only_text_and_length_are_required():
    assert [tensor.name for tensor in contract.PUBLIC.inputs if not tensor.optional] == ["text_input", "max_tokens"]


@pytest.mark.parametrize("spec", [*contract.MODELS.values(), contract.ENGINE], ids=[*contract.MODELS, "engine"])
def test_names_are_unique(spec):
    names = [tensor.name for tensor in (*spec.inputs, *spec.outputs)]
    assert len(set(names)) == len(names)


def test_neutral_values_are_of_declared_inputs():
    assert set(contract.NEUTRAL) <= {tensor.name for tensor in contract.PUBLIC.inputs}


def test_config_survives_text():
    config = make_model("m", contract.ENGINE, max_batch_size=8, decoupled=True, batching=True, parameters={"a": 'quo"te\n${'})
    parsed = text_format.Parse(format_config(config), pb.ModelConfig())
    assert parsed == config
    assert parsed.HasField("dynamic_batching")
    draft_logits = next(tensor for tensor in parsed.input if tensor.name == "draft_logits")
    assert (draft_logits.data_type, list(draft_logits.dims), draft_logits.optional) == (pb.TYPE_FP32, [-1, -1], True)
    assert draft_logits.allow_ragged_batch
    assert next(tensor for tensor in parsed.input if tensor.name == "seed").HasField("reshape")


def test_config_that_does_not_parse_is_named(tmp_path):
    path = tmp_path / "config.pbtxt"
    path.write_text("max_batch_size: ${size}\n")
    with pytest.raises(ServingError, match=r"config.pbtxt: line 1:17 .*package --force"):
        load_config(path)
    with pytest.raises(ServingError, match="No such file"):
        load_config(tmp_path / "absent")
