"""specbuild generate."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from specbuild.cli.options import config_argument, echo_json, echo_summary, generation_options, json_option, read_prompt
from specbuild.config import load_config
from specbuild.generate import run_generate
from specbuild.pair import open_pair
from specbuild.spec.sampling import Sampling
from specbuild.tokenizer import encode_prompt


@click.command("generate")
@config_argument
@generation_options
@json_option
def command(
    config: Path, prompt: str | None, prompt_file: Path | None, max_tokens: int, temperature: float, top_k: int, top_p: float,
    seed: int, draft_len: int | None, stop: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    """Generate in this process, on the built engines.

    The text streams to stdout.

    \b
    specbuild generate configs/demo.yaml --prompt "def read_file(path):" --max-tokens 64
    """
    text = read_prompt(prompt, prompt_file)
    pair = open_pair(load_config(config))
    sampling = Sampling(temperature, top_k, top_p, seed, pair.end_ids)
    on_text = None if as_json else partial(click.echo, nl=False)
    answer = run_generate(pair, encode_prompt(pair.tokenizer, text), sampling, max_tokens, draft_len, stop, on_text)
    if as_json:
        echo_json(answer.to_dict())
    else:
        tokens = len(answer.token_ids)
        echo_summary(answer.finish_reason, tokens, answer.rounds, answer.accepted, answer.drafted, answer.tokens_per_second)
