"""The Triton model of TensorRT-LLM's LLM API: its config.pbtxt, and the model.yaml from which upstream's model.py makes an `LLM`.

Names and types are upstream's (triton_backend/all_models/llmapi); batch size and decoupling stand in model.yaml, because upstream's
`auto_complete_config` sets them and a config.pbtxt that has them too cannot be overridden.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb

from specbuild.errors import ServingError
from specbuild.triton.contract import ModelSpec, TensorSpec, optional
from specbuild.triton.pbtxt import make_model

NAME = "tensorrt_llm"
TARGET_DIR, DRAFT_DIR = "target", "draft"
"""The checkpoints, beside model.yaml; model.py changes into its own directory, so the repository can be moved."""

CACHE_FRACTION = 0.8
"""Of the memory free when both models are loaded; the runtime shares it out itself (its own default is 0.9)."""


def _outputs(dtype: str, *names: str, dims: tuple[int, ...] = (1,)) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, dtype, dims) for name in names)


_SAMPLING = "sampling_param_"
LLMAPI = ModelSpec(
    inputs=(
        TensorSpec("text_input", "BYTES", (-1,)),
        *optional("BOOL", "streaming", "stop", "return_finish_reason", "return_stop_reason", "return_cumulative_logprob"),
        *optional("INT32", *(_SAMPLING + name for name in ("best_of", "top_k", "max_tokens"))),
        *optional("FP32", *(_SAMPLING + name for name in ("temperature", "top_p", "frequency_penalty", "presence_penalty"))),
        *optional("BYTES", _SAMPLING + "stop", dims=(-1,)),
        *optional("UINT64", _SAMPLING + "seed"),
        *optional("BOOL", *(_SAMPLING + name for name in ("exclude_input_from_output", "return_perf_metrics"))),
    ),
    outputs=(
        *_outputs("BYTES", "text_output", "finish_reason", "stop_reason", dims=(-1,)),
        *_outputs("FP32", "cumulative_logprob", "kv_cache_hit_rate", dims=(-1,)),
        *_outputs("INT32", *(f"kv_cache_{name}" for name in ("reused_block", "missed_block", "alloc_new_blocks", "alloc_total_blocks")),
                  dims=(-1,)),
        *_outputs("INT64", *(f"{name}_time_ns" for name in ("arrival", "first_scheduled", "first_token", "last_token"))),
        *_outputs("FP32", "acceptance_rate"),
        *_outputs("INT32", "total_accepted_draft_tokens", "total_draft_tokens"),
    ),
)  # fmt: skip


def find_template() -> Path:
    """Return upstream's model.py, which model_repo/llmapi runs from the container; raise ServingError where it is not."""
    directory = Path(os.environ.get("SPECBUILD_LLMAPI_DIR", "/app/all_models/llmapi/tensorrt_llm/1"))
    if not (directory / "model.py").is_file():
        raise ServingError(
            f"Cannot serve with llmapi on this machine: no model.py in {directory}, expected TensorRT-LLM's llmapi template. Run it "
            "in a Triton TensorRT-LLM container of 1.3 or later, or set SPECBUILD_LLMAPI_DIR to where its template lies."
        )
    return directory / "model.py"


def make_llmapi_config() -> pb.ModelConfig:
    """Make config.pbtxt, without what model.yaml says."""
    config = make_model(NAME, LLMAPI, max_batch_size=0)
    config.ClearField("model_transaction_policy")
    return config


def make_speculative_config(draft_len: int) -> Mapping[str, Any] | None:
    """Make the section that turns draft-target decoding on; None for plain decoding."""
    return {"decoding_type": "Draft_Target", "max_draft_len": draft_len, "speculative_model": DRAFT_DIR} if draft_len else None


def make_model_yaml(
    *, dtype: str, tp: int, pp: int, max_batch_size: int, max_seq_len: int, max_num_tokens: int, draft_len: int
) -> Mapping[str, Any]:
    """Make model.yaml: every key but triton_config is an argument of `LLM`. draft_len 0 is plain decoding."""
    speculation = make_speculative_config(draft_len)
    return {
        "model": TARGET_DIR,
        "backend": "pytorch",
        "dtype": dtype,
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "max_batch_size": max_batch_size,
        "max_seq_len": max_seq_len,
        "max_num_tokens": max_num_tokens,
        "kv_cache_config": {"free_gpu_memory_fraction": CACHE_FRACTION, "enable_block_reuse": True},
        **({"speculative_config": speculation} if speculation else {}),
        "triton_config": {"max_batch_size": 0, "decoupled": True, "cancellation_check_period_ms": 100},
    }
