"""The steps of gpu_smoke.sh. results.json is written anew after every step, so it says how far a run came that was killed.

A step that fails, hangs or finds no time left is in it with the end of its log; what needs that step is left out, the next pair goes on.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

BUDGET = 540
GRACE = 15  # for a step that is told to end: a server unloads its models
TAIL = 20
DEMO = Path(__file__).parents[1] / "configs" / "demo.yaml"
BACKEND = Path("/opt/tritonserver/backends/tensorrtllm")
STAGES = {"check": 30, "convert": 120, "quantize": 120, "build": 240, "package": 30}  # seconds
READY, VERIFY, BENCH = 120, 90, 90
BENCH_OPTIONS = ["--batch", "1", "--runs", "2", "--max-tokens", "48"]  # about how fast it is; `specbuild bench` alone measures properly


@dataclass(frozen=True)
class Result:
    """A step. result: passed, failed, timed out, or left out (with a reason)."""

    pair: str
    step: str
    result: str
    seconds: float
    budget_seconds: float
    exit_code: int | None
    command: str
    reason: str = ""
    log_tail: list[str] = field(default_factory=list)
    report: Any = None  # what the step printed with --json
    required: bool = True


class Smoke:
    """A run: its directory, its time, and what came of the steps so far."""

    def __init__(self, out: Path, budget: float, most: float) -> None:
        self.out, self.budget, self.most = out, budget, most
        self.began, self.results = time.monotonic(), list[Result]()
        self.machine: dict[str, str] = {}
        for name in ("logs", "work"):
            shutil.rmtree(out / name, ignore_errors=True)
            (out / name).mkdir(parents=True)

    def left(self) -> float:
        return self.budget - (time.monotonic() - self.began)

    def passed(self) -> bool:
        return all(result.result == "passed" for result in self.results if result.required)

    def add(self, result: Result) -> bool:
        """Keep a result and write all; return whether the step passed."""
        self.results.append(result)
        print(f"{result.pair} {result.step}: {result.result} in {result.seconds:.1f} s {result.reason}".rstrip(), file=sys.stderr)
        self.write(finished=False)
        return result.result == "passed"

    def write(self, finished: bool) -> None:
        values = {
            "schema": 1, "finished": finished, "passed": finished and self.passed(), "seconds": round(time.monotonic() - self.began, 1),
            "budget_seconds": self.budget, "machine": self.machine, "steps": [asdict(result) for result in self.results],
        }  # fmt: skip
        partial = self.out / "results.json.partial"
        partial.write_text(json.dumps(values, indent=2) + "\n")
        partial.replace(self.out / "results.json")

    def run(self, pair: str, step: str, command: Sequence[str], seconds: float, required: bool = True) -> bool:
        """Run a command to its end, or to the end of its time."""
        seconds = min(seconds, self.most, self.left())
        if seconds < 1:
            return self.leave_out(pair, [step], "no time is left", required)
        began = time.monotonic()
        process, base = self.start(pair, step, command)
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
        result = "timed out" if code is None else "passed" if code == 0 else "failed"
        report = load_report(base.with_suffix(".out"))
        values = (time.monotonic() - began, seconds, code, shlex.join(command), "", self.tail(base), report, required)
        return self.add(Result(pair, step, result, *values))

    def start(self, pair: str, step: str, command: Sequence[str]) -> tuple[subprocess.Popen[bytes], Path]:
        """Start a command with its output in logs/; it ends with this process."""
        base = self.out / "logs" / f"{pair}-{step}".replace(" ", "-")
        with base.with_suffix(".out").open("wb") as out, base.with_suffix(".log").open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=log, start_new_session=True, preexec_fn=die_with_parent
            )
        return process, base

    def leave_out(self, pair: str, steps: Sequence[str], reason: str, required: bool = True) -> bool:
        for step in steps:
            self.add(Result(pair, step, "left out", 0, 0, None, "", reason, required=required))
        return False

    def tail(self, base: Path) -> list[str]:
        """Return the last lines of a step's log, or of its output where it logged nothing."""
        texts = (base.with_suffix(suffix).read_text(errors="replace").splitlines() for suffix in (".log", ".out"))
        return next(([line[:500] for line in lines[-TAIL:]] for lines in texts if lines), [])

    def run_stages(self, pair: str, config: Path) -> bool:
        """Run the stages of a pair up to its repository."""
        for index, (stage, seconds) in enumerate(STAGES.items()):
            if not self.run(pair, stage, ["specbuild", stage, str(config)], seconds):
                return self.leave_out(pair, [*list(STAGES)[index + 1 :], "serve", "verify", "bench", "stop"], f"{stage} did not pass")
        return True

    def run_served(self, pair: str, config: Path, asks: Mapping[str, tuple[Sequence[str], float]], required: bool = True) -> None:
        """Serve a pair's repository, run the commands that ask the server, and stop it."""
        http, grpc, metrics = free_ports()
        command = ["specbuild", "serve", str(config), "--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]
        seconds, began = min(READY, self.most, self.left()), time.monotonic()
        process, base = self.start(pair, "serve", command)
        try:
            while process.poll() is None and time.monotonic() - began < seconds and not is_ready(base):
                time.sleep(0.1)
            result = "failed" if process.poll() is not None else "passed" if is_ready(base) else "timed out"
            values = (time.monotonic() - began, seconds, process.poll(), shlex.join(command), "", self.tail(base), None, required)
            if not self.add(Result(pair, "serve", result, *values)):
                self.leave_out(pair, [*asks, "stop"], "serve did not pass", required)
                return
            for step, (words, budget) in asks.items():
                self.run(pair, step, ["specbuild", step, str(config), "--url", f"127.0.0.1:{grpc}", "--json", *words], budget, required)
        finally:
            began, code = time.monotonic(), end(process)
        values = (time.monotonic() - began, GRACE, code, "kill -TERM", "", self.tail(base), None, required)
        self.add(Result(pair, "stop", "passed" if code == 0 else "failed", *values))


def is_ready(base: Path) -> bool:
    """Tell whether `specbuild serve` has said that its server is ready."""
    return base.with_suffix(".out").read_bytes().startswith(b"ready: ")


def load_report(path: Path) -> Any:
    """Return the JSON object that a step printed, None if it printed something else."""
    try:
        return json.loads(path.read_text())
    except ValueError:
        return None


def end(process: subprocess.Popen[bytes]) -> int:
    """End a command and all of its group: SIGTERM, a grace time, SIGKILL; return its exit code."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def die_with_parent() -> None:
    """Ask the kernel to end this child when the process that started it ends (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def free_ports() -> list[str]:
    """Return three ports that nothing listens on now."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [str(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def write_variant(path: Path, out: Path, label: str, compiler: str, fast_logits: bool = False) -> Path:
    """Write a pair's YAML for this compiler, with its work in `out` and its paths absolute; quality is measured elsewhere."""
    values, base = yaml.safe_load(path.read_text()), path.absolute().parent
    for role in ("target", "draft"):
        model = values[role]
        for key in ("model", "merge_lora"):
            if (local := base / Path(str(model.get(key))).expanduser()).is_dir():
                model[key] = str(local)
        quantize = model.setdefault("quantize", {})
        quantize["quality"] = {"samples": 0}
        calibration = quantize.get("calibration")
        if calibration and calibration.get("data", "builtin") != "builtin":
            calibration["data"] = str(base / Path(calibration["data"]).expanduser())
    values["build"] = {**values.get("build", {}), "compiler": compiler}
    values["workdir"] = str(out.absolute() / "work" / label)
    if fast_logits:
        values["speculation"] = {**values.get("speculation", {}), "acceptance": "rejection", "drafter": "model"}
        values["serving"] = {**values.get("serving", {}), "fast_logits": True}
    variant = out / "work" / f"{label}{'-fast-logits' if fast_logits else ''}.yaml"
    variant.write_text(yaml.safe_dump(values, sort_keys=False))
    return variant


def check_machine(smoke: Smoke, compiler: str) -> bool:
    """Say what this machine has, and whether that is enough to begin."""
    from specbuild.compilers.trtllm_machine import find_machine
    from specbuild.errors import SpecbuildError
    from specbuild.provenance import find_version

    began, reason = time.monotonic(), ""
    smoke.machine = {
        "specbuild": find_version("specbuild"), "python": sys.version.split()[0], "torch": find_version("torch"),
        "container": os.environ.get("NVIDIA_TRITON_SERVER_VERSION", "unknown"), "compiler": compiler,
        "tritonserver": shutil.which("tritonserver") or "not on PATH",
    }  # fmt: skip
    if shutil.which("specbuild") is None:
        reason = "no specbuild on PATH: install it, or use the gpu image of the Dockerfile"
    elif compiler == "tensorrt":
        try:
            smoke.machine |= find_machine().to_dict()
            smoke.machine["backend"] = str(BACKEND) if BACKEND.is_dir() else "absent"
        except SpecbuildError as error:
            reason = str(error)
    values = (time.monotonic() - began, 60, None, "", reason)
    return smoke.add(Result("machine", "preflight", "failed" if reason else "passed", *values))


def run_pair(smoke: Smoke, label: str, path: Path, compiler: str) -> None:
    """Run a pair from its models to answers of a server."""
    from specbuild.config import load_config
    from specbuild.errors import SpecbuildError

    try:
        load_config(path)
        config = write_variant(path, smoke.out, label, compiler)
        draft_len = load_config(config).speculation.draft_len
    except SpecbuildError as error:
        smoke.add(Result(label, "config", "failed", 0, 0, None, "", str(error)))
        return
    if smoke.run_stages(label, config):
        smoke.run_served(label, config, {"verify": ([], VERIFY), "bench": ([*BENCH_OPTIONS, "--draft-len", str(draft_len)], BENCH)})


def run_fast_logits(smoke: Smoke, compiler: str) -> None:
    """Serve the demo's engines once more, with the draft's logits handed over inside the backend; it need not pass."""
    label = "demo fast logits"
    served = any((result.pair, result.step, result.result) == ("demo", "serve", "passed") for result in smoke.results)
    if compiler != "tensorrt" or not served:
        smoke.leave_out(label, ["package"], "only with tensorrt, where the demo was served", required=False)
        return
    config = write_variant(DEMO, smoke.out, "demo", compiler, fast_logits=True)
    if smoke.run(label, "package", ["specbuild", "package", str(config)], STAGES["package"], required=False):
        smoke.run_served(label, config, {"verify": (["--sampling", "--draws", "500"], VERIFY)}, required=False)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_smoke.sh")
    parser.add_argument("pair", nargs="?", type=Path, help="a YAML of your own")
    parser.add_argument("--out", type=Path, default=Path("build/gpu_smoke"), help="directory of results.json and logs")
    parser.add_argument("--compiler", choices=("tensorrt", "onnx-cpu"), default="tensorrt")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds in all")
    parser.add_argument("--step-seconds", type=float, default=BUDGET, help="most seconds of one step")
    options = parser.parse_args()
    if options.pair is not None and not options.pair.is_file():
        parser.error(f"{options.pair} is no file")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    smoke = Smoke(options.out, options.budget, options.step_seconds)
    try:
        if check_machine(smoke, options.compiler):
            run_pair(smoke, "demo", DEMO, options.compiler)
            if options.pair is not None:
                run_pair(smoke, "yours", options.pair, options.compiler)
            run_fast_logits(smoke, options.compiler)
        smoke.write(finished=True)
    except KeyboardInterrupt:
        smoke.leave_out("machine", ["the rest"], "interrupted")
        smoke.write(finished=False)
        return 130
    print(f"{'passed' if smoke.passed() else 'failed'}: {smoke.out / 'results.json'}", file=sys.stderr)
    return 0 if smoke.passed() else 1


if __name__ == "__main__":
    sys.exit(main())
