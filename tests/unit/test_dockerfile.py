"""The Dockerfile: linted, pinned to the container whose engine format is known, without root, and building from what it is sent."""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specbuild.compilers.trtllm_machine import CONTAINER
from specbuild.deploying.deployment import LOAD_SECONDS, USER, WORK

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
STAGES = {match[2]: text for text in re.split(r"(?m)^(?=FROM )", TEXT)[1:] for match in [re.match(r"FROM (\S+) AS (\w+)", text)]}
IMAGES = {match[2]: match[1] for match in re.finditer(r"(?m)^FROM (\S+) AS (\w+)", TEXT)}


def run_hadolint(path):
    """Run hadolint as a user would; skips where its binary cannot run."""
    found = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        pytest.skip("hadolint is not installed: it is in the extra dev")
    try:
        subprocess.run([found, "--version"], capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"hadolint does not run on this machine: {error}")
    return subprocess.run([found, str(path)], capture_output=True, text=True, timeout=60)


def test_hadolint_finds_nothing():
    done = run_hadolint(ROOT / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("25.10-trtllm-python-py3 AS gpu", "latest AS gpu", "DL3007"),
        ("--no-cache-dir", "", "DL3042"),
        ("USER 10001", "USER root", "DL3002"),
    ],
)
def test_hadolint_would_find_a_fault(tmp_path, old, new, rule):
    assert old in TEXT
    (tmp_path / "Dockerfile").write_text(TEXT.replace(old, new))
    done = run_hadolint(tmp_path / "Dockerfile")
    assert done.returncode != 0
    assert rule in done.stdout


def test_the_targets_are_a_gpu_and_a_cpu_image_and_the_last_is_the_default():
    assert list(IMAGES) == ["gpu", "cpu"]
    assert IMAGES["gpu"] == f"nvcr.io/nvidia/{CONTAINER}"
    assert re.fullmatch(r"python:3\.1[0-2]\.\d+-slim-\w+", IMAGES["cpu"])


@pytest.mark.parametrize("stage", ["gpu", "cpu"])
def test_an_image_runs_without_root_and_tells_its_health(stage):
    text = STAGES[stage]
    users = re.findall(r"(?m)^USER (\S+)", text)
    assert users[-1] == str(USER)  # a number: Kubernetes cannot see that a name is not root
    assert f"--uid {USER} " in text
    assert f"WORKDIR {WORK}" in text
    assert re.search(r"(?m)^EXPOSE 8000 8001 8002$", text)
    assert "/v2/health/ready" in re.search(r"(?m)^HEALTHCHECK [^\n]*\n.*$", text)[0]
    compiler = {"gpu": "tensorrt", "cpu": "onnx-cpu"}[stage]
    assert f"--start-period={LOAD_SECONDS[compiler]}s" in text
    assert 'ENTRYPOINT ["specbuild"]' in text


def test_the_gpu_image_keeps_what_its_container_holds():
    install = re.search(r"(?s)RUN pip list.*?\n(?=\w)", STAGES["gpu"])[0]
    assert "--constraint /tmp/installed.txt" in install
    assert "scripts/constraints.txt" not in STAGES["gpu"]  # it names another torch
    assert "[cpu" not in install


def test_what_is_copied_is_there_and_is_sent():
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    sources = {word for line in re.findall(r"(?m)^COPY (.*) \S+$", TEXT) for word in line.split()}
    assert sources >= {"pyproject.toml", "pipeline", "model_repo", "README.md", "LICENSE"}
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in rules
    assert rules[0] == "*"
    for never in (".git", ".venv", "build", "tests"):
        assert not any(fnmatch.fnmatch(never, rule.removeprefix("!")) for rule in rules[1:])
