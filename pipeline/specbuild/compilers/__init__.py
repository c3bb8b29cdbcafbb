"""COMPILERS: the engine builders, one module and one row each; a module is imported when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from specbuild.compilers.compiler import Compiler, Limits, Runner
from specbuild.errors import ConfigError

COMPILERS: dict[str, str] = {
    "onnx-cpu": "specbuild.compilers.onnx_cpu",
    "tensorrt": "specbuild.compilers.tensorrt",
    "llmapi": "specbuild.compilers.llmapi",
}

__all__ = ["COMPILERS", "Compiler", "Limits", "Runner", "find_compiler"]


def find_compiler(name: str) -> Compiler:
    """Return a compiler by name; raise ConfigError with the list."""
    if name not in COMPILERS:
        raise ConfigError(f"Cannot build with compiler {name!r}: expected one of {', '.join(COMPILERS)}.")
    return cast(Compiler, import_module(COMPILERS[name]))
