"""The trtllm-build command of one model, of flags that every accepted TensorRT-LLM (1.0.0 to 1.2.1) has, and what it must have made."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbuild.compilers.compiler import Limits
from specbuild.errors import EngineError

DEFAULT_NUM_TOKENS = 8192  # upstream's default of --max_num_tokens
DRAFT_TOKENS_EXTERNAL = 2  # upstream's SpeculativeDecodingMode, an IntFlag; 1 is none
MODE_FLAG = "draft_tokens_external"


def make_command(checkpoint_dir: Path, engine_dir: Path, limits: Limits, world_size: int) -> list[str]:
    """Return the command that builds every rank of a model.

    --workers is the number of ranks: the builder itself lowers it to the GPUs that it sees.
    """
    values = {
        "checkpoint_dir": checkpoint_dir,
        "output_dir": engine_dir,
        "max_batch_size": limits.max_batch_size,
        "max_input_len": limits.max_seq_len,
        "max_seq_len": limits.max_seq_len,  # with a speculative mode the builder adds max_draft_len to it
        "max_beam_width": 1,
        "max_num_tokens": max_num_tokens(limits),
        "kv_cache_type": "paged",
        "gemm_plugin": "auto",
        "use_paged_context_fmha": "enable",
        "logits_dtype": "float32",
        "input_timing_cache": timing_cache(engine_dir),
        "output_timing_cache": timing_cache(engine_dir),
        "workers": world_size,
        **({"speculative_decoding_mode": MODE_FLAG, "max_draft_len": limits.max_draft_len} if limits.max_draft_len else {}),
    }
    command = ["trtllm-build"]
    for flag, value in values.items():
        command += [f"--{flag}", str(value)]
    return [*command, "--gather_generation_logits"] if limits.gather_logits else command


def timing_cache(engine_dir: Path) -> Path:
    """Return where kernel timings are kept between builds: beside the engine, because a rebuilt engine replaces its directory."""
    return engine_dir.parent / "timing.cache"


def max_num_tokens(limits: Limits) -> int:
    """Return the most tokens of one pass over all its sequences.

    A pass must take a whole sequence (each round sends it from its start, and without chunked context it is not cut), and one round
    of every sequence. Above that, upstream's default, but no more than the batch can hold.
    """
    least = max(limits.max_seq_len, limits.max_batch_size * (limits.max_draft_len + 1))
    return max(least, min(DEFAULT_NUM_TOKENS, limits.max_batch_size * limits.max_seq_len))


def format_command(command: list[str]) -> str:
    """Return a command as a shell would take it, one flag a line."""
    lines = [command[0]]
    for word in command[1:]:
        if word.startswith("--"):
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return " \\\n".join(lines)


def section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a config.json, empty when it is absent or none."""
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def check_engine_config(config: Mapping[str, Any], checkpoint: Mapping[str, Any], limits: Limits, label: str) -> None:
    """Raise EngineError at the first value of the config.json that trtllm-build wrote which decoding with drafted tokens cannot use."""
    build, model = section(config, "build_config"), section(config, "pretrained_config")
    speculative = limits.max_draft_len > 0
    mode = build.get("speculative_decoding_mode")
    found_and_expected = {
        "build_config.speculative_decoding_mode": (
            DRAFT_TOKENS_EXTERNAL if str(mode).lower() == MODE_FLAG else mode or 1,
            DRAFT_TOKENS_EXTERNAL if speculative else 1,
        ),
        "build_config.max_draft_len": (build.get("max_draft_len"), limits.max_draft_len),
        "build_config.plugin_config.use_paged_context_fmha": (section(build, "plugin_config").get("use_paged_context_fmha"), True),
        "build_config.kv_cache_type": (str(build.get("kv_cache_type")).upper(), "PAGED"),
        "build_config.max_batch_size": (build.get("max_batch_size"), limits.max_batch_size),
        "build_config.max_beam_width": (build.get("max_beam_width"), 1),
        "build_config.max_seq_len": (build.get("max_seq_len"), limits.max_seq_len + limits.max_draft_len),
        "build_config.gather_generation_logits": (bool(build.get("gather_generation_logits")), limits.gather_logits),
        "build_config.gather_context_logits": (bool(build.get("gather_context_logits")), False),
        "pretrained_config.mapping.tp_size": (section(model, "mapping").get("tp_size"), checkpoint["mapping"]["tp_size"]),
        "pretrained_config.vocab_size": (model.get("vocab_size"), checkpoint["vocab_size"]),
        "pretrained_config.mapping.world_size": (section(model, "mapping").get("world_size"), checkpoint["mapping"]["world_size"]),
    }
    for key, (found, expected) in found_and_expected.items():
        if found != expected:
            raise EngineError(
                f"Cannot use the engine that trtllm-build made of the {label}: {key} is {found!r}, expected {expected!r}. Build with "
                "TensorRT-LLM 1.0.0, or look into the log for an option that was changed."
            )
