"""Triton's entry into specbuild.triton.preprocess."""

from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from specbuild.triton.preprocess import PreprocessingModel


class TritonPythonModel:
    """Text in, ids out."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer that lies beside this file."""
        self.model = PreprocessingModel(pb_utils, Path(args["model_repository"]) / args["model_version"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request."""
        return [self.model.answer(request) for request in requests]
