"""Triton's entry into TensorRT-LLM's own LLM-API model, which lies in the container and fits the version there."""

import importlib.util
import os
import sys
from pathlib import Path

UPSTREAM = Path(os.environ.get("SPECBUILD_LLMAPI_DIR", "/app/all_models/llmapi/tensorrt_llm/1"))

if not (UPSTREAM / "model.py").is_file():
    raise FileNotFoundError(
        f"Cannot serve with the LLM API: no model.py in {UPSTREAM}, expected TensorRT-LLM's llmapi template. Run in a Triton TensorRT-LLM "
        "container of 1.3 or later, or set SPECBUILD_LLMAPI_DIR to where its template lies."
    )
os.chdir(Path(__file__).parent)  # model.yaml names the checkpoints beside it
sys.path.insert(0, str(UPSTREAM))  # its model.py imports what lies beside it
spec = importlib.util.spec_from_file_location("tensorrt_llm_llmapi_model", UPSTREAM / "model.py")
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module  # dataclasses look their module up
spec.loader.exec_module(module)

TritonPythonModel = module.TritonPythonModel
