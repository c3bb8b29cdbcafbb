"""Triton's entry into specbuild.triton.engine_cpu."""

import json
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from specbuild.compilers.ort_runner import OrtRunner
from specbuild.triton.engine_cpu import EngineModel, answer


class TritonPythonModel:
    """Target or draft: sequences in, new ids out."""

    def initialize(self, args: dict[str, str]) -> None:
        """Open the engine that lies beside this file."""
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        engine_dir = Path(args["model_repository"]) / args["model_version"] / parameters["engine_dir"]
        runner = OrtRunner(engine_dir, max_slots=config["max_batch_size"], vocab_size=int(parameters["vocab_size"]))
        self.model = EngineModel(runner, parameters["role"], parameters["rule"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer all requests together."""
        return answer(pb_utils, self.model, requests)
