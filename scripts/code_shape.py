#!/usr/bin/env python3
"""Print the shape of a Python tree against its budgets: length of functions and files, and what is annotated.

A function's length is its body without the docstring. usage: code_shape.py DIR...   exit 1 when a budget is passed
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

MAX_FUNCTION = 60
MAX_P90 = 35
MAX_FILE = 350
MAX_MODEL = 120  # a Triton model.py
MAX_VARIANT = 40  # a family that is a difference from another


def function_lengths(path: Path) -> list[tuple[int, str]]:
    """Return (body lines, where) of every function of a file."""
    lengths = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            lengths.append(((body[-1].end_lineno or 0) - body[0].lineno + 1, f"{path}:{node.lineno} {node.name}"))
    return lengths


def file_budget(path: Path) -> int:
    """Return how many lines a file may have."""
    if path.name == "model.py":
        return MAX_MODEL
    variant = path.parent.name == "families" and path.stem != "llama" and "\nFAMILY = " in path.read_text()
    return MAX_VARIANT if variant else MAX_FILE


def main(roots: list[str]) -> int:
    paths = sorted(path for root in roots for path in Path(root).rglob("*.py"))
    lengths = sorted((length for path in paths for length in function_lengths(path)), reverse=True)
    sizes = {path: len(path.read_text().splitlines()) for path in paths}
    p90 = lengths[len(lengths) // 10][0]
    breaches = [f"{n} lines: {where} (at most {MAX_FUNCTION})" for n, where in lengths if n > MAX_FUNCTION]
    breaches += [f"{n} lines: {path} (at most {file_budget(path)})" for path, n in sizes.items() if n > file_budget(path)]
    breaches += [f"p90 of functions is {p90} lines (at most {MAX_P90})"] if p90 > MAX_P90 else []
    print(f"{len(paths)} files, {sum(sizes.values())} lines, largest {max(sizes.values())}; {len(lengths)} functions: ", end="")
    print(f"median {lengths[len(lengths) // 2][0]}, p90 {p90}, max {lengths[0][0]} lines")
    print("\n".join(breaches) or "all budgets kept")
    return int(bool(breaches))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
