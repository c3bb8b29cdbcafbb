"""What a machine has for TensorRT: its GPUs and its TensorRT-LLM, found without importing it, and which of them can be used."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from specbuild.errors import EngineError
from specbuild.quant import QuantScheme

PINNED = "1.0.0"
OLDEST, NEWEST, REMOVED = (1, 0, 0), (1, 2, 1), (1, 3)
CONTAINER = "tritonserver:25.10-trtllm-python-py3"  # of NVIDIA's registry; it holds the pinned version
OTHER_WAY = "or set compiler: onnx-cpu, which needs no GPU"
IN_CONTAINER = f"in NVIDIA's container (`docker run --gpus all -it -v $PWD:/work -w /work {CONTAINER}`)"
_QUERY = ["--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
_VERSIONS = """
import importlib.metadata, json, os
def version(*names):
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
torch = version("torch") or ""
built_for = torch.rsplit("+cu", 1)[1] if "+cu" in torch else ""
cuda = os.environ.get("CUDA_VERSION") or (built_for[:-1] + "." + built_for[-1:] if built_for else None)
print(json.dumps([version("tensorrt_llm"), version("tensorrt", "tensorrt_cu12", "tensorrt_cu13"), cuda]))
"""


@dataclass(frozen=True)
class Machine:
    """What an engine depends on, as strings: it loads only where all of it is the same."""

    tensorrt_llm: str
    tensorrt: str
    cuda: str
    driver: str
    gpu: str
    compute_capability: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def find_machine() -> Machine:
    """Return what this machine has; raise EngineError that says what is missing, and the two ways on."""
    executable = shutil.which("trtllm-build")
    version, tensorrt, cuda = find_versions(executable)
    if version is not None:
        check_version(version)
    gpus = find_gpus()
    missing = [] if gpus else ["no NVIDIA GPU (nvidia-smi lists none)"]
    missing += [] if executable else ["no trtllm-build on PATH"]
    missing += ["a trtllm-build whose Python has no tensorrt_llm"] if executable and version is None else []
    if missing:
        raise EngineError(
            f"Cannot use compiler tensorrt on this machine: it has {' and '.join(missing)}, expected a GPU and TensorRT-LLM {PINNED}. Run "
            f"it on a GPU machine {IN_CONTAINER}, {OTHER_WAY}."
        )
    name, compute_capability, driver = gpus[0]
    return Machine(str(version), tensorrt or "unknown", cuda or "unknown", driver, name, compute_capability)


def find_gpus() -> list[tuple[str, str, str]]:
    """Return (name, compute capability, driver) of each visible GPU, by nvidia-smi; none where it is absent or fails."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return []
    chosen = [f"--id={visible}"] if visible and re.fullmatch(r"\d+(,\d+)*", visible) else []
    try:
        done = subprocess.run(["nvidia-smi", *chosen, *_QUERY], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    return [(row[0], row[1], row[2]) for row in rows if len(row) == 3 and re.fullmatch(r"\d+\.\d+", row[1])]


def find_versions(executable: str | None) -> list[str | None]:
    """Return the versions of TensorRT-LLM, TensorRT and CUDA that trtllm-build's own Python has (without one: the first on PATH)."""
    python = _python_of(Path(executable)) if executable else shutil.which("python3")
    try:
        done = subprocess.run([str(python), "-c", _VERSIONS], capture_output=True, text=True, check=True, timeout=60)
        versions: list[str | None] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return [None, None, None]
    return versions


def _python_of(script: Path) -> str | None:
    """Return the interpreter of a console script: its first line's, else the one beside it, else the first on PATH."""
    with script.open("rb") as file:
        line = file.readline(500).decode(errors="replace").strip()
    if line.startswith("#!") and "python" in line and " " not in line:
        return line[2:]
    beside = script.parent / "python3"
    return str(beside) if beside.exists() else shutil.which("python3")


def check_version(version: str) -> None:
    """Raise EngineError for a TensorRT-LLM that is not accepted; from 1.3 on it has no engine builder at all."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
    if OLDEST <= numbers <= NEWEST:
        return
    found = f"Cannot use TensorRT-LLM {version}: "
    if numbers >= REMOVED:
        found += "the engine path was removed upstream in 1.3 (July 2026), expected 1.0.0 to 1.2.1."
    else:
        found += "expected 1.0.0 to 1.2.1, the versions whose builder and engine format are known."
    raise EngineError(f"{found} Run {IN_CONTAINER}, {OTHER_WAY}.")


def check_gpu(machine: Machine, scheme: QuantScheme) -> None:
    """Raise EngineError for a GPU whose generation cannot run the scheme, or drafted tokens at all."""
    sm = int(machine.compute_capability.replace(".", ""))
    what = f"{machine.gpu} (SM {sm})"
    if sm < 80:
        raise EngineError(
            f"Cannot build for {what}: verifying drafted tokens needs SM 80 or later (A100, A10, L4, H100, H200 and others). Use such "
            f"a GPU, {OTHER_WAY}."
        )
    if 100 <= sm < 120 and scheme.bits < 16:
        raise EngineError(
            f"Cannot build {scheme.name} for {what}: TensorRT-LLM refuses INT4 and INT8 weights on SM 100 to 119. Use scheme full_prec, "
            "or a GPU of SM 80 to 90."
        )
