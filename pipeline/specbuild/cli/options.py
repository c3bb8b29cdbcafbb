"""Options and arguments, each declared once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from specbuild.config import ROLES, Role
from specbuild.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

config_argument = click.argument("config", type=click.Path(path_type=Path))
force_option = click.option("--force", is_flag=True, help="Make it anew even if it is up to date.")
only_option = click.option("--only", type=click.Choice(ROLES), help="Only this model of the pair.")
locked_option = click.option("--locked", is_flag=True, help="Refuse whatever differs from CONFIG.lock, as `specbuild lock` wrote it.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")


def check_text(what: str, text: str) -> None:
    """Raise ConfigError for bytes of the command line that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"Cannot use {what} {text!a}: it is not UTF-8. Give UTF-8 text, or --prompt-file.") from None


def check_stop(_ctx: click.Context, _param: click.Parameter, stop: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse an empty stop string here: on the wire it means none."""
    if "" in stop:
        raise ConfigError("Cannot stop at an empty string: expected --stop with text. Leave it out.")
    for text in stop:
        check_text("--stop", text)
    return stop


def take_one(_ctx: click.Context, _param: click.Parameter, prompts: tuple[str, ...]) -> str | None:
    """Return the one prompt: click would keep the last of several without a word."""
    if len(prompts) > 1:
        raise click.UsageError(f"Give --prompt once: a request is one prompt, got {len(prompts)}.")
    return prompts[0] if prompts else None


_GENERATION_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--prompt", multiple=True, callback=take_one, help="The text to continue."),
    click.option("--prompt-file", type=click.Path(path_type=Path), help="Read the prompt from a file; - is stdin."),
    click.option("--max-tokens", type=int, default=128, show_default=True, help="Most tokens to generate."),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 = greedy."),
    click.option("--top-k", type=int, default=0, show_default=True, help="Sample from the k likeliest tokens; 0 = all."),
    click.option("--top-p", type=float, default=1.0, show_default=True, help="Sample from the likeliest tokens of this mass."),
    click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same answer."),
    click.option("--draft-len", type=int, help="Tokens drafted per round; 0 = plain decoding.  [default: as packaged]"),
    click.option("--stop", multiple=True, callback=check_stop, help="End the answer before this text; repeatable."),
)


def generation_options(function: F) -> F:
    """Add the options that `generate` and `call` share."""
    for option in reversed(_GENERATION_OPTIONS):
        function = option(function)
    return function


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """Return the prompt of --prompt or --prompt-file; exactly one must be given, and it must not be empty."""
    if (prompt is None) == (prompt_file is None):
        raise click.UsageError("Give exactly one of --prompt and --prompt-file.")
    if prompt_file is not None:
        try:
            prompt = sys.stdin.read() if str(prompt_file) == "-" else prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"Cannot read prompt file {prompt_file}: {error}. Give a UTF-8 text file, or - for stdin.") from None
    check_text("the prompt", prompt or "")
    if not prompt:
        raise ConfigError("Cannot generate from an empty prompt: expected at least one character. Give a prompt.")
    return prompt


def roles_of(only: Role | None) -> tuple[Role, ...]:
    """Return the roles that --only selects."""
    return (only,) if only else ROLES


def echo_summary(reason: str | None, tokens: int, rounds: int, accepted: int, drafted: int, rate: float) -> None:
    """End an answer's text on stdout, and say on stderr what it took; `rate` is in tokens per second."""
    click.echo()
    click.echo(
        f"{reason} after {tokens} tokens: {rounds} rounds, {accepted} of {drafted} drafted tokens accepted, {rate:.0f} tokens/s", err=True
    )


def echo_json(value: object) -> None:
    """Print a result as one JSON object."""
    click.echo(json.dumps(value, ensure_ascii=False))
