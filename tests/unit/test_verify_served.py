"""Through a server: the greedy comparison and the sampling test, on answers that a stand-in for the server gives."""

import json
from dataclasses import replace

import pytest

from specbuild import verify_served
from specbuild.errors import ServingError
from specbuild.pair import open_pair
from specbuild.spec.sampling import Sampling
from specbuild.spec.stats import SpecStats
from specbuild.tokenizer import encode_prompt
from specbuild.triton.client import Chunk
from specbuild.verify import format_report, load_prompts, run_verify
from specbuild.verify_sampling import PLAIN, WHOLE
from specbuild.verify_served import cut_text, run_served, run_served_sampling

URL = "localhost:8001"


@pytest.fixture
def pair(tiny_pair):
    return open_pair(tiny_pair)


@pytest.fixture
def texts(pair):
    return [cut_text(pair.tokenizer, text, 128) for text in load_prompts(None)[:3]]


@pytest.fixture
def serve(tiny_pair, monkeypatch):
    """Return serve(change): a server that answers as the pair does, its tokens changed by change(tokens, draft_len, position)."""
    behind = open_pair(tiny_pair)

    def start(change=lambda tokens, draft_len, position: tokens):
        def stream(url, prompt, *, max_tokens, sampling=None, draft_len=None, stream=True):
            assert url == URL
            stats, waiting, position = SpecStats(), (), 0
            sampling = replace(sampling or Sampling(), end_ids=behind.end_ids)
            for step in behind.steps(encode_prompt(behind.tokenizer, prompt), sampling, max_tokens, draft_len):
                stats.add(step)
                waiting += change(step.tokens, draft_len, position)
                position += len(step.tokens)
                if stream or step.finish_reason:
                    yield Chunk("", waiting, stats.rounds, stats.drafted, stats.accepted, step.finish_reason)
                    waiting = ()

        monkeypatch.setattr(verify_served, "stream_generate", stream)

    return start


def spoil(tokens, draft_len, position):
    """Speculative answers lose their fifth token."""
    return tuple((token + 1) % 101 if draft_len and position + i == 4 else token for i, token in enumerate(tokens))


def test_a_sound_server_gives_the_report_of_one_process(serve, pair, texts):
    serve()
    served, here = run_served(URL, texts, 24, (1, 4), 4, pair), run_verify(pair, texts, 24, (1, 4))
    names = ("identical", "near_ties", "mismatches", "acceptance_by_draft_len", "position_rates", "drafted", "accepted", "rounds")
    assert {name: getattr(served, name) for name in names} == {name: getattr(here, name) for name in names}
    assert (served.url, served.served_differently, served.passed) == (URL, 0, True)
    assert "plain, in this process identical" in format_report(served)
    alone = run_served(URL, texts, 24, (1, 4), 4)
    assert (alone.identical, alone.served_differently, alone.passed) == (3, None, True)
    assert "not compared: no engines here" in format_report(alone)


def test_speculative_answers_that_leave_the_plain_ones_are_a_mismatch(serve, pair, texts):
    serve(spoil)
    for report in (run_served(URL, texts, 24, (4,), 4, pair), run_served(URL, texts, 24, (4,), 4)):
        assert (report.mismatches, report.passed) == (3, False)
        assert {each.position for each in report.divergences} == {4}
        json.dumps(report.to_dict())
    assert "no engine here to measure the margin" in format_report(report)


def test_a_server_of_another_target_is_told_by_its_plain_answers(serve, pair, texts):
    serve(lambda tokens, *_: tuple((token + 1) % 101 for token in tokens))
    report = run_served(URL, texts, 24, (4,), 4, pair)
    assert (report.mismatches, report.served_differently, report.passed) == (0, 3, False)
    assert "plain, in this process 3 DIFFERENT" in format_report(report)


@pytest.mark.parametrize("engines", [True, False])
def test_sampling_is_tested_through_the_server(serve, pair, texts, engines):
    serve()
    report = run_served_sampling(URL, texts[:1], 4, pair if engines else None, 200)
    assert report.passed
    assert report.against == (WHOLE if engines else PLAIN)
    serve(lambda tokens, draft_len, _: tuple(token // 2 * 2 if draft_len else token for token in tokens))
    assert not run_served_sampling(URL, texts[:1], 4, pair if engines else None, 200).passed


def test_a_text_is_cut_to_a_number_of_tokens(tokenizer):
    text = "def read_file(path): é ö 你好"
    for length in range(1, 30):
        cut = cut_text(tokenizer, text, length)
        assert text.startswith(cut)
    assert len(tokenizer.encode(cut_text(tokenizer, text, 5)).ids) <= 5
    assert cut_text(tokenizer, text, 1000) == text


def test_the_command_asks_the_server_and_fails_in_one_line_without_it(cli, tmp_path, tiny_pair, serve):
    path = tmp_path / "prompts.jsonl"
    path.write_text('"def read_file"\n"class Reader"\n')
    arguments = ("verify", tiny_pair.path, "--prompts", path, "--max-tokens", 12, "--draft-len", 4, "--url", URL)
    code, _, err = cli(*arguments[:-1], "127.0.0.1:1")
    assert code == 1
    assert err.startswith("Error: Cannot reach Triton at 127.0.0.1:1")
    serve()
    code, out, _ = cli(*arguments, "--sampling", "--draws", 100, "--json")
    report = json.loads(out)
    assert (code, report["url"], report["served_differently"], report["sampling"]["passed"]) == (0, URL, 0, True)
    serve(spoil)
    code, out, _ = cli(*arguments)
    assert code == 1
    assert "MISMATCH: prompt 0, draft_len 4, position 4" in out


def test_the_command_runs_where_nothing_is_built(cli, tmp_path, write_pair_yaml, serve):
    serve()
    code, out, err = cli("verify", write_pair_yaml(tmp_path), "--max-tokens", 8, "--draft-len", 2, "--url", URL)
    assert code == 0
    assert "only the server is asked: Cannot open engine" in err
    assert "not compared: no engines here" in out


def test_an_error_of_the_server_is_raised(monkeypatch, texts):
    def refuse(*_arguments, **_options):
        raise ServingError("refused")
        yield

    monkeypatch.setattr(verify_served, "stream_generate", refuse)
    with pytest.raises(ServingError, match="refused"):
        run_served(URL, texts, 8, (1,), 4)
