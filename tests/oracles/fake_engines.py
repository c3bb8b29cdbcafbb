"""Engine directories as `specbuild build` leaves them on a GPU machine, without weights: from each model's config.json alone."""

import json
from pathlib import Path

import fake_trtllm_build

from specbuild.build import build_parameters, make_limits
from specbuild.check import load_shape
from specbuild.compilers.trtllm_command import make_command
from specbuild.config import ROLES
from specbuild.convert import make_tllm_config
from specbuild.quant import find_scheme

CARD = {
    "tensorrt_llm": "1.0.0", "tensorrt": "10.11.0.33", "cuda": "12.9", "driver": "575.57.08", "gpu": "NVIDIA H100 80GB HBM3",
    "compute_capability": "9.0", "checkpoint_digests": {},
}  # fmt: skip


def write_engines(config, roles=ROLES, **card):
    """Write the engines of a pair; `card` replaces what their engine_card.json says."""
    for role in roles:
        write_engine(config, role, {**CARD, **card})


def write_engine(config, role, card):
    _, family, shape = load_shape(config, role)
    model, limits, out = config.model_of(role), make_limits(config, role, shape), config.dir_of(role, "engine")
    scheme, world_size = find_scheme(model.quantize.scheme), model.tp * model.pp
    args = fake_trtllm_build.make_parser("1.0.0").parse_args(make_command(Path("in"), out, limits, world_size)[1:])
    pretrained = make_tllm_config(family, shape, model)
    pretrained["quantization"] |= {"quant_algo": scheme.quant_algo, "kv_cache_quant_algo": None}
    build_config = fake_trtllm_build.make_build_config(args, pretrained, 90)
    windows = shape.windows(limits.max_seq_len + limits.max_draft_len)
    out.mkdir(parents=True)
    for rank in range(world_size):
        (out / f"rank{rank}.engine").write_bytes(b"ftrt")
    values = {
        "config.json": {"version": "1.0.0", "pretrained_config": pretrained, "build_config": build_config},
        "engine_card.json": {**card, **({} if windows is None else {"max_attention_window_size": windows})},
        "specbuild.json": {"stage": "build", "parameters": build_parameters(config, role, shape), "inputs": {}},
    }
    for name, value in values.items():
        (out / name).write_text(json.dumps(value))
