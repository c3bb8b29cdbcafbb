"""A written repository passes its check, and every planted fault fails it by name."""

import json
import shutil

import pytest
from tokenizers import Tokenizer, models

from specbuild.errors import ServingError
from specbuild.triton.pbtxt import format_config, load_config
from specbuild.triton.repository import PairServing, check_repository, find_templates, write_repository


@pytest.fixture
def serving(tmp_path):
    for name in ("target", "draft"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text(json.dumps({"role": name}))
        (tmp_path / name / "sub" / "weights.bin").write_bytes(b"\0" * 16)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    return PairServing(
        name="pair", target_engine=tmp_path / "target", draft_engine=tmp_path / "draft", tokenizer_dir=tmp_path, draft_len=4,
        max_draft_len=8, rule="rejection", drafter="model", max_batch_size=4, context=64, draft_context=64, end_ids=(2, 3), pad_id=0,
        vocab_size=10,
    )  # fmt: skip


@pytest.fixture
def repository(serving, tmp_path):
    write_repository(tmp_path / "repository", serving)
    return tmp_path / "repository"


def edit(repository, model, change):
    config = load_config(repository / model / "config.pbtxt")
    change(config)
    (repository / model / "config.pbtxt").write_text(format_config(config))


def test_written_repository_is_sound(repository):
    check_repository(repository)
    assert {path.name for path in repository.iterdir()} == {"ensemble", "preprocessing", "speculative_decoding", "target", "draft"}
    parameters = load_config(repository / "speculative_decoding" / "config.pbtxt").parameters
    assert parameters["end_ids"].string_value == "2,3"
    assert (repository / "target" / "1" / "engine" / "sub" / "weights.bin").stat().st_nlink == 2


def test_no_path_of_this_machine_inside(repository, tmp_path):
    text = "".join(path.read_text() for path in repository.rglob("*") if path.suffix in {".pbtxt", ".py", ".json"})
    assert str(tmp_path) not in text
    assert "${" not in text
    shutil.move(repository, tmp_path / "moved")
    check_repository(tmp_path / "moved")


def test_symbolic_links_are_resolved(serving, tmp_path):
    (tmp_path / "target" / "link.bin").symlink_to(tmp_path / "target" / "sub" / "weights.bin")
    write_repository(tmp_path / "out", serving)
    link = tmp_path / "out" / "target" / "1" / "engine" / "link.bin"
    assert link.is_file()
    assert not link.is_symlink()


def test_pair_without_draft_model(serving, tmp_path):
    vars_ = {**vars(serving), "draft_engine": None, "drafter": "ngram"}
    write_repository(tmp_path / "out", PairServing(**vars_))
    check_repository(tmp_path / "out")
    assert not (tmp_path / "out" / "draft").exists()


def test_missing_engine_is_named(serving, tmp_path):
    shutil.rmtree(tmp_path / "draft")
    with pytest.raises(ServingError, match=r"draft: no such engine directory.*specbuild build"):
        write_repository(tmp_path / "out", serving)


def test_templates_are_thin():
    for path in find_templates().rglob("model.py"):
        assert len(path.read_text().splitlines()) <= 120


def drop_input_map(config):
    del config.ensemble_scheduling.step[1].input_map["seed"]


def drop_required(config):
    del config.ensemble_scheduling.step[1].input_map["max_tokens"]


def map_unknown(config):
    config.ensemble_scheduling.step[1].input_map["nonsense"] = "seed"


def map_unwritten(config):
    config.ensemble_scheduling.step[1].input_map["input_ids"] = "nowhere"


def drop_output(config):
    del config.ensemble_scheduling.step[1].output_map["rounds"]


def extra_output(config):
    config.ensemble_scheduling.step[1].output_map["rounds"] = "text_output"


def wrong_type(config):
    config.input[0].data_type = 8


def wrong_dims(config):
    next(tensor for tensor in config.input if tensor.name == "seed").dims[0] = 2


def too_large_batch(config):
    config.max_batch_size = 4


def with_instances(config):
    config.instance_group.add(count=1)


def unknown_step(config):
    config.ensemble_scheduling.step[0].model_name = "tokenize"


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("ensemble", drop_input_map, "'seed' is used by nothing"),
        ("ensemble", drop_required, "needs input 'max_tokens'"),
        ("ensemble", map_unknown, "no input 'nonsense'"),
        ("ensemble", map_unwritten, "'nowhere', read by step"),
        ("ensemble", drop_output, "'rounds' is not written"),
        ("ensemble", extra_output, "'text_output' has two writers"),
        ("ensemble", wrong_type, "TYPE_INT32 at"),
        ("ensemble", wrong_dims, r"dims \[1\] at one end and \[2\]"),
        ("ensemble", too_large_batch, "exceeds that of step"),
        ("ensemble", with_instances, "neither backend nor instance_group"),
        ("ensemble", unknown_step, "'tokenize' is not a model"),
        ("target", lambda config: setattr(config, "max_batch_size", 2), "max_batch_size differs"),
        ("draft", lambda config: setattr(config, "name", "other"), "expected the directory's name 'draft'"),
        ("draft", lambda config: setattr(config.model_transaction_policy, "decoupled", True), "is decoupled"),
        ("draft", lambda config: setattr(config.parameters["x"], "string_value", "${y}"), "unfilled"),
    ],
)
def test_planted_faults(repository, model, change, message):
    edit(repository, model, change)
    with pytest.raises(ServingError, match=message):
        check_repository(repository)


@pytest.mark.parametrize(
    ("path", "message"), [("target/1/engine", "no engine at 1/engine"), ("draft/1/model.py", "no 1/model.py"), ("ensemble/1", "no version")]
)
def test_missing_parts(repository, path, message):
    victim = repository / path
    victim.unlink() if victim.is_file() else shutil.rmtree(victim)
    with pytest.raises(ServingError, match=message):
        check_repository(repository)


def test_empty_repository(tmp_path):
    with pytest.raises(ServingError, match="no models in it"):
        check_repository(tmp_path / "absent")
