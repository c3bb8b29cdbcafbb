"""Progress bars and log lines, on stderr; bars are off when stderr is not a terminal."""

from __future__ import annotations

import sys
from typing import Any

import click
from tqdm import tqdm


def log(message: str) -> None:
    """Print one line of progress to stderr."""
    click.echo(message, err=True)


def bar(label: str, total: int, unit: str) -> tqdm[Any]:
    """Return a progress bar for work of a known size; bytes are shown scaled."""
    return tqdm(desc=label, total=total, unit=unit, unit_scale=unit == "B", file=sys.stderr, disable=None, leave=False)
