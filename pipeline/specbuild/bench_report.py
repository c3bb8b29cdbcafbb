"""The report of bench as text and as one HTML file with its plots inside."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specbuild.bench import Report, Row, Spread
from specbuild.errors import ConfigError

GAPS = "inter-token time is between successive tokens as a client sees them: those of a round arrive together, so all but its first count 0"
COLORS = ("#3b82f6", "#f59e0b", "#10b981", "#ec4899", "#8b5cf6")
GREY = "#888888"  # reads on white and on black

STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --back: #ffffff; --line: #d8d8d8; --soft: #f4f4f4; --alarm: #b42318; }
@media (prefers-color-scheme: dark) { :root { --text: #e8e8e8; --back: #161616; --line: #3a3a3a; --soft: #222222; --alarm: #ff8a7a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); margin: 0 auto; max-width: 62rem; padding: 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } .best td { background: var(--soft); font-weight: 600; }
.warning { color: var(--alarm); } img { max-width: 100%; height: auto; } figure { margin: 1rem 0; }
pre, code { background: var(--soft); overflow-wrap: anywhere; white-space: pre-wrap; } pre { padding: .6rem; }
"""


def check_drawable(path: Path) -> None:
    """Raise ConfigError when no plots can be written to `path` here."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "Cannot draw plots: matplotlib is not installed. Run `pip install 'specbuild[bench]'`, or leave --html and --plot out."
        )
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"Cannot write {path}: expected a file in a directory that exists. Give another path.")


def show(spread: Spread) -> str:
    """Return a median with its range."""
    return f"{spread.median:.2f} ({spread.min:.2f}..{spread.max:.2f})"


def optional(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def main_table(rows: Sequence[Row]) -> list[list[str]]:
    """Return the header and a line per draft length."""
    table = [["draft_len", "tokens/s", "speedup (min..max)", "decode only", "predicted", "first token ms",
              "inter-token p50 / p99 / mean ms", "drafted",
              "accepted", "rounds", "tokens", "first run", "warm"]]  # fmt: skip
    for row in rows:
        gaps = " / ".join(f"{1e3 * row.inter_token_seconds[key]:.2f}" for key in ("p50", "p99", "mean"))
        counts = [str(row.counts[key]) for key in ("drafted", "accepted", "rounds", "tokens")]
        table.append([
            str(row.draft_len), f"{row.tokens_per_second.median:.0f}", show(row.speedup), f"{row.decode_speedup.median:.2f}",
            optional(row.predicted_speedup), f"{1e3 * row.first_token_seconds:.1f}", gaps, *counts, f"{row.first_run['speedup']:.2f}",
            optional(row.warm["speedup"] if row.warm else None),
        ])  # fmt: skip
    return table


def acceptance_table(rows: Sequence[Row]) -> list[list[str]]:
    """Return acceptance by position, and how many rounds accepted how many tokens, with the counts behind them."""
    table = [["draft_len", "accepted / drafted", "rounds", "tokens", "by position, of rounds that got there", "rounds by tokens accepted"]]
    for row in rows:
        if row.draft_len:
            counts = row.counts
            table.append([
                str(row.draft_len), f"{counts['accepted']} / {counts['drafted']} = {counts['acceptance_rate']:.3f}", str(counts["rounds"]),
                str(counts["tokens"]), " ".join(f"{rate:.2f}" for rate in row.acceptance_by_position),
                " ".join(f"{accepted}: {n}" for accepted, n in counts["accepted_histogram"].items()),
            ])  # fmt: skip
    return table


def split_table(rows: Sequence[Row]) -> list[list[str]]:
    """Return where the time of a round goes; only the header where that cannot be seen."""
    table = [["draft_len", "draft ms", "target ms", "loop ms", "tokens per round"]]
    for row in rows:
        if row.split_seconds is not None:
            parts = [f"{1e3 * row.split_seconds[part]:.2f}" for part in ("draft", "target", "loop")]
            table.append([str(row.draft_len), *parts, f"{row.counts['tokens'] / row.counts['rounds']:.2f}"])
    return table


def kind_table(report: Report) -> list[list[str]]:
    """Return the fastest draft of every kind of prompt, beside plain decoding."""
    table = [["kind", "prompts", "plain tokens/s", "best draft_len > 0", "speedup (min..max)", "accepted / drafted", "rounds", "tokens"]]
    for kind, (plain, *drafting) in report.kinds.items():
        if drafting:
            best = max(drafting, key=lambda row: (row.speedup.median, -row.draft_len))
            rate = f"{best.counts['accepted']} / {best.counts['drafted']} = {best.counts['acceptance_rate']:.3f}"
            counts = [str(best.counts[key]) for key in ("rounds", "tokens")]
            speed = f"{plain.tokens_per_second.median:.0f}"
            table.append([kind, str(report.prompts[kind]), speed, str(best.draft_len), show(best.speedup), rate, *counts])
    return table


def batch_table(report: Report) -> list[list[str]]:
    """Return a line per batch: measured where requests were sent at once, and what the costs at that batch predict."""
    lengths = report.settings.draft_lens[1:]
    table = [["batch", "speedup", *(f"k={length}" for length in lengths), "c", "v"]]
    for batch in report.settings.batches:
        costs = next((each for each in report.costs if each.batch == batch), None)
        measured = {row.draft_len: row.speedup.median for row in report.rows if row.batch == batch}
        if costs:
            cost = [f"{costs.c:.2f}", " ".join(f"{n}: {value:.2f}" for n, value in costs.v.items())]
            table.append([str(batch), "predicted", *(optional(report.predictions[batch][length]) for length in lengths), *cost])
        if measured:
            table.append([str(batch), "measured", *(f"{measured[length]:.2f}" for length in lengths), "", ""])
    return table


def notes(report: Report) -> list[str]:
    """Return what the tables do not say by themselves."""
    served = report.place != "in process"
    batches = (
        "batch > 1 measured: that many requests at once; tokens/s of all together" if served
        else "batch > 1 is not decoded in this process: c and v are of passes over that many sequences, the speedup is predicted from them"
    )  # fmt: skip
    lines = [
        f"speedup: tokens/s over plain decoding in the same run, cold caches, {report.settings.runs} runs behind the first; decode only: "
        "without the first round, which reads the prompt",
        "predicted: tau / (k c + v(k+1)) from the acceptance at that draft length, a draft step c and a target pass over n tokens v(n), "
        "in units of a plain step",
        "first run: the one before those; warm: every prompt a second time with full caches, for comparison only", GAPS, batches,
    ]  # fmt: skip
    if served:
        lines.append(
            "cold means that other prompts filled the server's caches before each pass (onnx-cpu; other engines keep what they keep)"
        )
        lines.append("c and v are of the engines in this process: a prediction leaves out what serving adds")
    return lines


def headline(report: Report) -> list[str]:
    """Return machine, versions, parameters and the result."""
    best = report.best
    kinds = ", ".join(f"{count} {kind}" for kind, count in report.prompts.items())
    return [
        f"{report.hardware['cpu']}, {report.hardware['cores']} cores; " + ", ".join(f"{k} {v}" for k, v in report.versions.items()),
        f"{report.config} {report.place}: {kinds} prompts, {report.settings.max_tokens} tokens, greedy, {report.settings.runs} paired runs",
        f"best draft_len {best.draft_len}: {show(best.speedup)} times plain decoding, one request at a time, cold",
    ]


def sections(report: Report) -> list[tuple[str, list[list[str]]]]:
    """Return every table with its title; those that are empty are left out."""
    found = [
        ("plain and speculative", main_table(report.single)), ("acceptance", acceptance_table(report.single)),
        ("a round", split_table(report.single)), ("kinds of prompts", kind_table(report)), ("batches", batch_table(report)),
    ]  # fmt: skip
    return [(title, table) for title, table in found if len(table) > 1]


def format_report(report: Report) -> str:
    """Return the report as text."""
    lines = headline(report)
    for title, table in sections(report):
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines += ["", title]
        lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([*lines, "", *notes(report), *(f"warning: {warning}" for warning in report.warnings)])


def make_html(report: Report) -> str:
    """Return the report as one HTML page that needs no other file."""
    parts = [f"<h1>specbuild bench: {escape(report.config)}</h1>", *(f"<p>{escape(line)}</p>" for line in headline(report))]
    parts += [f'<p class="warning">Warning: {escape(warning)}</p>' for warning in report.warnings]
    plots = {"plain and speculative": [draw_speedup], "acceptance": [draw_acceptance], "a round": [draw_split], "batches": [draw_batches]}
    for title, table in sections(report):
        parts.append(f"<h2>{escape(title.capitalize())}</h2>")
        parts += [draw_image(report, draw) for draw in plots.get(title, [])]
        parts.append(make_table(table, report.best.draft_len if title in {"plain and speculative", "acceptance", "a round"} else None))
    parts.append("<h2>How to read this</h2>" + "".join(f"<p>{escape(line)}</p>" for line in notes(report)))
    parts.append(f"<h2>Command</h2><pre>{escape(report.command)}</pre>")
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    body = "\n".join(parts)
    title = f"<title>specbuild bench: {escape(report.config)}</title>"
    return f'<!doctype html>\n<html lang="en">\n<head>{head}{title}<style>{STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n'


def make_table(table: Sequence[Sequence[str]], best: int | None) -> str:
    """Return a table, the line of the best draft length marked."""
    header = "".join(f"<th>{escape(cell)}</th>" for cell in table[0])
    rows = []
    for row in table[1:]:
        mark = ' class="best"' if best is not None and row[0] == str(best) else ""
        rows.append(f"<tr{mark}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>")
    return f'<div class="scroll"><table><thead><tr>{header}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def draw_image(report: Report, draw: Any) -> str:
    """Return a plot as an image that carries its own data."""
    data = base64.b64encode(make_svg(report, draw)).decode()
    return f'<figure><img alt="{escape((draw.__doc__ or "").rstrip("."))}" src="data:image/svg+xml;base64,{data}"></figure>'


def make_svg(report: Report, draw: Any) -> bytes:
    """Return a plot as SVG; it has no background, and grey text, for light and dark pages."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(
        {"text.color": GREY, "axes.labelcolor": GREY, "axes.edgecolor": GREY, "xtick.color": GREY, "ytick.color": GREY, "font.size": 11}
    ):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        draw(report, axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3, axis="y")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return buffer.getvalue()


def draw_speedup(report: Report, axes: Any) -> None:
    """Speedup against draft length, measured with its range, and predicted."""
    rows = report.single
    lengths, medians = [row.draft_len for row in rows], [row.speedup.median for row in rows]
    errors = [[row.speedup.median - row.speedup.min for row in rows], [row.speedup.max - row.speedup.median for row in rows]]
    axes.errorbar(lengths, medians, errors, marker="o", capsize=3, color=COLORS[0], label="measured")
    axes.plot(
        lengths, [row.decode_speedup.median for row in rows], marker="s", markersize=4, color=COLORS[2], label="measured, decode only"
    )
    if any(row.predicted_speedup is not None for row in rows):
        predicted = [float("nan") if row.predicted_speedup is None else row.predicted_speedup for row in rows]
        axes.plot(lengths, predicted, "--", marker="x", color=COLORS[1], label="predicted")
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set(xlabel="draft length", ylabel="speedup over plain", xticks=lengths)
    axes.set_ylim(bottom=0)


def draw_acceptance(report: Report, axes: Any) -> None:
    """Acceptance by position, of the rounds that accepted all before it, for the longest draft."""
    rates = report.longest.acceptance_by_position
    axes.bar(range(1, len(rates) + 1), rates, color=COLORS[0])
    for position, rate in enumerate(rates, start=1):
        axes.text(position, rate + 0.02, f"{rate:.2f}", ha="center", fontsize=9)
    axes.set(xlabel=f"position in a draft of {report.longest.draft_len}", ylabel="accepted, given all before", ylim=(0, 1.1))
    axes.set_xticks(range(1, len(rates) + 1))


def draw_split(report: Report, axes: Any) -> None:
    """Where the time of a round goes: draft, target, loop."""
    rows = [row for row in report.single if row.split_seconds is not None]
    below = [0.0] * len(rows)
    for part, color in zip(("target", "draft", "loop"), COLORS, strict=False):
        heights = [1e3 * (row.split_seconds or {})[part] for row in rows]
        axes.bar([row.draft_len for row in rows], heights, bottom=below, color=color, label=part)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.set(xlabel="draft length", ylabel="ms per round", xticks=[row.draft_len for row in rows])


def draw_batches(report: Report, axes: Any) -> None:
    """Speedup against draft length at every batch, predicted dashed, measured solid."""
    lengths = report.settings.draft_lens
    for batch, color in zip(report.settings.batches, COLORS, strict=False):
        if batch in report.predictions:
            values = [float("nan") if value is None else value for value in (report.predictions[batch][length] for length in lengths)]
            axes.plot(lengths, values, "--", marker="x", color=color, label=f"batch {batch}, predicted")
        rows = [row for row in report.rows if row.batch == batch]
        if rows and (batch > 1 or len({row.batch for row in report.rows}) > 1):
            axes.plot(lengths, [row.speedup.median for row in rows], marker="o", color=color, label=f"batch {batch}, measured")
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.set(xlabel="draft length", ylabel="speedup over plain", xticks=lengths)
    axes.set_ylim(bottom=0)
