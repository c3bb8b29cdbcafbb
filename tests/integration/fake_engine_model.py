"""model.py of a fake engine, for a real server: specbuild's engine code over FakeRunner."""

import json

import triton_python_backend_utils as pb_utils
from fake_runner import FakeRunner

from specbuild.triton.engine_cpu import EngineModel, answer


class TritonPythonModel:
    def initialize(self, args):
        parameters = {k: v["string_value"] for k, v in json.loads(args["model_config"])["parameters"].items()}
        twist = 1.0 if parameters["role"] == "draft" else 0.0
        self.model = EngineModel(FakeRunner(twist=twist, seconds=0.002), parameters["role"], parameters["rule"])

    def execute(self, requests):
        return answer(pb_utils, self.model, requests)
