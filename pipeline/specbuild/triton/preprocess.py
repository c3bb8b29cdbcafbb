"""Text to ids, as the path without a server makes them."""

from pathlib import Path
from typing import Any

from specbuild.errors import SpecbuildError
from specbuild.tokenizer import encode_prompt, load_tokenizer
from specbuild.triton.contract import MODELS, PREPROCESSING
from specbuild.triton.wire import make_error, make_tensors, read_item, read_tensors


class PreprocessingModel:
    """Answers requests one by one; an error is that of its request alone."""

    def __init__(self, pb_utils: Any, version_dir: Path) -> None:
        self._pb_utils = pb_utils
        self._tokenizer = load_tokenizer(version_dir)

    def answer(self, request: Any) -> Any:
        """Make the response to one request."""
        spec = MODELS[PREPROCESSING]
        try:
            text = read_item(read_tensors(self._pb_utils, request, spec.inputs), "text_input").decode()
            values = {"input_ids": encode_prompt(self._tokenizer, text)}
        except (SpecbuildError, UnicodeDecodeError) as error:
            return make_error(self._pb_utils, error)
        return self._pb_utils.InferenceResponse(make_tensors(self._pb_utils, spec.outputs, values))
