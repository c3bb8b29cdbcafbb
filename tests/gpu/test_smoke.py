"""On a GPU machine, in the pinned container: the demo pair from its models to answers of TensorRT engines that Triton serves."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_smoke.sh"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("tensorrt_llm") is None, reason="needs tensorrt_llm and a GPU"),
]


@pytest.mark.timeout(620)
def test_the_demo_pair_is_built_served_and_verified(tmp_path):
    done = subprocess.run([SCRIPT, "--out", tmp_path / "smoke"], capture_output=True, text=True, timeout=610, check=False)
    results = json.loads((tmp_path / "smoke" / "results.json").read_text())
    failed = [(step["step"], step["result"], step["reason"], step["log_tail"]) for step in results["steps"] if step["result"] != "passed"]
    assert done.returncode == 0, failed
    verified = next(step["report"] for step in results["steps"] if (step["pair"], step["step"]) == ("demo", "verify"))
    assert verified["mismatches"] == 0
