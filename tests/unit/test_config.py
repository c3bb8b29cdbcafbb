import pytest
import yaml

from specbuild.config import load_config
from specbuild.errors import ConfigError

MINIMAL = {"name": "demo", "target": {"model": "t"}, "draft": {"model": "d"}}
ISSUE = """
name: demo
workdir: build/demo               # relative to the current directory, or absolute; default build/<name>
target: {model: demo/target, dtype: bfloat16, tp: 1, pp: 1, quantize: {scheme: int4_awq, group_size: 128, calibration: null}}
draft:  {model: demo/draft,  dtype: bfloat16, tp: 1, pp: 1, quantize: {scheme: int8_wo}}
speculation: {draft_len: 4, acceptance: rejection}
build: {compiler: onnx-cpu, max_batch_size: 8, max_seq_len: 1024}
"""


def write(tmp_path, values):
    path = tmp_path / "pair.yaml"
    path.write_text(values if isinstance(values, str) else yaml.safe_dump(values))
    return path


def problem(tmp_path, values):
    path = write(tmp_path, values)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    return text


def changed(where, value):
    values = yaml.safe_load(ISSUE)
    section = values
    *parents, last = where.split(".")
    for name in parents:
        section = section[name]
    section[last] = value
    return values


def test_the_yaml_of_the_specification_loads(tmp_path):
    config = load_config(write(tmp_path, ISSUE))
    assert (config.target.model, config.target.quantize.scheme, config.target.quantize.group_size) == ("demo/target", "int4_awq", 128)
    assert (config.draft.quantize.scheme, config.speculation.acceptance, config.build.max_seq_len) == ("int8_wo", "rejection", 1024)
    assert str(config.dir_of("draft", "engine")) == "build/demo/draft/engine"


def test_the_workdir_defaults_to_build_and_the_name(tmp_path):
    config = load_config(write(tmp_path, MINIMAL))
    assert str(config.dir_of("target", "checkpoint")) == "build/demo/target/checkpoint"
    assert str(config.repository_dir) == "build/demo/model_repository"


def test_a_configuration_cannot_be_changed(tmp_path):
    config = load_config(write(tmp_path, MINIMAL))
    with pytest.raises(ValueError, match="frozen"):
        config.target.tp = 2


@pytest.mark.parametrize(
    ("where", "nearest"),
    [
        ("worksdir", "workdir"),
        ("targett", "target"),
        ("target.modle", "model"),
        ("draft.quantise", "quantize"),
        ("target.quantize.groupsize", "group_size"),
        ("draft.quantize.schema", "scheme"),
        ("speculation.draft_length", "draft_len"),
        ("build.max_seqlen", "max_seq_len"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_legal_one(tmp_path, where, nearest):
    text = problem(tmp_path, changed(where, 1))
    assert f"unknown key {where}." in text
    assert f"Did you mean '{nearest}'?" in text


def test_an_unknown_key_like_no_other_lists_the_legal_ones(tmp_path):
    text = problem(tmp_path, changed("speculation.zzz", 1))
    assert "Did you mean" not in text
    assert "Legal here: draft_len, acceptance, drafter." in text


def test_the_internal_field_path_is_not_a_key(tmp_path):
    assert "unknown key path" in problem(tmp_path, changed("path", "x"))


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("name", 3),
        ("name", "has space"),
        ("name", "../up"),
        ("name", ""),
        ("workdir", 3),
        ("target", "demo/target"),
        ("draft", ["demo/draft"]),
        ("target.model", None),
        ("target.model", ""),
        ("target.model", 7),
        ("target.revision", 1.5),
        ("target.dtype", "fp16"),
        ("target.dtype", "int8"),
        ("target.tp", 0),
        ("target.tp", "2"),
        ("target.tp", 1.5),
        ("target.tp", True),
        ("draft.pp", -1),
        ("target.quantize", "int4_awq"),
        ("target.quantize.scheme", 4),
        ("target.quantize.group_size", 0),
        ("target.quantize.group_size", "128"),
        ("target.quantize.calibration", "wikitext"),
        ("speculation", 4),
        ("speculation.draft_len", -1),
        ("speculation.draft_len", 65),
        ("speculation.draft_len", "4"),
        ("speculation.acceptance", False),
        ("build.max_batch_size", 0),
        ("build.max_seq_len", 1),
        ("build.max_seq_len", "1024"),
        ("build.compiler", None),
        ("build.kernels", "quick"),
    ],
)
def test_a_wrong_value_is_one_line_with_its_key_and_itself(tmp_path, where, value):
    text = problem(tmp_path, changed(where, value))
    assert where in text
    assert repr(value) in text


@pytest.mark.parametrize("where", ["name", "target", "draft", "target.model", "draft.model"])
def test_a_missing_key_is_named(tmp_path, where):
    values = yaml.safe_load(ISSUE)
    section = values[where.split(".")[0]] if "." in where else values
    del section[where.split(".")[-1]]
    assert f"key {where} is missing" in problem(tmp_path, values)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "expected a mapping"),
        ("- a\n- b\n", "expected a mapping"),
        ("just words", "expected a mapping"),
        ("name: [unclosed", "not valid YAML"),
        ("name: a\n\tb: c\n", "not valid YAML"),
        ("3: x\nname: demo\ntarget: {model: t}\ndraft: {model: d}\n", "keys must be words"),
        ("name: !!python/object/apply:os.system [id]", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text, part):
    assert part in problem(tmp_path, text)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(tmp_path / "bytes.yaml")


@pytest.mark.parametrize(("draft_len", "given", "expected"), [(4, None, 8), (12, None, 12), (4, 4, 4), (0, 0, 0)])
def test_the_engine_takes_at_least_the_drafts_of_the_yaml(tmp_path, draft_len, given, expected):
    config = load_config(write(tmp_path, MINIMAL | {"speculation": {"draft_len": draft_len}, "build": {"max_draft_len": given}}))
    assert config.max_draft_len == expected
