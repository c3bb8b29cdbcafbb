import json
import shutil

import pytest

from specbuild import check
from specbuild.check import check_names, check_pair
from specbuild.cli.check_command import format_report
from specbuild.config import load_config
from specbuild.errors import CheckpointError, ConfigError, SpecbuildError
from specbuild.pair_check import Sizes, find_notes


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


# --- how the two tokenizers differ


@pytest.fixture
def draft_with(tmp_path, make_model, tokenizer):
    """Return make(change, **settings): the small model whose tokenizer.json went through change(values), with a tokenizer_config.json."""

    def make(change=lambda values: None, **settings):
        directory = shutil.copytree(make_model("llama", seed=1, num_hidden_layers=1, vocab_size=112), tmp_path / "draft")
        values = json.loads(tokenizer.to_str())
        change(values)
        (directory / "tokenizer.json").write_text(json.dumps(values))
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        return {"model": str(directory)}

    return make


def add_token(values, name, index):
    values["added_tokens"].append(
        {"id": index, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    )


LOWERCASE = {"normalizer": {"type": "Lowercase"}}
WHOLE_LINES = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
    {"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
]}}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "settings", "effects"),
    [
        (lambda v: None, {"pad_token": "<pad>"}, {"pad_token": "none"}),
        (lambda v: None, {"pad_token": {"content": "<pad>", "lstrip": False}}, {"pad_token": "none"}),
        (lambda v: None, {"add_bos_token": False, "bos_token": "<s>"}, {"add_bos_token": "none", "bos_token": "none"}),
        (lambda v: None, {"tokenizer_class": "LlamaTokenizer"}, {"tokenizer_class": "none"}),
        (lambda v: None, {"chat_template": "{{ messages }}"}, {"the chat template": "acceptance"}),
        (lambda v: v.update(decoder=None), {}, {"the decoder": "none"}),
        (lambda v: v["added_tokens"][0].update(special=False), {}, {"the set of special tokens": "none"}),
        (lambda v: add_token(v, "<pad>", 101), {}, {"the vocabulary": "none"}),
        (lambda v: v.update(LOWERCASE), {}, {"the normalizer": "none", "the segmentation": "acceptance"}),
        (lambda v: v.update(WHOLE_LINES), {}, {"the pre_tokenizer": "none", "the segmentation": "acceptance"}),
        (
            lambda v: v["model"].update(merges=v["model"]["merges"][::-1]), {},
            {"how the tokenizer's model merges": "none", "the segmentation": "acceptance"},
        ),
    ],
)  # fmt: skip
def test_differences_of_the_draft_s_tokenizer_are_told_by_how_far_they_reach(check_yaml, draft_with, change, settings, effects):
    report = check_yaml(draft=draft_with(change, **settings))
    assert {each.what.split(" of ")[0] if "segmentation" in each.what else each.what: each.effect for each in report.differences} == effects
    assert {"none", "acceptance"} >= {each["effect"] for each in report.to_dict()["differences"]}
    text = format_report(report)
    assert text.count("warning: ") == len(effects)
    assert ("cannot reach the output" in text) == ("none" in effects.values())
    assert ("may cost acceptance, not the output" in text) == ("acceptance" in effects.values())


def test_the_first_place_at_which_a_sample_is_cut_otherwise_is_shown(check_yaml, draft_with):
    (found,) = [each for each in check_yaml(draft=draft_with(lambda v: v.update(LOWERCASE))).differences if "segmentation" in each.what]
    assert found.what == "the segmentation of 3 of 5 sample texts, first 'The quick brown fox does' from token 0 on,"
    assert (found.target[:3], found.draft[:4]) == ("'h'", "'th'")  # T is not among the tokens, t is


def test_the_first_three_ids_that_differ_are_named(check_yaml, draft_with):
    def swap(values):
        names = sorted(values["model"]["vocab"], key=values["model"]["vocab"].get)
        values["model"]["vocab"] |= {names[i]: 110 - i for i in range(50, 61)}

    with pytest.raises(ConfigError, match=r"10 token ids differ, first id 50 is .* and .*; id 51 is .* and .*; id 52 is ") as refused:
        check_yaml(draft=draft_with(swap))
    assert "id 53 is" not in str(refused.value)


def test_an_id_that_the_draft_s_model_has_a_row_for_is_only_a_warning(check_yaml, draft_with, tmp_path):
    draft = draft_with()
    shutil.copytree(draft["model"], tmp_path / "target")
    values = json.loads((tmp_path / "target" / "tokenizer.json").read_text())
    add_token(values, "<tool>", 101)
    (tmp_path / "target" / "tokenizer.json").write_text(json.dumps(values))
    (found,) = check_yaml(target={"model": str(tmp_path / "target")}, draft=draft).differences
    assert (found.target, found.draft, found.effect) == ("101 '<tool>'", "absent", "acceptance")


def test_an_id_beyond_the_draft_s_rows_is_refused(check_yaml, make_model, draft_with, tmp_path):
    draft = draft_with(lambda values: add_token(values, "<tool>", 101))
    with pytest.raises(ConfigError, match="ids go up to 101, the draft has 101 rows"):
        check_yaml(target=draft, draft={"model": str(make_model(seed=1, num_hidden_layers=1))})


def test_a_target_whose_files_disagree_about_its_prompts_is_warned_of(check_yaml, draft_with):
    report = check_yaml(target=draft_with(add_bos_token=True, bos_token="<|end|>"))
    assert any("asks for '<|end|>' before every prompt" in text and "reaches the output" in text for text in report.warnings)


def test_an_end_id_that_the_draft_does_not_know_is_warned_of(check_yaml, draft_with, edited):
    draft = draft_with()
    target = edited("generation_config.json", eos_token_id=[0, 101])
    assert any("never emits end id 101" in text for text in check_yaml(target={"model": target}, draft=draft).warnings)


def test_padded_sizes_and_a_tiny_draft_are_notes():
    target, draft = Sizes(70_000_000_000, 4096, 152064, (1,)), Sizes(30_000_000, 4096, 151936, (1,))
    first, second = find_notes(target, draft, 151665)
    assert "padded to 152064 and 151936 rows for 151665 token ids" in first
    assert "2,333 times smaller" in second
    assert list(find_notes(target, target, 151665)) == []
