"""`specbuild build CONFIG --dry-run`: golden outputs from config.json alone, and commands that every accepted version takes."""

import shlex
from pathlib import Path

import fake_trtllm_build
import pytest
from click.testing import CliRunner

from specbuild.cli import cli
from specbuild.compilers import Limits
from specbuild.compilers.trtllm_command import make_command

GOLDEN = Path(__file__).parents[1] / "golden" / "dry_run"
ACCEPTED = ("1.0.0", "1.1.0", "1.2.1")
ALWAYS = {
    "kv_cache_type": "paged",
    "use_paged_context_fmha": "enable",
    "logits_dtype": "float32",
    "max_beam_width": 1,
    "gemm_plugin": "auto",
}


def dry_run(path, *options):
    result = CliRunner().invoke(cli, ["build", str(path), "--dry-run", *options], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def commands(text):
    joined = text.replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in joined.splitlines() if line.startswith("trtllm-build ")]


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A directory to run in, without a GPU, trtllm-build or anything else on PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    return tmp_path


@pytest.mark.parametrize("name", ["8b-1b", "70b-tp8-1b", "405b-tp8-3b"])
def test_the_output_is_the_golden_file_from_config_json_alone(name, bare):
    assert [path.name for shape in (GOLDEN.parent / "shapes").iterdir() for path in shape.iterdir()] == ["config.json"] * 5
    assert dry_run(GOLDEN / f"{name}.yaml") == (GOLDEN / f"{name}.txt").read_text()
    assert list(bare.iterdir()) == []  # and nothing is written


def test_there_is_no_other_golden_file():
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == sorted(path.stem for path in GOLDEN.glob("*.yaml"))


@pytest.mark.parametrize("version", ACCEPTED)
@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_every_accepted_version_takes_the_golden_commands(path, version):
    target, draft = (fake_trtllm_build.make_parser(version).parse_args(words) for words in commands(path.read_text()))
    for args in (target, draft):
        assert {key: getattr(args, key) for key in ALWAYS} == ALWAYS
        assert args.max_num_tokens >= max(args.max_seq_len, args.max_batch_size * (args.max_draft_len + 1))
        assert (args.gather_context_logits, args.remove_input_padding, args.context_fmha) == (False, "enable", "enable")
        assert Path(args.input_timing_cache).is_relative_to(f"build/{path.stem}")
    assert (target.speculative_decoding_mode, target.max_draft_len > 0) == ("draft_tokens_external", True)
    assert (draft.speculative_decoding_mode, draft.max_draft_len) == (None, 0)
    assert (target.max_seq_len, target.max_batch_size) == (draft.max_seq_len, draft.max_batch_size)


def test_one_role_alone(bare):
    whole = (GOLDEN / "8b-1b.txt").read_text()
    assert "\n".join([dry_run(GOLDEN / "8b-1b.yaml", "--only", role) for role in ("target", "draft")]) == whole


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        (Limits(8, 1024, 8, ""), 8192),  # upstream's default
        (Limits(4, 1024, 8, ""), 4096),  # all that the batch can hold
        (Limits(8, 32768, 8, ""), 32768),  # a whole sequence
        (Limits(1024, 128, 16, ""), 17408),  # a round of every sequence
        (Limits(1, 16, 64, ""), 65),
    ],
)
def test_max_num_tokens_holds_a_sequence_and_a_round(limits, tokens):
    command = make_command(Path("in"), Path("out/engine"), limits, 1)
    assert command[command.index("--max_num_tokens") + 1] == str(tokens)


def test_a_target_without_drafted_tokens_is_a_plain_engine():
    command = make_command(Path("in"), Path("out/engine"), Limits(1, 128, 0, ""), 1)
    assert not {"--speculative_decoding_mode", "--max_draft_len", "--gather_generation_logits"} & set(command)


def test_onnx_cpu_says_what_it_would_write(tmp_path, write_pair_yaml, bare):
    text = dry_run(write_pair_yaml(tmp_path))
    assert text.count("model.onnx, weights.bin, config.json, specbuild.json") == 2
    assert not (tmp_path / "work").exists()
