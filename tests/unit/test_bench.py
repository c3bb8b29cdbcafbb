"""bench on a fake clock and tables for models, so that every figure of its report is known beforehand; and on a tiny built pair."""

import base64
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from specbuild.bench import ACCEPTANCE_FLOOR, Prompt, Settings, load_bench_prompts, measure
from specbuild.bench_costs import Costs, find_acceptance, measure_costs, predict
from specbuild.bench_passes import Answer, Sample, run_pass
from specbuild.bench_report import format_report, make_html
from specbuild.bench_sources import FLUSH_TOKENS, InProcess, make_flush
from specbuild.errors import ConfigError
from specbuild.pair import Pair
from specbuild.planning.measured import load_measured
from specbuild.spec.drafters import ModelDrafter
from specbuild.spec.loop import Step
from specbuild.spec.stats import SpecStats

VOCAB = 101


class Clock:
    """Seconds that pass only when somebody works."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Model:
    """Logits from the last token alone. A pass costs `step`, and `more` for every new token but the first; cached ones are free."""

    max_seq_len = 400
    vocab_size = VOCAB

    def __init__(self, clock, seed=0, step=1.0, more=0.0):
        self.table = np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)).astype(np.float32)
        self.clock, self.step, self.more, self.seen, self.resets = clock, step, more, [], 0

    def reset(self):
        self.seen = []
        self.resets += 1

    def logits(self, tokens, n):
        return self.logits_batch([(tokens, n)])[0]

    def logits_batch(self, requests):
        new = 0
        for tokens, n in requests:
            tokens = list(tokens)
            best = max((common(tokens, old) for old in self.seen), default=0)
            new += len(tokens) - min(best, len(tokens) - n)
            self.seen.append(tokens)
        self.clock.now += self.step + self.more * (new - 1)
        return [self.table[list(tokens[-n:])] for tokens, n in requests]


def common(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make_pair(tokenizer, clock):
    """A target whose pass of n tokens costs 1 + 0.1 (n - 1), and a draft of the same logits whose step costs 0.2."""

    def make():
        draft = Model(clock, 0, 0.2)
        return Pair(Model(clock, 0, 1.0, 0.1), draft, ModelDrafter(draft), tokenizer, frozenset(), "rejection", 4, 8)

    return make


def settings(lengths=(0, 1, 2, 4), runs=3, batches=(1, 2), max_tokens=31, packaged=4):
    return Settings(max_tokens, lengths, batches, runs, packaged)


PROMPTS = [Prompt("code", "def read"), Prompt("code", "class Reader"), Prompt("prose", "for line in lines")]


def bench(pair, clock, wanted=None, prompts=PROMPTS):
    wanted = wanted or settings()
    costs = measure_costs(pair, range(5, 60), wanted.batches, wanted.draft_lens, wanted.runs, clock)
    return measure(
        InProcess(pair, wanted.max_tokens, clock), prompts, wanted, costs, clock, config="tiny", command="specbuild bench tiny.yaml"
    )


def test_costs_are_what_the_passes_cost(make_pair, clock):
    first, second = measure_costs(make_pair(), range(5, 60), (1, 2), (0, 1, 4), 3, clock)
    assert first.c == pytest.approx(0.2)
    assert first.v == pytest.approx({1: 1, 2: 1.1, 3: 1.2, 4: 1.3, 5: 1.4})
    assert first.target_seconds == pytest.approx(1)
    assert second.v == pytest.approx({n: (1 + 0.1 * (2 * n - 1)) / 1.1 for n in range(1, 6)})  # two sequences: twice the new tokens


@pytest.mark.parametrize(
    ("alpha", "draft_len", "c", "expected"),
    [
        (0.8, 5, 0.0, 3.69),
        (0.6, 2, 0.0, 1.96),
        (0.75, 7, 0.02, 3.157),
        (0.5, 5, 0.2, 0.9844),
        (0.8, 4, 0.05, 2.8013),
        (0.9, 10, 0.2, 2.2873),
    ],
)
def test_predictions_are_the_published_ones(alpha, draft_len, c, expected):
    """Leviathan et al., tables 1 and 2, and the grid recomputed from its formula; verification as cheap as one step."""
    costs = Costs(1, 1.0, c, dict.fromkeys(range(1, 12), 1.0))
    assert predict([alpha] * draft_len, draft_len, costs) == pytest.approx(expected, abs=0.005)


def test_a_prediction_pays_for_wider_passes_and_uses_every_position_s_own_rate():
    costs = Costs(1, 1.0, 0.25, {1: 1.0, 2: 1.5, 3: 2.0})
    assert predict([0.5, 0.25], 2, costs) == pytest.approx((1 + 0.5 + 0.125) / (2 * 0.25 + 2.0))
    assert predict([], 2, costs) is None
    assert predict([], 0, costs) == 1


def test_acceptance_by_position_is_of_the_rounds_that_got_there():
    stats = SpecStats()
    for drafted, accepted, times in ((2, 0, 4), (2, 1, 2), (2, 2, 2), (1, 1, 3), (0, 0, 5)):
        for _ in range(times):
            stats.add(Step(tuple(range(accepted + 1)), accepted, drafted, None))
    assert find_acceptance(stats) == pytest.approx([7 / 11, 2 / 4])


def test_a_draft_that_is_always_right_gains_what_the_costs_say(make_pair, clock):
    """Budget of 31 tokens: 6 rounds of 5 and a last one; the measured speedup meets the formula but for that and the prompt."""
    report = bench(make_pair(), clock)
    rows = {row.draft_len: row for row in report.single}
    for length, row in rows.items():
        assert row.acceptance_by_position == [1.0] * length
        # A round behind the first: k draft steps, and a target pass over k + 1 new tokens.
        assert row.predicted_speedup == pytest.approx((length + 1) / (0.2 * length + 1 + 0.1 * length))
        assert row.speedup.min == pytest.approx(row.speedup.max)  # the clock is not noisy
        assert row.split_seconds["loop"] == pytest.approx(0, abs=1e-9)
    assert rows[4].split_seconds["target"] == pytest.approx(1.4, rel=0.05)  # the last rounds are shorter
    assert rows[4].decode_speedup.median == pytest.approx(rows[4].predicted_speedup, rel=0.1)
    assert report.best.draft_len == 4
    assert report.warnings == ()


def test_speedups_are_ratios_of_passes_of_the_same_run(make_pair, clock):
    """A machine that slows down with every run leaves the ratios alone; rates move, and their spread says so."""
    pair, runs = make_pair(), 4
    source, start = InProcess(pair, 16, clock), pair.target.step
    order = []

    class Slowing(InProcess):
        def forget(self, *, first):
            super().forget(first=first)
            if first:
                run, turn = divmod(len(order), 3)
                order.append(turn)
                pair.target.step, pair.target.more, pair.draft.step = (value * 2**run for value in (start, 0.1, 0.2))

    source = Slowing(pair, 16, clock)
    report = measure(source, PROMPTS, settings((0, 1, 4), runs=runs), (), clock)
    assert order == [0, 1, 2] * (runs + 1)  # plain, k = 1, k = 4, and again: interleaved, then warm without forgetting
    plain, _, long = report.single
    assert plain.tokens_per_second.max == pytest.approx(8 * plain.tokens_per_second.min)
    assert long.speedup.max == pytest.approx(long.speedup.min)
    assert long.speedup.median == pytest.approx(long.tokens_per_second.median / plain.tokens_per_second.median)
    assert long.first_run["tokens_per_second"] == pytest.approx(2 * long.tokens_per_second.max)  # it stands alone


def test_s19_a_repeated_prompt_is_cold_each_time_and_warm_is_marked(make_pair, clock):
    pair = make_pair()
    same = [Prompt("all", "def read_file(path)")] * 3
    source = InProcess(pair, 16, clock)
    cold = run_pass(source, [prompt.text for prompt in same], 4, 1, clock)
    assert pair.target.resets == 3
    assert len({round(answer.arrivals[0], 9) for answer in cold.answers}) == 1
    warm = run_pass(source, [prompt.text for prompt in same], 4, 1, clock, warm=True)
    assert pair.target.resets == 3
    assert warm.answers[0].arrivals[0] < cold.answers[0].arrivals[0]  # the prompt is not read again
    report = bench(pair, clock, prompts=same)
    row = report.longest
    assert row.tokens_per_second.median == pytest.approx(row.first_run["tokens_per_second"])
    assert row.warm["tokens_per_second"] > row.tokens_per_second.max
    text = format_report(report)
    assert "cold caches" in text
    assert "warm: every prompt a second time with full caches, for comparison only" in text


def test_s19_flushing_prompts_push_a_prompt_out_of_every_slot(tiny_pair, tokenizer):
    """What makes a server cold: behind them the whole prompt is computed again, however the slots were filled before."""
    from specbuild.compilers import find_compiler

    slots = 4
    runner = find_compiler("onnx-cpu").open_runner(tiny_pair.dir_of("target", "engine"), slots)
    prompts = [tokenizer.encode(text).ids for text in ("def read_file(path): " * 6, "class", "import os, sys")]

    def read(ids):
        before = runner.tokens_computed
        runner.logits(ids, 1)
        return runner.tokens_computed - before

    for ids in prompts:
        assert read(ids) > 1
    assert [read(ids) for ids in prompts] == [1, 1, 1]  # warm
    for _ in range(slots):
        ids = tokenizer.encode(make_flush(tokenizer)).ids
        assert read(ids) >= FLUSH_TOKENS - 4
        read([*ids, 5])
    assert all(read(ids) >= len(ids) - 1 for ids in prompts)


def test_tokens_of_a_round_arrive_together():
    answer = Answer((Step((1, 2), 1, 4, None), Step((3, 4, 5), 2, 4, None), Step((6,), 0, 4, "length")), (0.5, 0.7, 1.0))
    assert answer.gaps == pytest.approx([0, 0.2, 0, 0, 0.3])
    sample = Sample((answer,), 1.0)
    assert sample.rate() == 6
    assert sample.decode_rate() == pytest.approx(4 / 0.5)


def test_s22_a_draft_with_a_permuted_head_is_named(make_pair, clock):
    pair = make_pair()
    pair.draft.table = np.roll(pair.draft.table, 1, axis=1)
    report = bench(pair, clock)
    assert report.longest.counts["acceptance_rate"] < ACCEPTANCE_FLOOR
    (agrees,) = [warning for warning in report.warnings if "lm_head" in warning]
    counts = report.longest.counts
    for key in ("accepted", "drafted", "rounds", "tokens"):
        assert str(counts[key]) in agrees
    assert any("slower than plain decoding at every draft length" in warning for warning in report.warnings)  # S-17
    assert report.best.draft_len == 0
    assert report.best.speedup.median == 1


def test_s22_acceptance_of_hardly_any_drafts_is_doubted(make_pair, clock):
    class Shy(ModelDrafter):
        def propose(self, tokens, k, sampling):
            return super().propose(tokens, 1 if len(tokens) % 9 == 0 else 0, sampling)

    pair = make_pair()
    pair = Pair(pair.target, pair.draft, Shy(pair.draft), pair.tokenizer, frozenset(), "rejection", 4, 8)
    report = bench(pair, clock)
    assert report.longest.counts["acceptance_rate"] == 1
    assert any("hardly anything was drafted" in warning and "rounds" in warning for warning in report.warnings)


def test_s17_a_packaged_length_that_loses_is_named(make_pair, clock):
    pair = make_pair()
    pair.draft.step = 0.9
    pair.draft.table[::2] = np.roll(pair.draft.table[::2], 1, axis=1)
    report = bench(pair, clock)
    assert any("slower than plain" in warning for warning in report.warnings)


def test_answers_that_differ_from_plain_ones_are_counted(make_pair, clock):
    pair = make_pair()

    class Wrong(InProcess):
        def decode(self, prompt, draft_len):
            for step in super().decode(prompt, draft_len):
                yield Step((*step.tokens[:-1], 7), step.accepted, step.drafted, step.finish_reason) if draft_len else step

    report = measure(Wrong(pair, 16, clock), PROMPTS, settings((0, 2)), (), clock)
    assert any("3 answers at draft_len 2 are not the plain ones" in warning for warning in report.warnings)


def test_kinds_are_told_apart_and_counts_stand_together(make_pair, clock):
    report = bench(make_pair(), clock)
    assert report.prompts == {"code": 2, "prose": 1}
    for key in ("rounds", "drafted", "accepted", "tokens"):
        parts = [{row.draft_len: row.counts[key] for row in rows} for rows in report.kinds.values()]
        for row in report.single:
            assert sum(part[row.draft_len] for part in parts) == row.counts[key]
    text = format_report(report)
    for title in ("plain and speculative", "kinds of prompts", "acceptance"):
        section = text.split(f"\n{title}\n")[1].split("\n\n")[0]
        assert all(word in section.splitlines()[0] for word in ("drafted", "accepted", "rounds", "tokens"))


def test_in_process_a_batch_is_predicted_and_says_so(make_pair, clock):
    report = bench(make_pair(), clock)
    assert {row.batch for row in report.rows} == {1}
    assert report.predictions[2][4] == pytest.approx(5 / (4 * report.costs[1].c + report.costs[1].v[5]))
    assert "batch > 1 is not decoded in this process" in format_report(report)


def test_the_json_has_everything_and_plan_reads_it(make_pair, clock, tmp_path):
    report = bench(make_pair(), clock)
    values = json.loads(json.dumps(report.to_dict()))
    assert {"acceptance", "acceptance_by_position", "c", "v", "batch", "best_draft_len", "command", "config", "place", "prompts",
            "settings", "rows", "kinds", "costs", "predictions", "warnings", "hardware", "versions"} <= values.keys()  # fmt: skip
    assert values["v"]["1"] == 1
    assert {"cpu", "cores"} <= values["hardware"].keys()
    assert {"draft_len", "tokens_per_second", "speedup", "predicted_speedup", "first_token_seconds", "inter_token_seconds", "first_run",
            "warm", "split_seconds", "counts", "acceptance_by_position"} <= values["rows"][0].keys()  # fmt: skip
    (tmp_path / "report.json").write_text(json.dumps(values))
    measured = load_measured(tmp_path / "report.json")
    assert measured.acceptance == tuple(values["acceptance_by_position"])
    assert measured.cost_ratio == pytest.approx(0.2)
    assert measured.verify_cost(5) == pytest.approx(1.4)


class Page(HTMLParser):
    """Collects what a page loads."""

    def __init__(self):
        super().__init__()
        self.loads, self.tags = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [value for name, value in attributes if name in {"src", "href", "data", "srcset"}]


def test_the_html_needs_no_other_file_and_escapes_text(make_pair, clock):
    pair = make_pair()
    pair.draft.table = np.roll(pair.draft.table, 1, axis=1)
    prompts = [Prompt("<b>&kind", "def read"), Prompt("prose", "class")]
    report = measure(
        InProcess(pair, 16, clock), prompts, settings(), measure_costs(pair, range(9), (1, 2), (0, 4), 2, clock), clock,
        config="<script>alert(1)</script>", command="specbuild bench '<i>&x'",
    )  # fmt: skip
    text = make_html(report)
    page = Page()
    page.feed(text)
    assert not re.search(r"https?://|//[a-z]|@import|url\(", text.replace("data:image/svg+xml;base64,", ""))
    assert page.loads
    assert all(value.startswith("data:image/svg+xml;base64,") for value in page.loads)
    assert not {"script", "link", "iframe", "b", "i"} & set(page.tags)
    assert page.tags.count("img") == 4
    for raw in ("&lt;script&gt;alert(1)", "&lt;b&gt;&amp;kind", "&lt;i&gt;&amp;x", "lm_head"):
        assert raw in text
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    for value in page.loads:
        image = base64.b64decode(value.split(",")[1]).decode()
        assert "<svg" in image
        assert not re.search(r'(?:href|src)="(?!#)', image)


def test_shipped_prompts_are_of_several_kinds_and_short():
    prompts = load_bench_prompts(None)
    kinds = [prompt.kind for prompt in prompts]
    assert {kind: kinds.count(kind) for kind in kinds} == {"code": 4, "prose": 4, "repetitive": 4, "list": 4}
    assert all(len(prompt.text) <= 300 for prompt in prompts)
    assert len({prompt.text for prompt in prompts}) == 16


def test_prompt_files_may_name_kinds(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('"a"\n{"prompt": "b"}\n{"prompt": "c", "kind": "code"}\n')
    assert load_bench_prompts(path) == [Prompt("all", "a"), Prompt("all", "b"), Prompt("code", "c")]
    path.write_text('{"prompt": "c", "kind": 3}\n')
    with pytest.raises(ConfigError, match="kind"):
        load_bench_prompts(path)


def test_a_built_pair_is_measured_from_the_command_line(cli, tiny_pair, tmp_path):
    page, plot = tmp_path / "bench.html", tmp_path / "bench.svg"
    options = ["--runs", 2, "--max-tokens", 8, "--draft-len", 2, "--batch", "1,2", "--json", "--html", page, "--plot", plot]
    code, out, _ = cli("bench", tiny_pair.path, *options)
    assert code == 0
    report = json.loads(out)
    assert [row["draft_len"] for row in report["rows"]] == [0, 2]
    assert report["place"] == "in process"
    assert report["config"] == "tiny"
    assert report["command"].startswith("specbuild bench ")
    assert report["c"] > 0
    assert list(report["v"]) == ["1", "2", "3"]
    assert report["hardware"]["cores"] > 0
    assert any("lm_head" in warning for warning in report["warnings"])  # two random models
    assert page.read_text().startswith("<!doctype html>")
    assert ElementTree.parse(plot).getroot().tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--draft-len", 9], 1, "0 to 8"),
        (["--draft-len", -1], 2, "--draft-len"),
        (["--batch", "1,x"], 2, "whole numbers"),
        (["--batch", "0"], 2, "whole numbers"),
        (["--batch", "16"], 1, "max_batch_size is 4"),
        (["--runs", 0], 2, "--runs"),
        (["--max-tokens", 1], 2, "--max-tokens"),
        (["--prompts", "absent.jsonl"], 1, "Cannot read prompts"),
        (["--html", "/absent/directory/x.html"], 1, "directory that exists"),
        (["--url", "127.0.0.1:1", "--prompts", "one.jsonl", "--batch", "1,2"], 1, "2 requests at once: there are 1 prompts"),
        (["--url", "127.0.0.1:1", "--runs", 1, "--batch", "1", "--draft-len", 1], 1, "Cannot reach Triton"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else None,
)
def test_what_cannot_be_measured_is_one_line(cli, tiny_pair, tmp_path, monkeypatch, options, code, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.jsonl").write_text('"x"\n')
    found, out, err = cli("bench", tiny_pair.path, *options)
    assert found == code
    assert out == ""
    assert message in err.splitlines()[-1]
    assert sum(line.startswith("Error: ") for line in err.splitlines()) == 1
