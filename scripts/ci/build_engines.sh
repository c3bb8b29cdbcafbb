#!/usr/bin/env bash
# A pair's engines in continuous integration: one subcommand a step, on any CI system (github-actions.yml beside this calls them).
# usage: scripts/ci/build_engines.sh SUBCOMMAND CONFIG
#   checkpoints  check, convert, quantize; put both quantized checkpoints into STORE            any machine
#   key          print the digest of what the engines are built from                            any machine
#   container    print the image that builds and serves them, by digest where CONFIG.lock has one
#   engines      build both, unless STORE has those of this key and machine; package            a GPU machine (onnx-cpu: any)
#   verify       serve the repository and compare speculative with plain decoding               the same machine
#   publish      pack what was verified into STORE/published, with its digest and report        the same machine
#   all          these steps in order
# STORE (default build/ci) is what goes from machine to machine, and what is kept between runs.
# KEY, COMPUTE_CAPABILITY: refuse checkpoints of another key, a GPU of another kind. HTTP_PORT, GRPC_PORT, METRICS_PORT as in demo.sh.
# Where CONFIG.lock exists every stage is held to it.
set -euo pipefail

here="$(cd "$(dirname "$0")" && pwd)"
store="${STORE:-build/ci}"

say() { echo "$*" >&2; }
die() { say "Error: $*"; exit 1; }
usage() { sed -n '3,10s/^# //p' "$0" >&2; exit 2; }
fact() { python3 "$here/pair_facts.py" "$1" "$config"; }
stage() { specbuild "$1" "$config" "${locked[@]}"; }

# Copy a directory to a place that has either the whole of it or what was there before; hard links where the file system has them.
copy() {
    local from="$1" to="$2"
    mkdir -p "$(dirname "$to")"
    rm -rf "$to.partial"
    cp -al "$from" "$to.partial" 2>/dev/null || { rm -rf "$to.partial"; cp -a "$from" "$to.partial"; }
    rm -rf "$to"
    mv "$to.partial" "$to"
}

make_checkpoints() {
    local role
    specbuild check "$config" >&2
    stage convert
    stage quantize
    for role in target draft; do
        copy "$workdir/$role/quantized" "$store/checkpoints/$role/quantized"
    done
    key="$(fact key)"
    say "checkpoints of key $key are in $store/checkpoints"
}

# Sets key and machine, and takes the checkpoints from STORE: on a GPU machine they come from there.
open_machine() {
    local role
    for role in target draft; do
        [ ! -d "$store/checkpoints/$role/quantized" ] || copy "$store/checkpoints/$role/quantized" "$workdir/$role/quantized"
    done
    key="$(fact key)"
    machine="$(fact machine)"
    [ "${KEY:-$key}" = "$key" ] || die "Cannot use the checkpoints in $store: their key is $key, expected $KEY. Take those of this run."
    case "$machine" in
        any | "cc${COMPUTE_CAPABILITY:-}"*) ;;
        *) die "Cannot build here: the GPU is $machine, expected compute capability $COMPUTE_CAPABILITY. Use another runner." ;;
    esac
}

make_engines() {
    local kept role
    open_machine
    kept="$store/engines/$key-$machine"
    if [ -d "$kept" ]; then
        say "engines of key $key for $machine are in $kept: nothing is built"
        for role in target draft; do
            copy "$kept/$role/engine" "$workdir/$role/engine"
        done
    else
        say "no engines of key $key for $machine yet: building them"
        stage build
        rm -rf "$kept.new"
        for role in target draft; do
            copy "$workdir/$role/engine" "$kept.new/$role/engine"
        done
        mv "$kept.new" "$kept"
    fi
    stage package
}

# What was verified is a repository: the same engines packaged otherwise are to be verified again.
report_path() {
    [ -f "$workdir/model_repository/specbuild.json" ] || die "Cannot find $workdir/model_repository. Run \`engines\` first."
    echo "$store/verified/$(sha256sum <"$workdir/model_repository/specbuild.json" | cut -c1-16).json"
}

verify_served() {
    local http="${HTTP_PORT:-8000}" grpc="${GRPC_PORT:-8001}" metrics="${METRICS_PORT:-8002}" report
    report="$(report_path)"
    log="$(mktemp)"
    mkdir -p "$store/verified"
    rm -f "$report"
    specbuild serve "$config" --http-port "$http" --grpc-port "$grpc" --metrics-port "$metrics" >"$log" 2>&1 &
    server=$!
    trap 'kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; rm -f "$log"' EXIT
    until grep -q '^ready:' "$log"; do
        kill -0 "$server" 2>/dev/null || { tail -n 5 "$log" >&2; die "Cannot verify: the repository cannot be served here, see above."; }
        sleep 0.2
    done
    if specbuild verify "$config" --url "localhost:$grpc" --json >"$report.partial"; then
        mv "$report.partial" "$report"
        say "verified: $report"
    else
        cat "$report.partial" >&2
        die "Cannot publish: speculative decoding is not the target's own, see above."
    fi
    kill "$server"
    wait "$server" || true
    trap - EXIT
    rm -f "$log"
}

# The archive is the same for the same repository: order, times and owners are set.
publish() {
    local out name report
    open_machine
    report="$(report_path)"
    [ -f "$report" ] || die "Cannot publish $workdir/model_repository: it was not verified as it is now. Run \`verify\` first."
    out="$store/published"
    name="$(fact name)-$key-$machine"
    mkdir -p "$out"
    tar -C "$workdir" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --hard-dereference -cf "$out/$name.tar.partial" model_repository
    mv "$out/$name.tar.partial" "$out/$name.tar"
    cp "$report" "$out/$name.verify.json"
    (cd "$out" && sha256sum "$name.tar" "$name.verify.json" >"$name.sha256")
    say "published: $out/$name.tar"
}

[ $# -eq 2 ] || usage
config="$2"
locked=()
[ ! -f "$config.lock" ] || locked=(--locked)
case "$1" in checkpoints | engines | verify | publish | all) workdir="$(fact workdir)" ;; esac
case "$1" in
    checkpoints) make_checkpoints ;;
    key | container) fact "$1" ;;
    engines) make_engines ;;
    verify) verify_served ;;
    publish) publish ;;
    all)
        make_checkpoints
        make_engines
        verify_served
        publish
        ;;
    *) usage ;;
esac
