"""The config.pbtxt of an engine in TensorRT-LLM's Triton backend, and what keeps that backend from loading or serving one.

Parameters are read by upstream's model_instance_state.cc (TensorRT-LLM 1.0), in its spelling: some without a guard, so that a missing
key ends the load; the rest falls back to a default with a warning, also when its value does not parse.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from specbuild.errors import ServingError
from specbuild.triton.contract import ENGINE
from specbuild.triton.pbtxt import make_model

BACKEND = "tensorrtllm"
ENGINE_DIR = "engine"
"""Where an engine lies in its model's version directory."""

UNGUARDED = ("gpt_model_type", "gpt_model_path", "tokenizer_dir", "xgrammar_tokenizer_info_path", "guided_decoding_backend")
"""Keys whose absence ends the load. The last three serve guided decoding and may be empty: off."""

HARMFUL = ("lora_prefetch_dir", "encoder_model_path", "worker_path")
"""Keys that break by being there: taken literally even when empty, another kind of model, or no longer supported."""

FIXED = {
    "gpt_model_type": "inflight_fused_batching",
    "max_beam_width": "1",  # drafted tokens are verified along one beam
    "batch_scheduler_policy": "guaranteed_no_evict",
    "enable_kv_cache_reuse": "true",  # a draft-external target refuses to load without; and every round sends its whole sequence again
    "enable_chunked_context": "true",  # a prompt may be max_seq_len - 1 long, and not just max_num_tokens
    "exclude_input_in_output": "true",  # the loop asks for it in every request too
    "tokenizer_dir": "",
    "xgrammar_tokenizer_info_path": "",
    "guided_decoding_backend": "",
}
"""What both engines have, whatever the pair."""


@dataclass(frozen=True)
class Place:
    """Where one engine runs, and what its cache may take of each GPU there.

    devices: a GPU for each rank; one that is named again is another node's. participants: an MPI rank for each, where no process is
    spawned, else none. cache_fraction: of what is free once the model has loaded. windows: the positions that each layer sees, none where
    all see all.
    """

    devices: tuple[int, ...]
    participants: tuple[int, ...]
    cache_tokens: int
    cache_fraction: float
    windows: tuple[int, ...] = ()

    def parameters(self) -> dict[str, str]:
        """The parameters that say it. Both bounds of the cache: the smaller of them counts, see `plan_caches`."""
        node = tuple(dict.fromkeys(self.devices))  # the backend counts devices within a node; ids times nodes must be the ranks
        values = {
            "gpu_device_ids": join(node),
            "max_tokens_in_paged_kv_cache": str(self.cache_tokens),
            "kv_cache_free_gpu_mem_fraction": f"{self.cache_fraction:g}",
        }
        lists = {"participant_ids": self.participants, "max_attention_window_size": self.windows}
        if len(node) < len(self.devices):
            values["num_nodes"] = str(len(self.devices) // len(node))
        return values | {key: join(numbers) for key, numbers in lists.items() if numbers}


def make_trtllm_model(role: str, place: Place, max_batch_size: int, *, fast_logits: bool) -> ModelConfig:
    """Make the config of `target` or `draft`. Logits are FP32, as the engines make them: acceptance by rejection hands them on."""
    # The backend takes a path as it stands, from the server's working directory. `serve` starts the server within the repository, so
    # that a path relative to it holds wherever the repository is; workers that MPI spawns begin in the same directory.
    parameters = {**FIXED, "gpt_model_path": f"{role}/1/{ENGINE_DIR}", **place.parameters()}
    if fast_logits:
        parameters["speculative_decoding_fast_logits"] = "true"
    return make_model(
        role, ENGINE, max_batch_size=max_batch_size, backend=BACKEND, batching=True, parameters=dict(sorted(parameters.items()))
    )


def join(numbers: Sequence[int]) -> str:
    """Return numbers as the backend reads a list of them."""
    return ",".join(map(str, numbers))


def is_trtllm(config: ModelConfig) -> bool:
    """Tell whether a model runs in TensorRT-LLM's backend."""
    return bool(config.backend == BACKEND)


def read_list(config: ModelConfig, key: str) -> tuple[int, ...]:
    """Return a parameter that is a list of numbers, empty when it is absent; raises ServingError when it is none."""
    text = config.parameters[key].string_value if key in config.parameters else ""
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise ServingError(
            f"Cannot serve {config.name}: parameter {key} is {text!r}, expected numbers with commas. Package again."
        ) from None


def check_trtllm_model(config: ModelConfig, repository: Path) -> None:
    """Raise ServingError for the first thing for which the backend would not load this model, or would serve it otherwise than meant."""
    what = f"Cannot serve {config.name}"
    for key in UNGUARDED:
        if key not in config.parameters:
            raise ServingError(f"{what}: its config.pbtxt lacks parameter {key}, which the backend needs. Run `specbuild package --force`.")
    for key in HARMFUL:
        if key in config.parameters:
            raise ServingError(f"{what}: parameter {key} breaks it. Remove it, or run `specbuild package --force`.")
    for key, value in FIXED.items():
        found = config.parameters[key].string_value if key in config.parameters else None
        if found != value:
            raise ServingError(f"{what}: parameter {key} is {found!r}, expected {value!r}. Run `specbuild package --force`.")
    if config.max_batch_size < 1:
        raise ServingError(
            f"{what}: max_batch_size is {config.max_batch_size}, but the backend wants a batch dimension. Expected 1 or more."
        )
    logits = next((output for output in config.output if output.name == "generation_logits"), None)
    if logits is not None and logits.data_type != DataType.Value("TYPE_FP32"):
        raise ServingError(f"{what}: generation_logits are not TYPE_FP32, which the engines make. Run `specbuild package --force`.")
    check_files(config, repository)


def check_files(config: ModelConfig, repository: Path) -> None:
    """Raise ServingError unless the engine is where the config says, with a GPU for each of its ranks."""
    path = config.parameters["gpt_model_path"].string_value
    if not (repository / path / "config.json").is_file():
        raise ServingError(
            f"Cannot serve {config.name}: no engine at its gpt_model_path {path!r} in {repository}. Run `specbuild package --force`."
        )
    ranks = len(list((repository / path).glob("rank*.engine")))
    if len(nodes := read_list(config, "num_nodes") or (1,)) > 1:
        raise ServingError(f"Cannot serve {config.name}: num_nodes is {join(nodes)!r}, expected one number. Package again.")
    for key, each in (("gpu_device_ids", nodes[0]), ("participant_ids", 1)):
        numbers = read_list(config, key)
        if len(set(numbers)) * each != ranks and (numbers or key == "gpu_device_ids"):
            raise ServingError(
                f"Cannot serve {config.name}: {key} is {join(numbers)!r} for {ranks} ranks of its engine. Expected a number for each."
            )
