"""specbuild plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from specbuild.cli.options import echo_json, json_option
from specbuild.planning.formula import (
    MAX_DRAFT_LEN,
    Row,
    check_alpha,
    check_cost_ratio,
    check_draft_len,
    constant_cost,
    find_best,
    make_table,
)
from specbuild.planning.hardware import GPUS

if TYPE_CHECKING:
    from specbuild.plan import BatchPlan, Plan
    from specbuild.planning.memory import MemoryPlan

_GB = 1e9


def read_batches(_ctx: click.Context, _param: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Read a list of batches; a usage error for anything else."""
    if text is None:
        return None
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise click.BadParameter(f"{text!r} is not a list of whole numbers above 0, like 1,4,16.")
    return tuple(dict.fromkeys(int(word) for word in words))


@click.command("plan")
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option("--gpu", type=click.Choice(list(GPUS)), help="The device to plan for; `cpu` is an assumed desktop.")
@click.option("--batch", "batches", callback=read_batches, help="Sequences decoded together, a list.  [default: 1,4,16,32]")
@click.option("--alpha", type=float, help="Share of drafted tokens that the target accepts.  [default with CONFIG: 0.7]")
@click.option("--measured", type=click.Path(path_type=Path), help="Acceptance, and c and v if there, as `verify --json` writes them.")
@click.option("--cost-ratio", type=float, help="Without CONFIG: time of a draft step over a target step.")
@click.option("--max-draft-len", type=int, help=f"Without CONFIG: the longest draft of the table.  [default: {MAX_DRAFT_LEN}]")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw speedup against draft length into this PNG.")
@json_option
def command(
    config: Path | None, gpu: str | None, batches: tuple[int, ...] | None, alpha: float | None, measured: Path | None,
    cost_ratio: float | None, max_draft_len: int | None, plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Plan memory and draft length before building.

    With CONFIG: from each model's config.json, does the pair fit on a GPU, which cache fractions does Triton get, and which draft
    length pays at which batch. Without: the formula alone, for verification as cheap as one step.

    --measured takes JSON with `acceptance_by_draft_len`, `acceptance_by_position` (given all before), `position_rates` or
    `acceptance`, and optionally `c`, `v` ({"1": 1.0, "2": 1.1}) and the `batch` they hold at: what `verify` and `bench` write.

    \b
    specbuild plan configs/demo.yaml --gpu cpu
    specbuild plan pair.yaml --gpu h100 --batch 1,8,32 --measured verify.json --plot plan.png
    specbuild plan --alpha 0.8 --cost-ratio 0.05
    """  # fmt: skip
    if alpha is not None and measured is not None:
        raise click.UsageError("Give one of --alpha and --measured.")
    if plot is not None:
        from specbuild.planning.picture import check_drawable

        check_drawable()
    if config is None:
        if alpha is None or cost_ratio is None or gpu or batches or measured:
            raise click.UsageError("Give CONFIG with --gpu, or --alpha with --cost-ratio and no CONFIG, --gpu, --batch or --measured.")
        plan_formula(alpha, cost_ratio, MAX_DRAFT_LEN if max_draft_len is None else max_draft_len, plot, as_json)
    elif gpu is None or cost_ratio is not None or max_draft_len is not None:
        raise click.UsageError(
            "With CONFIG give --gpu, and neither --cost-ratio nor --max-draft-len (build.max_draft_len bounds the table)."
        )
    else:
        plan_pair(config, gpu, batches, alpha, measured, plot, as_json)


def plan_formula(alpha: float, cost_ratio: float, max_draft_len: int, plot: Path | None, as_json: bool) -> None:
    """Print the bare formula's table."""
    ratio = check_cost_ratio(cost_ratio)
    table = make_table((check_alpha(alpha),), ratio, constant_cost, check_draft_len(max_draft_len))
    best = find_best(table)
    if plot is not None:
        from specbuild.planning.picture import draw_plan

        draw_plan({f"alpha {alpha:g}, c {cost_ratio:g}": table}, plot, "Speculative decoding by formula, verification as cheap as one step")
    if as_json:
        rows = [vars(row) for row in table]
        echo_json({"alpha": alpha, "cost_ratio": cost_ratio, "best_draft_len": best.draft_len, "speedup": best.speedup, "table": rows})
        return
    click.echo("\n".join(["draft length  tokens per round  speedup", *(format_row(row, best) for row in table)]))
    click.echo(format_choice(best))


def plan_pair(
    config: Path, gpu: str, batches: tuple[int, ...] | None, alpha: float | None, measured: Path | None, plot: Path | None, as_json: bool
) -> None:
    """Print the plan of a pair."""
    from specbuild.config import load_config
    from specbuild.plan import BATCHES, run_plan
    from specbuild.planning.measured import Measured, load_measured

    known = load_measured(measured) if measured else None if alpha is None else Measured((check_alpha(alpha),))
    plan = run_plan(load_config(config), GPUS[gpu], batches or BATCHES, known)
    if plot is not None:
        from specbuild.planning.picture import draw_plan

        draw_plan({f"batch {each.batch}": each.table for each in plan.batches}, plot, f"{config.stem} on {plan.gpu}")
    if as_json:
        echo_json(plan.to_dict())
    else:
        click.echo(format_plan(plan))


def format_plan(plan: Plan) -> str:
    """Return the plan as text: memory, one table over all batches, the choice for each, notes."""
    blocks = [plan.gpu, format_memory(plan.memory), format_speed(plan.batches)]
    choices = [f"batch {each.batch}: {format_choice(each.best)}" for each in plan.batches]
    return "\n".join([*blocks, *choices, *(f"note: {note}" for note in plan.notes)])


def format_memory(memory: MemoryPlan) -> str:
    """Return the memory of the shared device, in GB."""
    names = ("weights", "cache", "activations", "runtime", "total")
    lines = [f"{'GB':<12}" + "".join(f"{name:>13}" for name in names) + "    fraction   tokens in cache"]
    for role, model in memory.models.items():
        sizes = "".join(f"{getattr(model, name) / _GB:>13.2f}" for name in names)
        lines.append(f"{role:<12}{sizes}{'-' if model.fraction is None else f'{model.fraction:.3f}':>12}{model.cache_tokens:>18}")
    lines.append(
        f"needed {memory.needed / _GB:.2f} of {memory.total / _GB:.0f} GB, left {memory.left / _GB:.2f}; most whole sequences at once "
        f"{memory.max_concurrency}"
    )
    if any(model.fraction is not None for model in memory.models.values()):
        lines.append("fraction: kv_cache_free_gpu_mem_fraction; tokens in cache: max_tokens_in_paged_kv_cache, the same limit")
    return "\n".join(lines)


def format_speed(batches: tuple[BatchPlan, ...]) -> str:
    """Return one row per draft length, and tokens per round and speedup of each batch."""
    lines = [
        f"{'step, ms':<26}"
        + "".join(f"{f'{each.target_seconds * 1e3:.2f}, draft {each.draft_seconds * 1e3:.2f}':>22}" for each in batches),
        f"{'draft  tokens per round':<26}" + "".join(f"{f'S, batch {each.batch}':>22}" for each in batches),
    ]
    for rows in zip(*(each.table for each in batches), strict=True):
        marks = ["*" if row == each.best else " " for row, each in zip(rows, batches, strict=True)]
        cells = "".join(f"{f'{row.speedup:.2f}{mark}':>22}" for row, mark in zip(rows, marks, strict=True))
        lines.append(f"{rows[0].draft_len:>5}{rows[0].tokens_per_round:>18.2f}   {cells}")
    return "\n".join(lines)


def format_row(row: Row, best: Row) -> str:
    """Return a row of the bare formula's table."""
    return f"{row.draft_len:>12}  {row.tokens_per_round:>16.4f}  {row.speedup:>7.4f}{'  best' if row == best else ''}"


def format_choice(best: Row) -> str:
    """Say in a sentence which draft length to use."""
    if best.draft_len == 0:
        return "speculation does not pay, plain decoding is faster (draft length 0)"
    return f"draft {best.draft_len} tokens a round: {best.tokens_per_round:.2f} tokens per round, {best.speedup:.2f} times as fast"
