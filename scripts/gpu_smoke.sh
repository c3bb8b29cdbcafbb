#!/usr/bin/env bash
# The whole pipeline with compiler tensorrt on a GPU machine, unattended, in under 10 minutes: one JSON of results.
# usage: scripts/gpu_smoke.sh [--out DIR] [PAIR.yaml]      inside the pinned container, with specbuild installed in it
#   the demo pair, then PAIR, each: check, convert, quantize, build, package, serve, verify --url, bench --url; then, if time is left,
#   the demo with fast logits. DIR (default build/gpu_smoke) gets results.json, and every step's log.
#   --compiler onnx-cpu rehearses all of it on a machine without a GPU. Exit code 0 only if every step passed.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
# gpu_smoke.py keeps to a time of its own; this ends it, and with it all that it started, should it hang itself.
exec timeout --signal=TERM --kill-after=20 575 python3 "$here/gpu_smoke.py" "$@"
