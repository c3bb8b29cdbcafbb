import json
import shutil

import pytest

from specbuild import check
from specbuild.check import check_names, check_pair
from specbuild.config import load_config
from specbuild.errors import CheckpointError, ConfigError, SpecbuildError


@pytest.fixture
def check_yaml(tmp_path, write_pair_yaml):
    return lambda **sections: check_pair(load_config(write_pair_yaml(tmp_path, **sections)))


def parameters_of(directory):
    """Count the weights of linear layers and embeddings as transformers does."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    return sum(parameter.numel() for name, parameter in model.named_parameters() if parameter.dim() == 2)


def test_the_report_says_what_the_directories_hold(check_yaml, make_model):
    report = check_yaml()
    target, draft = report.target, report.draft
    assert (target.architecture, target.scheme, target.dtype, target.ranks) == ("LlamaForCausalLM", "int4_awq", "bfloat16", "tp 1, pp 1")
    assert (target.context, target.vocab, target.tokenizer_vocab, target.end_ids) == (512, 101, 101, (0,))
    assert target.weights_seen
    assert target.parameters == parameters_of(make_model(num_hidden_layers=3))
    assert draft.parameters == parameters_of(make_model(seed=1, num_hidden_layers=1))
    assert report.warnings == ()
    json.dumps(report.to_dict())


def test_a_tied_embedding_counts_once(check_yaml, make_model):
    model = make_model(tie_word_embeddings=True)
    assert check_yaml(target={"model": str(model)}).target.parameters == parameters_of(model)


def test_no_weight_is_read(check_yaml, monkeypatch):
    monkeypatch.setattr("specbuild.tensorfile.TensorEntry.load", pytest.fail)
    check_yaml()


def test_nothing_is_written(check_yaml, tmp_path):
    check_yaml()
    assert [path.name for path in tmp_path.iterdir()] == ["pair.yaml"]


@pytest.mark.parametrize(
    ("sections", "warning"),
    [
        ({"draft": {"model": {"num_hidden_layers": 3}}}, "100% of the target's parameters"),
        ({"draft": {"model": {"seed": 1, "num_hidden_layers": 1, "max_position_embeddings": 100}}}, "the draft's context is 100"),
    ],
)
def test_what_works_but_disappoints_is_a_warning(check_yaml, make_model, sections, warning):
    sections["draft"]["model"] = str(make_model(**sections["draft"]["model"]))
    assert any(warning in text for text in check_yaml(**sections).warnings)


@pytest.fixture
def edited(tmp_path, make_model):
    """Return edit(file, **changes): a copy of the small model with keys of a JSON file replaced."""

    def edit(file, **changes):
        directory = shutil.copytree(make_model("llama", seed=1, num_hidden_layers=1), tmp_path / "edited")
        values = json.loads((directory / file).read_text())
        (directory / file).write_text(json.dumps({**values, **changes}))
        return str(directory)

    return edit


@pytest.mark.parametrize(
    ("end", "warning"), [([], "names no end token"), ([7, 0], "end ids differ ([7, 0] and [0])")], ids=["no end", "other end"]
)
def test_end_ids_that_surprise_are_a_warning(check_yaml, edited, make_model, end, warning):
    report = check_yaml(target={"model": edited("generation_config.json", eos_token_id=end)})
    assert any(warning in text for text in report.warnings)


def test_a_pair_whose_models_are_padded_differently_fits(check_yaml, make_model):
    report = check_yaml(target={"model": str(make_model(vocab_size=128))}, draft={"model": str(make_model(seed=1, vocab_size=112))})
    assert (report.target.vocab, report.draft.vocab, report.target.tokenizer_vocab) == (128, 112, 101)


def test_tokenizers_that_differ_in_what_cannot_reach_the_output_fit(check_yaml, edited):
    assert check_yaml(draft={"model": edited("tokenizer.json", post_processor=None, truncation=None)})


def test_a_tokenizer_larger_than_its_model_is_refused(check_yaml, make_model):
    with pytest.raises(ConfigError, match="101 tokens, its model only 96 rows"):
        check_yaml(target={"model": str(make_model(vocab_size=96))})


def test_a_context_beyond_the_target_s_positions_is_refused(check_yaml):
    with pytest.raises(ConfigError, match="Use max_seq_len 512 or less"):
        check_yaml(build={"max_seq_len": 513})


def test_more_drafted_tokens_than_the_engine_takes_are_refused(check_yaml):
    with pytest.raises(ConfigError, match="Cannot draft 4 tokens with max_draft_len 3"):
        check_yaml(build={"max_draft_len": 3})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"speculation": {"acceptance": "typical"}}, "acceptance 'typical': expected one of exact, rejection"),
        ({"speculation": {"drafter": "medusa"}}, "drafter 'medusa': expected one of"),
        ({"build": {"compiler": "tvm"}}, "compiler 'tvm': expected one of onnx-cpu"),
        ({"target": {"quantize": {"scheme": "int3"}}}, "scheme 'int3': expected one of full_prec, int8_wo, int4_wo, int4_awq"),
        ({"draft": {"quantize": {"scheme": "fp8"}}}, "scheme 'fp8'"),
    ],
)
def test_a_name_that_no_table_has_is_refused_with_the_table(tmp_path, write_pair_yaml, sections, message):
    with pytest.raises(ConfigError, match=message):
        check_names(load_config(write_pair_yaml(tmp_path, **sections)))


@pytest.mark.parametrize("sections", [{"target": {"tp": 2}}, {"target": {"pp": 3}}, {"target": {"quantize": {"group_size": 48}}}])
def test_what_a_later_stage_would_refuse_is_refused_now(check_yaml, sections):
    with pytest.raises(SpecbuildError):
        check_yaml(**sections)


def test_the_group_is_checked_before_the_weights_are_looked_at(check_yaml, monkeypatch):
    monkeypatch.setattr(check.HFCheckpoint, "open", pytest.fail)
    with pytest.raises(CheckpointError, match="group_size 48"):
        check_yaml(target={"quantize": {"group_size": 48}})
