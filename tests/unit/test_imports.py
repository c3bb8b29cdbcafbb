"""Imports go one way, and heavy libraries are imported only where they belong."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import specbuild

PACKAGE = Path(specbuild.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
LAYERS = ["errors", "base", "parts", "stages", "cli"]  # a layer imports only itself and those before it
PARTS = {"families", "hf_formats", "quant", "compilers", "triton", "spec"}
BASE = {"artifacts", "config", "shape", "picklefile", "tensorfile", "tllm_config", "ranks", "rotary", "provenance", "progress", "__init__"}
MAY_USE_SPEC = {"compilers", "triton"}
OWNERS = {
    "torch": {"tensorfile", "picklefile", "ranks", "hf_formats", "packed", "convert", "quantize", "quant", "compilers",
              "decoder", "calibration", "quality", "acceptance", "dequantized", "verify_transformers"},
    "modelopt": {"quant"},
    "matplotlib": {"bench_report", "quality", "planning"},
    "transformers": {"compilers", "dequantized", "verify_transformers"},
    "onnx": {"compilers"},
    "onnxruntime": {"compilers"},
    "tritonclient": {"triton"},
    "pytriton": {"triton"},
    "huggingface_hub": {"artifacts"},
}  # fmt: skip


def room(module: str) -> str:
    """The room of a dotted module below specbuild: its folder, or its own name."""
    return module.split(".")[0]


def layer(name: str) -> str:
    if name == "errors":
        return "errors"
    if name in BASE:
        return "base"
    if name in PARTS or name in {"text", "tokenizer", "decoder"}:
        return "parts"
    return "cli" if name == "cli" else "stages"


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, for typing only) of every import."""
    tree = ast.parse(path.read_text())
    typing_only = {
        n for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) for n in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "specbuild" else [f"specbuild.{alias.name}" for alias in node.names]
            found += [(name, node in typing_only) for name in names]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    here = room(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    for module, _ in imports(path):
        if not module.startswith("specbuild."):
            continue
        there = room(module.removeprefix("specbuild."))
        if there.startswith("_"):
            continue
        assert LAYERS.index(layer(there)) <= LAYERS.index(layer(here)), f"{here} imports {there}"
        siblings = here in PARTS and there in PARTS and here != there
        assert not siblings or (here in MAY_USE_SPEC and there == "spec") or (here, there) == ("compilers", "quant"), (
            f"{here} imports its sibling {there}"
        )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_libraries_stay_with_their_owners(path: Path) -> None:
    here = room(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    for module, typing_only in imports(path):
        owners = OWNERS.get(module.split(".")[0])
        assert owners is None or typing_only or here in owners, f"{here} imports {module}"


def test_the_decoding_core_knows_numpy_alone() -> None:
    third_party = {module.split(".")[0] for path in (PACKAGE / "spec").glob("*.py") for module, _ in imports(path)}
    assert third_party - set(sys.stdlib_module_names) <= {"numpy", "specbuild"}
    assert not third_party & {"time", "datetime", "random"}


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["call", "--help"], ["check", "--help"]], ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    heavy = ("torch", "onnxruntime", "transformers", "tensorrt_llm", "onnx")
    code = (
        "import sys\nfrom specbuild.cli import cli\n"
        f"try:\n    cli.main({arguments!r})\nexcept SystemExit:\n    pass\n"
        f"sys.stderr.write(','.join(m for m in {heavy!r} if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == ""
