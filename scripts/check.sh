#!/usr/bin/env bash
# Format, lint (Python and Dockerfile), types, the budgets of the code's shape, and all tests.
# usage: scripts/check.sh [PYTEST ARGUMENTS]      (PYTHON may name the interpreter)
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
make_venv cpu,serve,calibrate,dev

ruff format --check pipeline model_repo scripts tests
ruff check pipeline model_repo scripts tests
mypy
hadolint Dockerfile
python scripts/code_shape.py pipeline model_repo
python -m pytest "$@"
