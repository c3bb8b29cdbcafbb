"""Triton's entry into specbuild.triton.speculative."""

import json
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from specbuild.triton.speculative import SpeculativeModel


class TritonPythonModel:
    """Ids in, text out, in as many responses as there are rounds."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer that lies beside this file, and the settings in config.pbtxt."""
        parameters = json.loads(args["model_config"])["parameters"]
        self.model = SpeculativeModel(pb_utils, Path(args["model_repository"]) / args["model_version"], parameters)

    def execute(self, requests: list[Any]) -> None:
        """Begin each request; the answers go through the response senders."""
        for request in requests:
            self.model.submit(request)

    def finalize(self) -> None:
        """Stop what still runs."""
        self.model.close()
