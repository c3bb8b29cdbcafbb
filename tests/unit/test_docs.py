"""The README and the help say what the program does."""

import re
import shlex
from pathlib import Path

import click
import pytest

from specbuild.cli import COMMANDS, cli

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def command_lines() -> list[str]:
    """Every specbuild command in the README's shell blocks, joined over continuation lines, without comments."""
    blocks = re.findall(r"```(?:bash|sh|console)\n(.*?)```", README, re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ").split("  #")[0].rstrip(" &") for line in lines if line.removeprefix("$ ").startswith("specbuild ")]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_readme(name: str) -> None:
    assert f"specbuild {name}" in README


@pytest.mark.parametrize("line", command_lines())
def test_every_command_line_of_the_readme_parses(line: str) -> None:
    name, *arguments = shlex.split(line)[1:]
    command = cli.get_command(click.Context(cli), name)
    assert command is not None, line
    with command.make_context(name, arguments):
        pass


@pytest.mark.parametrize("path", re.findall(r"(?:^|[\s(`])((?:scripts|configs|pipeline|tests|model_repo)/[\w./-]+)", README))
def test_every_path_in_the_readme_exists(path: str) -> None:
    assert (ROOT / path.rstrip(".")).exists(), path


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_a_sentence_and_has_an_example(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert re.match(r"[A-Z][^\n]*\.", command.help or "")
    assert f"specbuild {name}" in (command.help or "")


def test_changelog_names_the_version() -> None:
    from specbuild import __version__

    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_nothing_else_lies_at_the_top() -> None:
    allowed = {
        "pyproject.toml",
        "README.md",
        "Dockerfile",
        "pipeline",
        "model_repo",
        "configs",
        "scripts",
        "tests",
        "LICENSE",
        "CHANGELOG.md",
    }
    made_by_tools = {"build", "dist"}
    assert {path.name for path in ROOT.iterdir() if not path.name.startswith(".")} <= allowed | made_by_tools
