"""engine_card.json: the machine that a TensorRT engine was built on and for, and the checkpoint that it was made of."""

from __future__ import annotations

import json
from pathlib import Path

from specbuild.artifacts import load_json
from specbuild.compilers.trtllm_machine import Machine
from specbuild.errors import EngineError
from specbuild.provenance import digest_artifact

FILE = "engine_card.json"
# What must be the same where an engine runs. A newer driver, or another GPU model of the same generation, loads it.
_MUST_MATCH = {"tensorrt_llm": "TensorRT-LLM", "tensorrt": "TensorRT", "compute_capability": "GPUs of compute capability"}


def write_card(engine_dir: Path, machine: Machine, checkpoint_dir: Path, windows: list[int] | None) -> None:
    """Write the card of an engine. `windows`: the positions that each layer sees; its runtime asks for them, the engine does not know."""
    files = load_json(checkpoint_dir / "specbuild.json")["files"]
    built_from = {name: digest for name, digest in files.items() if name == "config.json" or name.endswith(".safetensors")}
    checkpoint = {"specbuild.json": digest_artifact(checkpoint_dir), **built_from}
    window = {} if windows is None else {"max_attention_window_size": windows}
    (engine_dir / FILE).write_text(json.dumps({**machine.to_dict(), "checkpoint_digests": checkpoint, **window}, indent=2) + "\n")


def check_card(engine_dir: Path, machine: Machine) -> None:
    """Raise EngineError when an engine was made for another TensorRT-LLM, TensorRT or GPU generation than this machine's."""
    card, here = load_json(engine_dir / FILE, EngineError), machine.to_dict()
    for key, name in _MUST_MATCH.items():
        if card.get(key) != here[key]:
            raise EngineError(
                f"Cannot serve {engine_dir}: it was built for {name} {card.get(key)}, this machine has {here[key]}. Run `specbuild "
                "build` here, or serve it on a machine like the one that built it."
            )
