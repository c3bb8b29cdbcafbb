"""The shipped pair through every command, and a real tritonserver: the claims of the README."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specbuild.config import load_config
from specbuild.pair import open_pair
from specbuild.verify import load_prompts, run_verify

pytestmark = pytest.mark.triton
DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"
SPECBUILD = [sys.executable, "-c", "from specbuild.cli import main; main()"]
PROMPT = 'def read_lines(path):\n    """Return the lines of a file.'


def specbuild(directory, *arguments, code=0):
    """Run a command in a directory, where its workdir goes; return stdout."""
    done = subprocess.run([*SPECBUILD, *map(str, arguments)], cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A directory in which the demo pair was run."""
    directory = tmp_path_factory.mktemp("demo")
    report = json.loads(specbuild(directory, "run", DEMO, "--json"))
    assert (report["prompts"], report["identical"], report["self_draft_acceptance"]) == (4, 4, 1.0)
    return directory


@pytest.fixture(scope="module")
def pair(built):
    previous = Path.cwd()
    os.chdir(built)
    try:
        yield open_pair(load_config(DEMO))
    finally:
        os.chdir(previous)


@pytest.fixture(scope="module")
def url(built):
    """The gRPC address of `specbuild serve`, which must end cleanly on SIGTERM."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    http, grpc, metrics = (probe.getsockname()[1] for probe in probes)
    for probe in probes:
        probe.close()
    options = ["--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]
    with (built / "serve.out").open("w") as out, (built / "serve.log").open("w") as log:
        process = subprocess.Popen([*SPECBUILD, "serve", str(DEMO), *map(str, options)], cwd=built, stdout=out, stderr=log)
    try:
        deadline = time.monotonic() + 120
        while not (built / "serve.out").read_text().startswith("ready: "):
            assert process.poll() is None, (built / "serve.log").read_text()[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield f"127.0.0.1:{grpc}", http, metrics
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert (built / "serve.log").read_text().endswith("stopped\n")
    finally:
        process.kill()
        process.wait()


def generate(built, *options):
    return json.loads(specbuild(built, "generate", DEMO, "--prompt", PROMPT, "--max-tokens", 48, "--json", *options))


def call(built, url, *options):
    return json.loads(specbuild(built, "call", "--url", url[0], "--prompt", PROMPT, "--max-tokens", 48, "--json", *options))


def test_twenty_held_out_prompts_are_identical_at_every_draft_length(pair):
    report = run_verify(pair, load_prompts(None), 64)
    assert (report.prompts, report.draft_lens) == (20, (1, 2, 4, 8))
    assert (report.identical, report.near_ties, report.mismatches, report.divergences) == (20, 0, 0, ())
    assert report.self_draft_acceptance == 1.0
    assert report.acceptance >= 0.45


def test_running_again_skips_everything(built):
    done = subprocess.run([*SPECBUILD, "run", str(DEMO)], cwd=built, capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr.count("is up to date") == 7
    assert "written" not in done.stderr


@pytest.mark.parametrize("options", [[], ["--no-stream"]], ids=["streamed", "at once"])
@pytest.mark.parametrize(
    "decoding", [[], ["--draft-len", 0], ["--temperature", 0.8, "--top-k", 40, "--seed", 7]], ids=["greedy", "plain", "sampled"]
)
def test_served_text_is_the_text_of_one_process(built, url, decoding, options):
    served, alone = call(built, url, *decoding, *options), generate(built, *decoding)
    keys = ("text", "token_ids", "prompt_token_ids", "finish_reason", "rounds", "drafted", "accepted")
    assert {key: served[key] for key in keys} == {key: alone[key] for key in keys}
    assert served["chunks"] == (1 if options else served["rounds"])


def test_speculation_is_the_targets_own_greedy_output(built):
    plain = generate(built, "--draft-len", 0)
    assert [generate(built, "--draft-len", k)["token_ids"] for k in (1, 4, 8)] == [plain["token_ids"]] * 3


def test_a_stop_string_ends_both_paths_before_it(built, url):
    whole = generate(built)["text"]
    stop = whole[20:24]
    served, alone = call(built, url, "--stop", stop), generate(built, "--stop", stop)
    assert served["text"] == alone["text"] == whole[: whole.index(stop)]
    assert served["finish_reason"] == alone["finish_reason"] == "stop"
    assert served["token_ids"] == alone["token_ids"]


def test_a_crowd_gets_what_each_gets_alone(url, pair):
    from specbuild.triton.client import stream_generate

    def answer(prompt):
        return "".join(chunk.text for chunk in stream_generate(url[0], prompt, max_tokens=40))

    prompts = load_prompts(None)
    alone = [answer(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(answer, prompts)) == alone


def test_generate_and_the_metrics_answer_over_http(built, url):
    body = json.dumps({"text_input": PROMPT, "max_tokens": 48}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{url[1]}/v2/models/ensemble/generate", body, timeout=60) as response:
        assert json.load(response)["text_output"] == generate(built)["text"]
    with urllib.request.urlopen(f"http://127.0.0.1:{url[2]}/metrics", timeout=60) as response:
        assert re.search(r"specbuild_accepted_draft_tokens_total\S* [1-9]", response.read().decode())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", 0], "max_tokens"),
        (["--prompt", ""], "empty prompt"),
        (["--prompt", "x = 1\n" * 600], "context"),
        (["--draft-len", 9], "8"),
        (["--temperature", -1], "temperature"),
        (["--stop", ""], "empty string"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_a_bad_request_is_one_line_on_both_paths(built, url, options, message):
    for command in (["generate", str(DEMO)], ["call", "--url", url[0]]):
        prompt = [] if "--prompt" in options else ["--prompt", PROMPT]
        done = subprocess.run(
            [*SPECBUILD, *command, *prompt, *map(str, options)], cwd=built, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 1
        assert done.stdout == ""
        assert re.fullmatch(rf"Error: [^\n]*{message}[^\n]*\n", done.stderr), done.stderr


def test_a_port_in_use_and_a_server_that_is_not_there_are_named(built, url):
    taken = url[0].split(":")[1]
    done = subprocess.run(
        [*SPECBUILD, "serve", str(DEMO), "--grpc-port", taken], cwd=built, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert re.fullmatch(rf"Error: [^\n]*{taken}[^\n]*--grpc-port[^\n]*\n", done.stderr), done.stderr
    done = subprocess.run(
        [*SPECBUILD, "call", "--url", "127.0.0.1:1", "--prompt", "x"], cwd=built, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert re.fullmatch(r"Error: Cannot reach Triton at 127\.0\.0\.1:1:[^\n]*\n", done.stderr), done.stderr


def test_a_server_that_is_not_ready_in_time_is_one_error_and_leaves_nothing(built):
    done = subprocess.run(
        [*SPECBUILD, "serve", str(DEMO), "--http-port", "18990", "--grpc-port", "18991", "--metrics-port", "18992", "--timeout", "0.01"],
        cwd=built, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert re.search(r"Error: Triton was not ready within 0\.01 s[^\n]*\n$", done.stderr)
