#!/usr/bin/env bash
# From the shipped pair to a streamed answer from Triton, and whether that answer is the target's own.
# usage: scripts/demo.sh      (PYTHON, HTTP_PORT, GRPC_PORT and METRICS_PORT may be set)
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/venv.sh
make_venv cpu,serve

http="${HTTP_PORT:-8000}" grpc="${GRPC_PORT:-8001}" metrics="${METRICS_PORT:-8002}"
log="$(mktemp)"

specbuild run configs/demo.yaml

specbuild serve configs/demo.yaml --http-port "$http" --grpc-port "$grpc" --metrics-port "$metrics" >"$log" 2>&1 &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; rm -f "$log"' EXIT
until grep -q '^ready:' "$log"; do
    kill -0 "$server" 2>/dev/null || { tail -n 5 "$log" >&2; exit 1; }
    sleep 0.1
done

python scripts/demo_report.py configs/demo.yaml --url "localhost:$grpc"
