"""triton_python_backend_utils as plain Python, and two models behind it: what bls.py and speculative.py see of Triton."""

import threading

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
ENGINES = {}  # model name -> EngineModel
CALLS = []  # (model name, input values) of every BLS call


class Tensor:
    def __init__(self, name, array):
        self._name, self._array = name, array

    def name(self):
        return self._name

    def as_numpy(self):
        return self._array


class TritonError(Exception):
    def message(self):
        return str(self)


class InferenceResponse:
    def __init__(self, output_tensors, error=None):
        self.tensors, self._error = {tensor.name(): tensor for tensor in output_tensors}, error

    def has_error(self):
        return self._error is not None

    def error(self):
        return self._error

    def values(self):
        return {name: tensor.as_numpy() for name, tensor in self.tensors.items()}


class Request:
    """A request as a model gets it, with its own response sender."""

    def __init__(self, values, request_id="", parameters="{}"):
        self.tensors = {name: Tensor(name, array) for name, array in values.items()}
        self.responses, self.done, self.cancelled = [], threading.Event(), False
        self._id, self._parameters = request_id, parameters

    def request_id(self):
        return self._id

    def parameters(self):
        return self._parameters

    def get_response_sender(self):
        return self

    def is_cancelled(self):
        return self.cancelled

    def send(self, response=None, flags=0):
        if response is not None:
            self.responses.append(response)
        if flags:
            self.done.set()


class InferenceRequest:
    def __init__(self, model_name, requested_output_names, inputs, request_id):
        self.model_name, self.names = model_name, requested_output_names
        self.request = Request({tensor.name(): tensor.as_numpy() for tensor in inputs}, request_id)

    def exec(self):
        from specbuild.triton.engine_cpu import answer

        CALLS.append((self.model_name, {name: tensor.as_numpy() for name, tensor in self.request.tensors.items()}))
        response = answer(__import__("fake_triton"), ENGINES[self.model_name], [self.request])[0]
        response.tensors = {name: tensor for name, tensor in response.tensors.items() if name in self.names}
        return response


def get_input_tensor_by_name(request, name):
    return request.tensors.get(name)


def get_output_tensor_by_name(response, name):
    return response.tensors.get(name)


class Logger:
    @staticmethod
    def log_warn(message):
        pass


class MetricFamily:
    COUNTER = "counter"
    totals = {}  # noqa: RUF012

    def __init__(self, name, description, kind):
        self.name = name

    def Metric(self, labels):  # noqa: N802 - Triton's name
        return self

    def increment(self, value):
        self.totals[self.name] = self.totals.get(self.name, 0) + value


class TableModel:
    """Logits that depend on the last token; peaks where `chain` says. Counts its passes."""

    vocab_size, max_seq_len = 12, 64

    def __init__(self, chain=None, seed=0):
        self.table = np.random.default_rng(seed).normal(size=(12, 12)).astype(np.float32)
        self.passes = []
        for last, following in (chain or {}).items():
            self.table[last, following] += 20

    def logits(self, tokens, n):
        return self.table[list(tokens)[-n:]]

    def logits_batch(self, requests):
        self.passes.append(len(requests))
        return [self.logits(tokens, n) for tokens, n in requests]
