"""The steps of the CI workflow, as it has them, on the demo pair: for real on the CPU, and with a fake trtllm-build for the GPU."""

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import fake_trtllm_build
import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = yaml.safe_load((ROOT / "scripts" / "ci" / "github-actions.yml").read_text())
DIGEST = f"sha256:{'a' * 64}"
H100 = "NVIDIA H100 80GB HBM3, 9.0, 575.57.08"
L4 = "NVIDIA L4, 8.9, 575.57.08"


class Machine:
    """A runner: a checkout with the pair's YAML, and the programs that it has."""

    def __init__(self, directory, pair, gpus=()):
        self.directory = directory
        directory.mkdir()
        (directory / "scripts").symlink_to(ROOT / "scripts")
        for path in pair.parent.glob("pair.yaml*"):
            shutil.copy(path, directory)
        bin_dir = fake_trtllm_build.install(directory / "programs", gpus=gpus, builder=bool(gpus))
        code = "from specbuild.cli import main; main()"
        fake_trtllm_build.write_program(bin_dir / "specbuild", f'#!/bin/sh\nexec "{sys.executable}" -c "{code}" "$@"\n')
        ports = dict(zip(("HTTP_PORT", "GRPC_PORT", "METRICS_PORT"), free_ports(), strict=True))
        self.env = {**os.environ, **WORKFLOW["env"], **ports, "PATH": f"{bin_dir}:/usr/bin:/bin"}
        for name in ("CUDA_VISIBLE_DEVICES", "SPECBUILD_CONTAINER_DIGEST"):
            self.env.pop(name, None)

    @property
    def store(self):
        return self.directory / WORKFLOW["env"]["STORE"]

    def run(self, command, code=0, **env):
        """Run a line of shell as a step does."""
        done = subprocess.run(
            ["bash", "-e", "-c", command], cwd=self.directory, env={**self.env, **env}, capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout, done.stderr

    def script(self, subcommand, code=0, **env):
        return self.run(f'scripts/ci/build_engines.sh {subcommand} "$CONFIG"', code, **env)


def free_ports():
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [str(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def write_pair(directory, compiler):
    """The demo pair for a compiler; quality is measured elsewhere."""
    values = yaml.safe_load((ROOT / "configs" / "demo.yaml").read_text())
    for role in ("target", "draft"):
        values[role]["model"] = str(ROOT / "configs" / values[role]["model"])
        values[role]["quantize"]["quality"] = {"samples": 0}
    values["build"]["compiler"] = compiler
    (directory / "pair.yaml").write_text(yaml.safe_dump(values))
    return directory / "pair.yaml"


def runs_of(job):
    """The shell of a job's own steps, without the installation."""
    return [step["run"] for step in WORKFLOW["jobs"][job]["steps"] if "run" in step and "pip" not in step["run"]]


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    """The CPU job's machine after its steps, and its outputs; the pair is locked, with the container's digest."""
    directory = tmp_path_factory.mktemp("ci")
    pair = write_pair(directory, "tensorrt")
    machine = Machine(directory / "cpu", pair)
    machine.run(f'specbuild lock "$CONFIG" --container-digest {DIGEST}')
    output = directory / "github-output"
    for run in runs_of("checkpoints"):
        machine.run(run, GITHUB_OUTPUT=str(output))
    machine.outputs = dict(line.split("=", 1) for line in output.read_text().splitlines())
    return machine


@pytest.fixture
def gpu(cpu, tmp_path):
    """Return make(name, gpu): a GPU job's machine that has got the checkpoints, and the engines kept for it if there are any."""

    def make(name, gpus=(H100,), kept=None):
        machine = Machine(tmp_path / name, cpu.directory / "pair.yaml", gpus)
        shutil.copytree(cpu.store / "checkpoints", machine.store / "checkpoints")  # what the artifact carries
        if kept is not None:
            shutil.copytree(kept.store / "engines", machine.store / "engines")  # what the cache carries
        machine.env |= {"KEY": cpu.outputs["key"], "COMPUTE_CAPABILITY": "9.0"}
        return machine

    return make


def test_the_cpu_job_gives_the_key_the_pinned_image_and_two_quantized_checkpoints(cpu):
    assert cpu.outputs.keys() == set(WORKFLOW["jobs"]["checkpoints"]["outputs"])
    assert cpu.outputs["container"] == f"nvcr.io/nvidia/tritonserver:25.10-trtllm-python-py3@{DIGEST}"
    for role in ("target", "draft"):
        assert (cpu.store / "checkpoints" / role / "quantized" / "rank0.safetensors").exists()


def test_the_key_is_the_same_on_another_machine_at_another_time_and_changes_with_what_engines_are_built_from(cpu, tmp_path):
    other = Machine(tmp_path / "other", cpu.directory / "pair.yaml")
    shutil.copytree(cpu.directory / "build" / "demo", other.directory / "build" / "demo", copy_function=shutil.copyfile)
    assert other.script("key")[0].strip() == cpu.outputs["key"]
    pair = other.directory / "pair.yaml"
    values = yaml.safe_load(pair.read_text())
    pair.write_text(yaml.safe_dump({**values, "speculation": {**values["speculation"], "draft_len": 3}}))
    assert other.script("key")[0].strip() == cpu.outputs["key"]  # no engine depends on it
    pair.write_text(yaml.safe_dump({**values, "build": {**values["build"], "max_batch_size": 4}}))
    assert other.script("key")[0].strip() != cpu.outputs["key"]
    pair.write_text(yaml.safe_dump(values))
    weights = other.directory / "build" / "demo" / "draft" / "quantized" / "rank0.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    assert other.script("key")[0].strip() != cpu.outputs["key"]


def test_the_gpu_job_builds_once_per_key_and_machine_and_says_when_it_does_not(gpu, cpu):
    build, verify, publish = runs_of("engines")
    first = gpu("first")
    assert "building them" in first.run(build)[1]
    (kept,) = (first.store / "engines").iterdir()
    assert kept.name == f"{cpu.outputs['key']}-cc9.0-trtllm1.0.0-trt10.11.0.33"
    assert (first.directory / "build" / "demo" / "model_repository" / "ensemble" / "config.pbtxt").exists()

    second = gpu("second", kept=first)
    told = json.dumps({"do": "fail"})  # were it asked to build, it would fail
    err = second.run(build, FAKE_TRTLLM=told)[1]
    assert f"engines of key {cpu.outputs['key']} for cc9.0-trtllm1.0.0-trt10.11.0.33 are in" in err
    assert "nothing is built" in err
    assert (second.directory / "build" / "demo" / "model_repository" / "target").is_dir()

    # The fake engines cannot be served: the step says so, and what is not verified is not published.
    assert "Cannot verify: the repository cannot be served here" in second.run(verify, code=1)[1]
    assert "it was not verified as it is now. Run `verify` first" in second.run(publish, code=1)[1]
    assert not (second.store / "published").exists()


def test_another_gpu_generation_builds_its_own(gpu):
    first = gpu("first")
    first.script("engines")
    other = gpu("other", gpus=(L4,), kept=first)
    assert "expected compute capability 9.0" in other.script("engines", code=1)[1]
    assert "building them" in other.script("engines", COMPUTE_CAPABILITY="8.9")[1]
    assert len(list((other.store / "engines").iterdir())) == 2


def test_a_build_that_fails_leaves_nothing_that_looks_built(gpu):
    machine = gpu("machine")
    machine.script("engines", code=1, FAKE_TRTLLM=json.dumps({"do": "fail"}))
    assert not (machine.store / "engines").exists()
    assert "building them" in machine.script("engines")[1]


def test_checkpoints_of_another_run_and_a_pair_that_is_not_as_locked_are_refused(gpu):
    machine = gpu("machine")
    assert "expected 0000. Take those of this run" in machine.script("engines", code=1, KEY="0000")[1]
    pair = machine.directory / "pair.yaml"
    pair.write_text(pair.read_text().replace("draft_len: 4", "draft_len: 3"))
    assert "key speculation.draft_len is 3, locked 4" in machine.script("engines", code=1)[1]


@pytest.mark.triton
def test_all_steps_run_for_real_with_onnx_cpu(tmp_path):
    machine = Machine(tmp_path / "cpu", write_pair(tmp_path, "onnx-cpu"))
    machine.script("all")
    archive, digests, report = (next((machine.store / "published").glob(f"*{ending}")) for ending in (".tar", ".sha256", ".verify.json"))
    values = json.loads(report.read_text())
    assert (values["prompts"], values["identical"], values["mismatches"]) == (20, 20, 0)
    assert dict(reversed(line.split()) for line in digests.read_text().splitlines()) == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (archive, report)
    }
    with tarfile.open(archive) as tar:
        assert {"model_repository/ensemble/config.pbtxt", "model_repository/target/config.pbtxt"} <= set(tar.getnames())
        assert all(member.isfile() or member.isdir() for member in tar.getmembers())

    before = archive.read_bytes()
    assert "nothing is built" in machine.script("engines")[1]
    machine.script("publish")
    assert archive.read_bytes() == before

    # The same engines packaged otherwise are another repository: to be verified again.
    pair = machine.directory / "pair.yaml"
    pair.write_text(pair.read_text().replace("draft_len: 4", "draft_len: 3"))
    assert "nothing is built" in machine.script("engines")[1]
    assert "it was not verified as it is now" in machine.script("publish", code=1)[1]
