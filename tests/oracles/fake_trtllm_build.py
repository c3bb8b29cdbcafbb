#!/usr/bin/env python3
"""A trtllm-build without TensorRT: it parses arguments by upstream's table, checks what upstream checks, and writes what it writes.

Run as a program it reads FAKE_TRTLLM (a JSON object): {"do": "fail" | "hang", "config": {...} merged into config.json, "skip": [files]}.
install() puts it on a path with a Python that has its versions, and an nvidia-smi.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

SWITCH = ("enable", "disable")
DTYPES = ("auto", "float16", "float32", "bfloat16", "int32", "disable")
MODES = {"none": 1, "draft_tokens_external": 2, "medusa": 4, "lookahead_decoding": 8, "explicit_draft_tokens": 16, "eagle": 32}
QUANTIZATION = {
    "quant_algo", "kv_cache_quant_algo", "group_size", "smoothquant_val", "clamp_val", "use_meta_recipe", "has_zero_point",
    "pre_quant_scale", "exclude_modules",
}  # fmt: skip
INTEGER_WEIGHTS = ("W8A16", "W4A16", "W4A16_AWQ", "W4A16_GPTQ", "W8A8_SQ_PER_CHANNEL")

# flag: (type or choices, default); True = a flag without a value
GENERAL = {
    "checkpoint_dir": (str, None), "model_config": (str, None), "build_config": (str, None), "model_cls_file": (str, None),
    "model_cls_name": (str, None), "output_dir": (str, "engine_outputs"), "max_batch_size": (int, 2048), "max_input_len": (int, 1024),
    "max_seq_len": (int, None), "max_beam_width": (int, 1), "max_num_tokens": (int, 8192), "opt_num_tokens": (int, None),
    "max_encoder_input_len": (int, 1024), "max_prompt_embedding_table_size": (int, 0),
    "kv_cache_type": (("continuous", "paged", "disabled"), None), "paged_kv_cache": (SWITCH, None), "input_timing_cache": (str, None),
    "output_timing_cache": (str, "model.cache"), "profiling_verbosity": (("layer_names_only", "detailed", "none"), "layer_names_only"),
    "strip_plan": (True, False), "weight_sparsity": (True, False), "weight_streaming": (True, False), "fast_build": (True, False),
    "workers": (int, 1), "log_level": (("internal_error", "error", "warning", "info", "verbose", "debug", "trace"), "info"),
    "enable_debug_output": (True, False), "visualize_network": (str, None), "dry_run": (True, False), "monitor_memory": (True, False),
    "logits_dtype": (("float16", "float32"), None), "gather_context_logits": (True, False), "gather_generation_logits": (True, False),
    "gather_all_token_logits": (True, False), "lora_dir": (str, None), "lora_ckpt_source": (("hf", "nemo"), "hf"),
    "lora_target_modules": (str, None), "max_lora_rank": (int, 64),
    "speculative_decoding_mode": (tuple(mode for mode in MODES if mode != "none"), None), "max_draft_len": (int, 0),
}  # fmt: skip
PLUGINS = {
    "gpt_attention_plugin": (DTYPES, "auto"), "bert_attention_plugin": (DTYPES, "auto"), "moe_plugin": (DTYPES, "auto"),
    "mamba_conv1d_plugin": (DTYPES, "auto"), "nccl_plugin": (DTYPES, "auto"), "gemm_plugin": ((*DTYPES, "fp8", "nvfp4"), None),
    "gemm_swiglu_plugin": (("fp8", "disable"), "disable"), "fp8_rowwise_gemm_plugin": (DTYPES, "disable"),
    "low_latency_gemm_plugin": (("fp8", "disable"), "disable"), "low_latency_gemm_swiglu_plugin": (("fp8", "disable"), "disable"),
    "gemm_allreduce_plugin": (("float16", "bfloat16", "disable"), "disable"), "lora_plugin": (DTYPES, "disable"),
    "dora_plugin": (SWITCH, "disable"), "bert_context_fmha_fp32_acc": (SWITCH, "disable"), "fuse_fp4_quant": (SWITCH, "disable"),
    "norm_quant_fusion": (SWITCH, "disable"), "user_buffer": (SWITCH, "disable"), "pp_reduce_scatter": (SWITCH, "disable"),
    "context_fmha": (SWITCH, "enable"), "remove_input_padding": (SWITCH, "enable"), "tokens_per_block": (int, 32),
    "use_paged_context_fmha": (SWITCH, "enable"), "use_fp8_context_fmha": (SWITCH, "enable"), "multiple_profiles": (SWITCH, "disable"),
    "reduce_fusion": (SWITCH, "disable"), "paged_state": (SWITCH, "enable"), "use_fused_mlp": (SWITCH, "enable"),
    "streamingllm": (SWITCH, "disable"),
}  # fmt: skip
UNTIL_1_0 = {"auto_parallel": (int, 1), "gpus_per_node": (int, 8), "cluster_key": (str, None)}


def make_parser(version):
    """The flags of a version; an unknown, shortened or ill-typed one ends with code 2, as upstream's."""
    parser = argparse.ArgumentParser("trtllm-build", allow_abbrev=False)
    old = UNTIL_1_0 if version.startswith("1.0") else {}
    for name, (kind, default) in {**GENERAL, **PLUGINS, **old}.items():
        aliases = {"max_seq_len": ["--max_decoder_seq_len"], "max_prompt_embedding_table_size": ["--max_multimodal_len"]}.get(name, [])
        if kind is True:
            parser.add_argument(f"--{name}", action="store_true")
        elif isinstance(kind, tuple):
            parser.add_argument(f"--{name}", choices=kind, default=default)
        else:
            parser.add_argument(f"--{name}", *aliases, type=kind, default=default)
    return parser


def make_build_config(args, model, sm):
    """Return build_config as upstream resolves it; RuntimeError for what it refuses."""
    quantization = model["quantization"]
    if unknown := quantization.keys() - QUANTIZATION:
        raise TypeError(f"QuantConfig.__init__() got an unexpected keyword argument '{min(unknown)}'")
    if 100 <= sm < 120 and (quantization["quant_algo"] in INTEGER_WEIGHTS or quantization["kv_cache_quant_algo"] == "INT8"):
        raise RuntimeError("INT8/INT4 quantization is not supported on SM>=100.")
    if args.max_draft_len > 0 and (args.gather_context_logits or args.gather_all_token_logits):
        raise RuntimeError("Gathering context logits is not supported with speculative decoding.")
    if args.opt_num_tokens is not None and args.multiple_profiles == "enable":
        raise RuntimeError("opt_num_tokens cannot be set when multiple_profiles is enabled.")
    mode = MODES[args.speculative_decoding_mode or "none"]
    max_seq_len = args.max_seq_len or model["max_position_embeddings"]
    num_tokens = min(args.max_num_tokens, args.max_batch_size * max_seq_len)
    if mode != 1:
        num_tokens = max(num_tokens, args.max_batch_size * (args.max_draft_len + 1))
    plugins = {name: {"enable": True, "disable": None if kind is not SWITCH else False}.get(getattr(args, name), getattr(args, name))
               for name, (kind, _) in PLUGINS.items()}  # fmt: skip
    if not plugins["context_fmha"] or quantization["kv_cache_quant_algo"] in ("INT8", "FP8"):
        plugins["use_paged_context_fmha"] = False
    plugins |= {"paged_kv_cache": (args.kv_cache_type or "paged") == "paged", "use_fp8_context_fmha": False, "paged_state": False}
    return {
        "max_input_len": min(args.max_input_len, max_seq_len), "max_seq_len": max_seq_len + (args.max_draft_len if mode != 1 else 0),
        "opt_batch_size": 8, "max_batch_size": args.max_batch_size, "max_beam_width": args.max_beam_width, "max_num_tokens": num_tokens,
        "opt_num_tokens": args.max_batch_size, "max_prompt_embedding_table_size": 0,
        "kv_cache_type": (args.kv_cache_type or "paged").upper(), "gather_context_logits": args.gather_context_logits,
        "gather_generation_logits": args.gather_generation_logits, "strongly_typed": True, "force_num_profiles": None,
        "profiling_verbosity": args.profiling_verbosity, "enable_debug_output": False, "max_draft_len": args.max_draft_len,
        "speculative_decoding_mode": mode, "use_refit": False, "input_timing_cache": args.input_timing_cache,
        "output_timing_cache": args.output_timing_cache, "lora_config": {}, "weight_sparsity": False, "weight_streaming": False,
        "plugin_config": plugins, "use_strip_plan": False, "max_encoder_input_len": 1024, "monitor_memory": False, "use_mrope": False,
    }  # fmt: skip


def merge(values, changes):
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            merge(values[key], value)
        else:
            values[key] = value


def say(text):
    sys.stdout.write(f"[TRT-LLM] {text}\n")
    sys.stdout.flush()


def main(argv=None):
    version = importlib.metadata.version("tensorrt_llm")
    args = make_parser(version).parse_args(argv)
    told = json.loads(os.environ.get("FAKE_TRTLLM", "{}"))
    gpus = subprocess.run(["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"],
                          capture_output=True, text=True, check=True).stdout.splitlines()  # fmt: skip
    source, out = Path(args.checkpoint_dir), Path(args.output_dir)
    model = json.loads((source / "config.json").read_text())
    build_config = make_build_config(args, model, int(gpus[0].split(",")[1].replace(".", "")))
    model["logits_dtype"] = args.logits_dtype or model["logits_dtype"]
    say(f"[I] TensorRT-LLM version: {version}, {min(args.workers, len(gpus))} workers")
    out.mkdir(parents=True, exist_ok=True)
    world_size = model["mapping"]["world_size"]
    for rank in range(world_size):
        if not (source / f"rank{rank}.safetensors").is_file():
            raise FileNotFoundError(f"rank{rank}.safetensors")
        if rank == world_size - 1 and told.get("do") == "fail":
            say("[E] [TRT] Error Code 2: OutOfMemory (Requested size was 1073741824 bytes.)")
            raise RuntimeError("Engine building failed, please check the error log.")
        (out / f"rank{rank}.engine").write_bytes(b"ftrt" + bytes([rank]))
        if told.get("do") == "hang":
            child = subprocess.Popen(["sleep", "600"])  # a worker
            Path(told["pids"]).write_text(f"{os.getpid()} {child.pid}")
            time.sleep(600)
        say(f"[I] Engine serialized. rank {rank}")
    config = {"version": version, "pretrained_config": model, "build_config": build_config}
    merge(config, told.get("config", {}))
    (out / "config.json").write_text(json.dumps(config, indent=4))
    Path(args.output_timing_cache).write_bytes(b"cache")
    for name in told.get("skip", []):
        (out / name).unlink()


NVIDIA_SMI = """
*chosen, query, form = sys.argv[1:]
if (query, form) != ("--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"):
    sys.exit(6)
indices = [int(index) for index in chosen[0].removeprefix("--id=").split(",")] if chosen else range(len(gpus))
sys.stdout.write("".join(f"{gpus[index]}\\n" for index in indices))
"""


def write_program(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def install(directory, version="1.0.0", gpus=("NVIDIA H100 80GB HBM3, 9.0, 575.57.08",), tensorrt="10.11.0.33", builder=True):
    """Make a bin directory with python3, trtllm-build and nvidia-smi; version None: no tensorrt_llm, no GPUs: no nvidia-smi."""
    bin_dir, site = directory / "bin", directory / "site"
    shutil.rmtree(directory, ignore_errors=True)
    bin_dir.mkdir(parents=True)
    for name, its_version in (("tensorrt_llm", version), ("tensorrt", tensorrt), ("torch", "2.7.1+cu129")):
        if its_version is not None:
            info = site / f"{name}-{its_version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {its_version}\n")
    write_program(bin_dir / "python3", f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    if builder:
        write_program(bin_dir / "trtllm-build", f"#!{bin_dir}/python3\n" + Path(__file__).read_text().split("\n", 1)[1])
    if gpus:
        write_program(bin_dir / "nvidia-smi", f"#!{bin_dir}/python3\nimport sys\ngpus = {list(gpus)!r}\n{NVIDIA_SMI}")
    return bin_dir


if __name__ == "__main__":
    main()
