"""scripts/gpu_smoke.sh where there is no GPU: its control flow, with a specbuild, a trtllm-build and an nvidia-smi that are made up."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import fake_trtllm_build
import pytest
import yaml

from specbuild.check import check_pair
from specbuild.cli import cli
from specbuild.config import load_config

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_smoke.sh"
STAGES = ["check", "convert", "quantize", "build", "package"]
SERVED = ["serve", "verify", "bench", "stop"]
FAST = [("demo fast logits", step) for step in ("package", "serve", "verify", "stop")]
RESULTS = {"passed", "failed", "timed out", "left out"}
FIELDS = {
    "pair": str, "step": str, "result": str, "seconds": (int, float), "budget_seconds": (int, float), "exit_code": (int, type(None)),
    "command": str, "reason": str, "log_tail": list, "report": (dict, type(None)), "required": bool,
}  # fmt: skip

# Does what FAKE_SPECBUILD says of "<config's stem> <command>": fail, hang (with a child that hangs too), or exit at once where it serves.
SPECBUILD = """
import json, os, signal, subprocess, sys, time
command, config = sys.argv[1], os.path.basename(sys.argv[2]).removesuffix(".yaml")
do = json.loads(os.environ.get("FAKE_SPECBUILD", "{}")).get(f"{config} {command}")
with open(os.environ["FAKE_CALLS"], "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
sys.stderr.write(f"log of {command}\\n")
if do == "fail":
    sys.exit("Error: Cannot do it: a reason.")
if do == "hang":
    child = subprocess.Popen(["sleep", "600"])
    with open(os.environ["FAKE_CALLS"] + ".pids", "a") as pids:
        pids.write(f"{os.getpid()} {child.pid}\\n")
    time.sleep(600)
if command == "serve":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3 if do == "bad stop" else 0))
    print("ready: here", flush=True)
    time.sleep(600)
if "--json" in sys.argv:
    print(json.dumps({"command": command}))
"""


@pytest.fixture
def smoke(tmp_path, monkeypatch):
    """Return run(*arguments, told=..., **machine): (exit code, results, stderr)."""
    monkeypatch.setenv("FAKE_CALLS", str(tmp_path / "calls"))

    def prepare(told=None, **facts):
        bin_dir = fake_trtllm_build.install(tmp_path / "machine", **facts)
        fake_trtllm_build.write_program(bin_dir / "specbuild", f"#!{sys.executable}\n{SPECBUILD}")
        monkeypatch.setenv("PATH", f"{bin_dir}:/usr/bin:/bin")
        monkeypatch.setenv("FAKE_SPECBUILD", json.dumps(told or {}))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def run(*arguments, told=None, **facts):
        prepare(told, **facts)
        command = [str(SCRIPT), "--out", "out", *map(str, arguments)]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, json.loads((tmp_path / "out" / "results.json").read_text()), done.stderr

    run.prepare = prepare
    return run


def steps(results, *fields):
    return [tuple(step[field] for field in ("pair", "step", *fields)) for step in results["steps"]]


def of(results, pair, name):
    return next(step for step in results["steps"] if (step["pair"], step["step"]) == (pair, name))


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_every_step_passes_and_is_in_the_results(smoke, tmp_path, write_pair_yaml):
    code, results, _ = smoke(write_pair_yaml(tmp_path))
    wanted = [("machine", "preflight"), *((pair, step) for pair in ("demo", "yours") for step in [*STAGES, *SERVED]), *FAST]
    assert steps(results, "result") == [(*step, "passed") for step in wanted]
    assert (code, results["passed"], results["finished"], results["schema"]) == (0, True, True, 1)
    assert results["machine"]["gpu"] == "NVIDIA H100 80GB HBM3"
    assert results["machine"]["tensorrt_llm"] == "1.0.0"
    for step in results["steps"]:
        assert step.keys() == FIELDS.keys()
        assert all(isinstance(step[name], kind) for name, kind in FIELDS.items()), step
        assert step["result"] in RESULTS
    assert of(results, "yours", "verify")["report"] == {"command": "verify"}
    assert of(results, "demo", "build")["log_tail"] == ["log of build"]
    assert sum(step["budget_seconds"] for step in results["steps"] if step["pair"] == "demo") < 1200


def test_every_command_that_it_runs_is_one_that_specbuild_takes(smoke, tmp_path, write_pair_yaml):
    smoke(write_pair_yaml(tmp_path))
    calls = (tmp_path / "calls").read_text().splitlines()
    assert {call.split()[0] for call in calls} == {*STAGES, "serve", "verify", "bench"}
    for name, *arguments in map(shlex.split, calls):
        with cli.get_command(click.Context(cli), name).make_context(name, arguments):
            pass


def test_the_pairs_are_run_with_tensorrt_from_a_scratch_directory(smoke, tmp_path, write_pair_yaml):
    path = write_pair_yaml(tmp_path, speculation={"draft_len": 3})
    smoke(path)
    names = ("yours", "demo", "demo-fast-logits")
    yours, demo, fast = (yaml.safe_load((tmp_path / "out" / "work" / f"{name}.yaml").read_text()) for name in names)
    assert {values["build"]["compiler"] for values in (yours, demo, fast)} == {"tensorrt"}
    assert yours["workdir"] == str(tmp_path / "out" / "work" / "yours")
    assert demo["workdir"] == fast["workdir"] == str(tmp_path / "out" / "work" / "demo")
    assert (demo.get("serving"), fast["serving"]) == (None, {"fast_logits": True})
    assert Path(demo["target"]["model"]).is_absolute()
    assert (tmp_path / "calls").read_text().count("--draft-len 3") == 1


def test_the_variant_of_the_demo_is_one_that_tensorrt_takes(smoke, tmp_path):
    smoke()
    for name in ("demo", "demo-fast-logits"):
        check_pair(load_config(tmp_path / "out" / "work" / f"{name}.yaml"))


@pytest.mark.parametrize("failing", ["check", "build", "package"])
def test_a_failing_stage_leaves_out_what_needs_it_and_the_next_pair_goes_on(smoke, tmp_path, write_pair_yaml, failing):
    code, results, _ = smoke(write_pair_yaml(tmp_path), told={f"demo {failing}": "fail"})
    demo = {step["step"]: step for step in results["steps"] if step["pair"] == "demo"}
    later = [*STAGES, *SERVED][STAGES.index(failing) + 1 :]
    assert (demo[failing]["result"], demo[failing]["exit_code"]) == ("failed", 1)
    assert demo[failing]["log_tail"][-1] == "Error: Cannot do it: a reason."
    assert {(step, demo[step]["result"], demo[step]["reason"]) for step in later} == {
        (step, "left out", f"{failing} did not pass") for step in later
    }
    assert of(results, "yours", "bench")["result"] == "passed"
    assert (code, results["passed"], results["finished"]) == (1, False, True)


@pytest.mark.parametrize(
    ("told", "results_of"),
    [
        ({"demo serve": "fail"}, {"serve": "failed", "verify": "left out", "bench": "left out", "stop": "left out"}),
        ({"demo verify": "fail"}, {"serve": "passed", "verify": "failed", "bench": "passed", "stop": "passed"}),
        ({"demo serve": "bad stop"}, {"serve": "passed", "verify": "passed", "bench": "passed", "stop": "failed"}),
    ],
    ids=["serve fails", "verify fails", "the server ends badly"],
)
def test_what_fails_while_serving_is_named(smoke, told, results_of):
    code, results, _ = smoke(told=told)
    assert {step["step"]: step["result"] for step in results["steps"] if step["pair"] == "demo" and step["step"] in SERVED} == results_of
    assert (code, results["passed"]) == (1, False)


def test_a_hanging_step_is_ended_with_its_children(smoke, tmp_path):
    code, results, _ = smoke("--step-seconds", 3, told={"demo build": "hang"})
    build = of(results, "demo", "build")
    assert (build["result"], build["exit_code"], build["budget_seconds"]) == ("timed out", None, 3)
    assert 3 <= build["seconds"] < 8
    assert code == 1
    assert not [pid for pid in (tmp_path / "calls.pids").read_text().split() if is_running(pid)]


def test_a_server_that_is_never_ready_is_ended(smoke, tmp_path):
    _, results, _ = smoke("--step-seconds", 3, told={"demo serve": "hang"})
    assert of(results, "demo", "serve")["result"] == "timed out"
    assert of(results, "demo", "verify")["reason"] == "serve did not pass"
    assert not [pid for pid in (tmp_path / "calls.pids").read_text().split() if is_running(pid)]


def test_steps_that_find_no_time_left_are_left_out(smoke, tmp_path, write_pair_yaml):
    code, results, _ = smoke("--budget", 5, write_pair_yaml(tmp_path), told={"demo build": "hang"})
    assert of(results, "demo", "build")["result"] == "timed out"
    assert (of(results, "yours", "check")["result"], of(results, "yours", "check")["reason"]) == ("left out", "no time is left")
    assert (code, results["passed"], results["seconds"] < 10) == (1, False, True)


def test_fast_logits_need_not_pass(smoke):
    code, results, _ = smoke(told={"demo-fast-logits serve": "fail"})
    assert of(results, "demo fast logits", "serve")["result"] == "failed"
    assert (code, results["passed"]) == (0, True)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [({"gpus": ()}, "no NVIDIA GPU"), ({"builder": False}, "no trtllm-build on PATH"), ({"version": "1.3.0"}, "removed upstream in 1.3")],
    ids=["no GPU", "no builder", "B-06 a version without engines"],
)
def test_a_machine_that_cannot_is_said_at_once(smoke, tmp_path, facts, reason):
    code, results, _ = smoke(**facts)
    (preflight,) = results["steps"]
    assert preflight["result"] == "failed"
    assert reason in preflight["reason"]
    assert (code, results["passed"], (tmp_path / "calls").exists()) == (1, False, False)


def test_a_yaml_that_does_not_load_is_a_failed_step(smoke, tmp_path):
    (tmp_path / "pair.yaml").write_text("name: x\n")
    code, results, _ = smoke(tmp_path / "pair.yaml")
    assert "key target is missing" in of(results, "yours", "config")["reason"]
    assert of(results, "demo", "bench")["result"] == "passed"
    assert code == 1


def test_an_interrupted_run_leaves_results_and_nothing_running(smoke, tmp_path):
    smoke.prepare({"demo build": "hang"})
    process = subprocess.Popen([str(SCRIPT), "--out", "out"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "calls.pids").exists() or not (tmp_path / "calls.pids").read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(30) != 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert (results["passed"], results["finished"], of(results, "demo", "quantize")["result"]) == (False, False, "passed")
    assert not [pid for pid in (tmp_path / "calls.pids").read_text().split() if is_running(pid)]


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path):
    done = subprocess.run([str(SCRIPT), "absent.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "absent.yaml is no file" in done.stderr) == (2, True)
