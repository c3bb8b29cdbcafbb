"""The planner's picture: speedup against draft length, a curve per batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from specbuild.errors import ConfigError
from specbuild.planning.formula import Row, find_best


def check_drawable() -> None:
    """Raise ConfigError when nothing can draw here."""
    if find_spec("matplotlib") is None:
        raise ConfigError("Cannot draw a plot: matplotlib is not installed. Run `pip install 'specbuild[bench]'`, or leave --plot out.")


def draw_plan(curves: Mapping[str, Sequence[Row]], path: Path, title: str) -> None:
    """Draw the speedup of each table over its draft lengths as a PNG, the best length of each marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for label, table in curves.items():
        (line,) = axes.plot([row.draft_len for row in table], [row.speedup for row in table], marker="o", markersize=3, label=label)
        best = find_best(table)
        axes.plot([best.draft_len], [best.speedup], marker="*", markersize=12, color=line.get_color())
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xlabel("draft length")
    axes.set_ylabel("speedup over plain decoding")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120, format="png")
