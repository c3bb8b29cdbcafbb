"""model.py of an engine that continues one token by a script, for a real server; it continues anything else as FakeRunner does."""

import json
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils
from fake_runner import FakeRunner

from specbuild.triton.engine_cpu import EngineModel, answer


class ScriptedRunner(FakeRunner):
    """Follows `scripts` (prompt token -> what comes behind it); a draft (`twist` not 0) errs at every third position."""

    def __init__(self, scripts, slow, twist):
        super().__init__(twist=twist, seconds=0.002)
        self.scripts, self.slow = scripts, slow

    def logits(self, tokens, n):
        tokens = list(tokens)
        if tokens[0] not in self.scripts:
            return super().logits(tokens, n)
        rows = np.zeros((n, self.vocab_size), np.float32)
        for row, length in zip(rows, range(len(tokens) - n + 1, len(tokens) + 1), strict=True):
            script = self.scripts[tokens[0]]
            token = script[(length - 1) % len(script)]
            row[token ^ 1 if self.twist and length % 3 == 0 else token] = 20
        return rows

    def logits_batch(self, requests):
        if any(tokens[0] == self.slow for tokens, _ in requests):
            time.sleep(0.3)
        return super().logits_batch(requests)


class TritonPythonModel:
    def initialize(self, args):
        parameters = {k: v["string_value"] for k, v in json.loads(args["model_config"])["parameters"].items()}
        values = json.loads((Path(__file__).parent / "scripts.json").read_text())
        scripts = {int(token): script for token, script in values["scripts"].items()}
        runner = ScriptedRunner(scripts, values["slow"], 1.0 if parameters["role"] == "draft" else 0.0)
        self.model = EngineModel(runner, parameters["role"], parameters["rule"])

    def execute(self, requests):
        return answer(pb_utils, self.model, requests)
