"""Triton's entry into TensorRT-LLM's own LLM-API model, which lies in the container and fits the version there."""

import importlib.util
import os
import sys
from pathlib import Path

from specbuild.triton.llmapi_model import find_template

template = find_template()
os.chdir(Path(__file__).parent)  # model.yaml names the checkpoints beside it
sys.path.insert(0, str(template.parent))  # its model.py imports what lies beside it
spec = importlib.util.spec_from_file_location("tensorrt_llm_llmapi_model", template)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module  # dataclasses look their module up
spec.loader.exec_module(module)

TritonPythonModel = module.TritonPythonModel
