"""specbuild call."""

from __future__ import annotations

import time
from pathlib import Path

import click

from specbuild.cli.options import echo_json, echo_summary, generation_options, json_option, read_prompt
from specbuild.spec.sampling import Sampling
from specbuild.triton.client import stream_generate


@click.command("call")
@click.option("--url", default="localhost:8001", show_default=True, help="gRPC address of the server, host:port.")
@generation_options
@click.option("--stream/--no-stream", default=True, show_default=True, help="Take the answer chunk by chunk, or at once.")
@click.option(
    "--timeout", type=click.FloatRange(0, 1e6, min_open=True), default=120, show_default=True, help="Seconds to wait for a chunk."
)
@json_option
def command(
    url: str, prompt: str | None, prompt_file: Path | None, max_tokens: int, temperature: float, top_k: int, top_p: float, seed: int,
    draft_len: int | None, stop: tuple[str, ...], stream: bool, timeout: float, as_json: bool,
) -> None:  # fmt: skip
    """Stream an answer from a running server.

    The text goes to stdout.

    \b
    specbuild call --prompt "def read_file(path):" --max-tokens 64
    """
    text = read_prompt(prompt, prompt_file)
    sampling = Sampling(temperature, top_k, top_p, seed)
    start, first, chunks = time.perf_counter(), 0.0, []
    chunk_stream = stream_generate(
        url, text, max_tokens=max_tokens, sampling=sampling, draft_len=draft_len, stop=stop, stream=stream, timeout=timeout
    )
    for chunk in chunk_stream:
        first = first or time.perf_counter() - start
        chunks.append(chunk)
        if not as_json:
            click.echo(chunk.text, nl=False)
    seconds = time.perf_counter() - start
    last = chunks[-1]
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    if as_json:
        echo_json({
            "text": "".join(chunk.text for chunk in chunks), "token_ids": token_ids, "prompt_token_ids": chunks[0].prompt_token_ids,
            "finish_reason": last.finish_reason, "rounds": last.rounds, "drafted": last.drafted, "accepted": last.accepted,
            "tokens_per_second": len(token_ids) / seconds, "first_token_seconds": first, "chunks": len(chunks),
        })  # fmt: skip
    else:
        echo_summary(last.finish_reason, len(token_ids), last.rounds, last.accepted, last.drafted, len(token_ids) / seconds)
