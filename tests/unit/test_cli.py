import json
import signal
import subprocess
import sys
import time
from importlib import import_module

import pytest
from click.testing import CliRunner

from specbuild import __version__
from specbuild.cli import COMMANDS, cli

HEAVY = ("torch", "transformers", "onnxruntime", "onnx", "tritonclient", "tensorrt_llm", "numpy", "pydantic")


def invoke(*arguments):
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--version"]])
def test_help_and_version_import_no_heavy_library(arguments):
    loaded = f"[name for name in {HEAVY} if name in sys.modules]"
    code = f"import sys; from specbuild.cli import cli; cli({arguments}, standalone_mode=False); print({loaded})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_the_group_lists_every_command_of_the_specification():
    expected = [
        "check", "plan", "lock", "convert", "quantize", "build", "package", "run", "generate", "verify", "bench", "serve", "call", "deploy",
    ]  # fmt: skip
    assert list(COMMANDS) == expected
    text = invoke("--help").output
    assert [line.split()[0] for line in text.split("Commands:\n")[1].splitlines() if line.startswith("  ") and line[2] != " "] == expected


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_s_own_help_begins_with_its_line_in_the_list(name):
    command = import_module(f"specbuild.cli.{name}_command").command
    assert command.name == name
    assert command.help.split("\n\n")[0].replace("\n", " ").strip() == COMMANDS[name]
    assert f"specbuild {name}" in command.help  # an example
    result = invoke(name, "--help")
    assert result.exit_code == 0
    assert COMMANDS[name] in " ".join(result.output.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_help_text(name):
    command = import_module(f"specbuild.cli.{name}_command").command
    ports = {"http_port", "grpc_port", "metrics_port"}  # their names say it
    assert [p.name for p in command.params if p.param_type_name == "option" and not p.help and p.name not in ports] == []


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("convert", {"--only", "--force"}),
        ("quantize", {"--only", "--force"}),
        ("build", {"--only", "--force"}),
        ("package", {"--force"}),
        ("run", {"--force", "--json"}),
        ("check", {"--json"}),
        ("plan", {"--gpu", "--batch", "--alpha", "--measured", "--cost-ratio", "--max-draft-len", "--plot", "--json"}),
        ("verify", {"--json"}),
        ("bench", {"--url", "--prompts", "--max-tokens", "--draft-len", "--batch", "--runs", "--json", "--html"}),
        ("serve", {"--http-port", "--grpc-port", "--metrics-port", "--dry-run"}),
        *((name, {"--prompt", "--prompt-file", "--max-tokens", "--temperature", "--top-k", "--top-p", "--seed", "--draft-len", "--stop",
                  "--json"}) for name in ("generate", "call")),
        ("call", {"--url"}),
    ],
)  # fmt: skip
def test_a_command_has_the_options_of_the_specification(name, options):
    command = import_module(f"specbuild.cli.{name}_command").command
    assert options <= {option for parameter in command.params for option in parameter.opts}


def test_the_version_is_the_package_s():
    assert __version__ in invoke("--version").output


def names(directory):
    return sorted(path.relative_to(directory).as_posix() for path in directory.iterdir()) if directory.exists() else []


def test_stages_write_where_the_specification_says_and_skip_what_is_up_to_date(tmp_path, write_pair_yaml):
    path = write_pair_yaml(tmp_path)
    for stage, made in (("convert", "checkpoint"), ("quantize", "quantized"), ("build", "engine")):
        first = invoke(stage, path)
        assert first.exit_code == 0
        assert first.stdout == ""
        for role in ("target", "draft"):
            assert (tmp_path / "work" / role / made / "config.json").is_file()
            assert (tmp_path / "work" / role / made / "specbuild.json").is_file()
        assert invoke(stage, path).stderr.count("is up to date") == 2
        assert invoke(stage, path, "--force").stderr.count("written") == 2
        assert invoke(stage, path).stderr.count("is up to date") == 2
    assert names(tmp_path / "work" / "target") == ["checkpoint", "engine", "quantized"]


@pytest.mark.parametrize(("only", "other"), [("target", "draft"), ("draft", "target")])
def test_only_makes_one_model_alone(tmp_path, write_pair_yaml, only, other):
    path = write_pair_yaml(tmp_path)
    for stage in ("convert", "quantize", "build"):
        assert invoke(stage, path, "--only", only).exit_code == 0
    assert names(tmp_path / "work" / only) == ["checkpoint", "engine", "quantized"]
    assert not (tmp_path / "work" / other).exists()


@pytest.mark.parametrize(
    ("change", "redone"),
    [
        ({}, []),
        ({"speculation": {"draft_len": 5}}, []),
        ({"target": {"quantize": {"group_size": 64}}}, ["quantize target", "build target"]),
        ({"draft": {"dtype": "float16"}}, ["convert draft", "quantize draft", "build draft"]),
        ({"build": {"max_batch_size": 2}}, ["build target", "build draft"]),
        ({"build": {"max_draft_len": 12}}, ["build target"]),
    ],
)
def test_a_change_redoes_the_stages_that_depend_on_it_and_no_other(tmp_path, write_pair_yaml, change, redone):
    for role in (None, change):
        done = []
        path = write_pair_yaml(tmp_path, **(role or {}))
        for stage in ("convert", "quantize", "build"):
            for which in ("target", "draft"):
                if "is up to date" not in invoke(stage, path, "--only", which).stderr:
                    done.append(f"{stage} {which}")
    assert done == redone


def test_check_prints_a_table_or_json(tmp_path, write_pair_yaml):
    path = write_pair_yaml(tmp_path)
    table = invoke("check", path).stdout
    assert "LlamaForCausalLM" in table
    assert "int4_awq" in table
    report = json.loads(invoke("check", path, "--json").stdout)
    assert report["target"]["scheme"] == "int4_awq"
    assert report["draft"]["vocab"] == 101


def test_sigint_ends_a_command_that_a_script_started_in_its_background(tmp_path):
    """Such a process inherits an ignored SIGINT; a server started by a script must still stop on it."""
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from specbuild.cli import main; main()"
    process = subprocess.Popen([sys.executable, "-c", code, "call", "--prompt-file", "-"], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:  # it listens once it runs, and waits for its prompt
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
        assert process.returncode == 130
        assert process.stderr.read().endswith(b"Interrupted.\n")
