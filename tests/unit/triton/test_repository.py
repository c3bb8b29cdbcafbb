"""A written repository passes its check, and every planted fault fails it by name."""

import json
import shutil

import pytest
from tokenizers import Tokenizer, models

from specbuild.errors import ServingError
from specbuild.triton.contract import ModelSpec, TensorSpec
from specbuild.triton.pbtxt import format_config, load_config, make_model
from specbuild.triton.repository import PairServing, check_repository, find_templates, write_config, write_repository


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


def other_platform(config):
    config.platform = "python"


def with_warmup(config):
    config.model_warmup.add(name="w")


def nameless_step(config):
    config.ensemble_scheduling.step[0].model_name = ""


def no_input_map(config):
    config.ensemble_scheduling.step[0].input_map.clear()


def no_output_map(config):
    config.ensemble_scheduling.step[0].output_map.clear()


def no_steps(config):
    del config.ensemble_scheduling.step[:]


def unused_input(config):
    config.input.add(name="extra", data_type=8, dims=[1])


def circle(config):
    config.ensemble_scheduling.step[0].input_map["text_input"] = "text_output"


def unread_tensor(config):
    config.ensemble_scheduling.step[1].output_map["rounds"] = "nobody"
    config.output.remove(next(tensor for tensor in config.output if tensor.name == "rounds"))


def no_such_output(config):
    config.ensemble_scheduling.step[0].output_map["nonsense"] = "x"


def other_rank(config):
    next(tensor for tensor in config.input if tensor.name == "seed").dims.append(1)


def after_decoupled(config):
    """The prompt again, as it was before the loop, beside what the loop answers: how often would this step run?"""
    step = config.ensemble_scheduling.step.add(model_name="both")
    step.input_map.update({"a": "text_input", "b": "text_output"})
    step.output_map.update({"c": "c"})
    config.output.add(name="c", data_type=13, dims=[1])


def preferred(sizes):
    return lambda config: config.dynamic_batching.preferred_batch_size.extend(sizes)


# Every rule of the contract's table of ensemble validation, in its order.
FAULTS = {
    "1 platform": ("ensemble", other_platform, "has steps, but platform 'python'"),
    "1 backend": ("ensemble", lambda config: setattr(config, "backend", "onnxruntime"), "it has backend"),
    "2 instance_group": ("ensemble", with_instances, "neither backend nor instance_group.*it has instance_group"),
    "2 optimization": ("ensemble", lambda config: config.optimization.SetInParent(), "it has optimization"),
    "2 model_warmup": ("ensemble", with_warmup, "it has model_warmup"),
    "3 model_name": ("ensemble", nameless_step, "has no model_name"),
    "3 input_map": ("ensemble", no_input_map, "has no input_map"),
    "3 output_map": ("ensemble", no_output_map, "has no output_map"),
    "3 no step": ("ensemble", no_steps, "has no steps"),
    "4 input unused": ("ensemble", unused_input, "'extra' is used by nothing"),
    "4 input unmapped": ("ensemble", drop_input_map, "'seed' is used by nothing"),
    "5 output unwritten": ("ensemble", drop_output, "'rounds' is not written"),
    "5 not connected": ("ensemble", map_unwritten, "'nowhere', read by step"),
    "5 circle": ("ensemble", circle, "'text_output', read by step 'preprocessing', is written by no step that can run before it"),
    "6 dangling": ("ensemble", unread_tensor, "'nobody' is used by nothing"),
    "7 two writers": ("ensemble", extra_output, "'text_output' has two writers"),
    "8 required input": ("ensemble", drop_required, "needs input 'max_tokens'"),
    "9 no such input": ("ensemble", map_unknown, "no input 'nonsense'"),
    "9 no such output": ("ensemble", no_such_output, "no output 'nonsense'"),
    "10 type": ("ensemble", wrong_type, "TYPE_INT32 at"),
    "10 dims": ("ensemble", wrong_dims, r"dims \[1\] at one end and \[2\]"),
    "10 rank": ("ensemble", other_rank, r"dims \[1\] at one end and \[1, 1\]"),
    "10 no batch at one end": ("preprocessing", lambda config: setattr(config, "max_batch_size", 0), r"dims \[1\] .* \[-1, 1\]"),
    "11 batch": ("ensemble", too_large_batch, "exceeds that of step"),
    "12 decoupled": ("ensemble", after_decoupled, "'both' reads tensors from before and after a decoupled step"),
    "13 missing model": ("ensemble", unknown_step, "'tokenize' is not a model"),
    "14 preferred too large": ("target", preferred([4, 5]), "preferred_batch_size 5 is not from 1 to its max_batch_size 4"),
    "14 preferred zero": ("target", preferred([0]), "preferred_batch_size 0"),
    "batch sizes differ": ("target", lambda config: setattr(config, "max_batch_size", 2), "max_batch_size differs"),
    "other name": ("draft", lambda config: setattr(config, "name", "other"), "expected the directory's name 'draft'"),
    "decoupled engine": ("draft", lambda config: setattr(config.model_transaction_policy, "decoupled", True), "is decoupled"),
    "T-04 unary loop": (
        "speculative_decoding",
        lambda config: setattr(config.model_transaction_policy, "decoupled", False),
        "it answers in chunks",
    ),
    "T-01 unfilled": ("draft", lambda config: setattr(config.parameters["x"], "string_value", "${y}"), "unfilled"),
}


@pytest.mark.parametrize(("model", "change", "message"), FAULTS.values(), ids=FAULTS)
def test_planted_faults(repository, model, change, message):
    both = make_model(
        "both", ModelSpec((TensorSpec("a", "BYTES"), TensorSpec("b", "BYTES")), (TensorSpec("c", "BYTES"),)), max_batch_size=1
    )
    version_dir = write_config(repository, both)
    (version_dir / "model.py").write_text("")
    check_repository(repository)
    edit(repository, model, change)
    with pytest.raises(ServingError, match=message):
        check_repository(repository)


def test_steps_may_stand_in_any_order(repository):
    def turn(config):
        first, second = config.ensemble_scheduling.step
        config.ensemble_scheduling.step.append(first)
        config.ensemble_scheduling.step.remove(first)
        assert config.ensemble_scheduling.step[0] == second

    edit(repository, "ensemble", turn)
    check_repository(repository)


def test_an_unbatched_step_may_declare_the_batch_dimension(repository):
    def unbatch(config):
        config.max_batch_size = 0
        for tensor in (*config.input, *config.output):
            tensor.dims.insert(0, -1)

    edit(repository, "preprocessing", unbatch)
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
