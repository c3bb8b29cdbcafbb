#!/usr/bin/env python3
"""The engines of bench_peers.py, each opened in a process (and perhaps an environment) of its own. Nothing but Python is imported here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

Decode = Callable[[list[int], int], Any]
"""(prompt ids, draft length; 0 = plain) decodes the job's number of tokens; returns how many."""
GENAI_BLOCK = 32  # columns that share a scale, unless asked otherwise


def open_specbuild(job: dict[str, Any]) -> Decode:
    """Our engines, with the loop that `generate` runs."""
    from specbuild.compilers import find_compiler
    from specbuild.spec.accept import ModelVerifier
    from specbuild.spec.drafters import ModelDrafter, NGramDrafter
    from specbuild.spec.loop import speculate
    from specbuild.spec.sampling import Sampling

    runners = {
        role: find_compiler("onnx-cpu").open_runner(Path(job[f"{role}_engine"]), 1, job["threads"])
        for role in ("target", "draft")
        if job[f"{role}_engine"]
    }
    drafter = ModelDrafter(runners["draft"]) if "draft" in runners else NGramDrafter()

    def decode(ids: list[int], draft_len: int) -> int:
        for runner in runners.values():
            runner.reset()
        steps = speculate(
            drafter, ModelVerifier(runners["target"], "rejection"), ids, sampling=Sampling(), max_tokens=job["max_tokens"],
            draft_len=draft_len, context=runners["target"].max_seq_len,
        )  # fmt: skip
        return sum(len(step.tokens) for step in steps)

    return decode


def open_transformers(job: dict[str, Any]) -> Decode:
    """Assisted generation with a constant number of drafted tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    target, draft = (AutoModelForCausalLM.from_pretrained(job[f"{role}_hf"]).eval() for role in ("target", "draft"))
    for model in (target, draft):
        model.generation_config.eos_token_id = None
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0

    def decode(ids: list[int], draft_len: int) -> int:
        draft.generation_config.num_assistant_tokens = draft_len
        prompt = torch.tensor([ids])
        with torch.no_grad():
            out = target.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=job["max_tokens"], pad_token_id=0,
                assistant_model=draft if draft_len else None,
            )  # fmt: skip
        return int(out.shape[1]) - len(ids)

    return decode


def open_genai(job: dict[str, Any]) -> Decode:
    """onnxruntime-genai: the model builder's int4, the draft beside the target in one configuration."""
    import onnxruntime_genai as og

    work_dir = Path(job["work"]) / f"genai-{job['block'] or 'default'}"
    directories = {role: work_dir / role for role in ("target", "draft") if job[f"{role}_hf"]}
    for role, directory in directories.items():
        build_genai(Path(job[f"{role}_hf"]), directory, job["block"])
    config = json.loads((directories["target"] / "genai_config.json").read_text())
    config["model"]["eos_token_id"] = config["model"]["vocab_size"] - 1 if not job["draft_hf"] else job["unused_id"]
    config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = job["threads"]
    (directories["target"] / "genai_config.json").write_text(json.dumps(config))
    models = {False: og.Model(str(directories["target"]))}
    if "draft" in directories:
        pair = shutil.copytree(directories["target"], work_dir / "pair")
        shutil.copytree(directories["draft"], pair / "draft")
        decoder = json.loads((pair / "draft" / "genai_config.json").read_text())["model"]["decoder"]
        decoder["filename"] = "draft/model.onnx"
        decoder["session_options"]["intra_op_num_threads"] = job["threads"]
        config["model"]["draft"] = decoder
        (pair / "genai_config.json").write_text(json.dumps({**config, "speculative": {"max_draft_tokens": job["draft_len"]}}))
        models[True] = og.Model(str(pair))

    def decode(ids: list[int], draft_len: int) -> int:
        parameters = og.GeneratorParams(models[draft_len > 0])
        parameters.set_search_options(max_length=len(ids) + job["max_tokens"], do_sample=False)
        generator = og.Generator(models[draft_len > 0], parameters)
        generator.append_tokens(ids)
        while not generator.is_done():
            generator.generate_next_token()
        return len(generator.get_sequence(0)) - len(ids)

    return decode


def build_genai(model: Path, directory: Path, block: int | None) -> None:
    """Run the model builder, and see that it took the block size: it says nothing of options that it does not know."""
    import onnx

    options = ["--extra_options", f"block_size={block}"] if block else []
    command = ["-m", "onnxruntime_genai.models.builder", "-m", str(model), "-o", str(directory), "-p", "int4", "-e", "cpu"]
    cache = ["-c", str(directory.parent / "cache")]
    subprocess.run([sys.executable, *command, *cache, *options], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    nodes = onnx.load(str(directory / "model.onnx"), load_external_data=False).graph.node
    found = {a.i for node in nodes if node.op_type == "MatMulNBits" for a in node.attribute if a.name == "block_size"}
    if found != {block or GENAI_BLOCK}:
        raise RuntimeError(f"the model builder made blocks of {sorted(found)} columns, expected {block or GENAI_BLOCK}")


def open_openvino(job: dict[str, Any]) -> Decode:
    """openvino-genai: it reads GGUF and saves its own format, from which a draft can be opened too."""
    import numpy as np
    import openvino as ov
    import openvino_genai as ovg

    directories = {role: Path(job["work"]) / f"openvino-{role}" for role in ("target", "draft")}
    for role, directory in directories.items():
        directory.mkdir()
        ovg.LLMPipeline(str(write_gguf(Path(job[f"{role}_hf"]), directory / "model.gguf")), "CPU", enable_save_ov_model=True)
    options = {"INFERENCE_NUM_THREADS": job["threads"]}
    plain = ovg.LLMPipeline(str(directories["target"]), "CPU", **options)
    draft = ovg.draft_model(str(directories["draft"]), "CPU", **options)
    both = ovg.LLMPipeline(str(directories["target"]), "CPU", draft_model=draft, **options)

    def decode(ids: list[int], draft_len: int) -> int:
        config = ovg.GenerationConfig(max_new_tokens=job["max_tokens"], ignore_eos=True, do_sample=False)
        if draft_len:
            config.num_assistant_tokens = draft_len
        row = ov.Tensor(np.array([ids], np.int64))
        inputs = ovg.TokenizedInputs(row, ov.Tensor(np.ones((1, len(ids)), np.int64)))
        return len((both if draft_len else plain).generate(inputs, config).tokens[0])

    return decode


def open_llama_cpp(job: dict[str, Any]) -> Decode:
    """llama.cpp's server in this process, one with the draft and one without."""
    import xllamacpp

    paths = {role: write_gguf(Path(job[f"{role}_hf"]), Path(job["work"]) / f"llama-{role}.gguf") for role in ("target", "draft")}
    servers = {}
    for drafting in (False, True):
        parameters = xllamacpp.CommonParams()
        parameters.model.path, parameters.n_ctx, parameters.n_parallel, parameters.warmup = str(paths["target"]), 1024, 1, False
        parameters.port, parameters.verbosity = 0, -1
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = job["threads"]
        if drafting:
            draft = parameters.speculative.draft
            parameters.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            draft.mparams.path, draft.n_max, draft.n_min, draft.p_min = str(paths["draft"]), job["draft_len"], 0, 0.0
            draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = job["threads"]
        servers[drafting] = xllamacpp.Server(parameters)

    def decode(ids: list[int], draft_len: int) -> int:
        request = {"prompt": ids, "n_predict": job["max_tokens"], "temperature": 0, "top_k": 1, "cache_prompt": False, "ignore_eos": True}
        answer = servers[draft_len > 0].handle_completions(request)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return int(answer["usage"]["completion_tokens"])

    return decode


def write_gguf(model: Path, path: Path) -> Path:
    """Convert a Llama of Hugging Face to GGUF: matrices Q4_0, embeddings Q8_0, norms float32. The tokenizer is byte-level BPE."""
    import gguf
    import numpy as np
    import torch
    from safetensors.torch import load_file

    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    add_tokenizer(writer, model, config["vocab_size"])
    tensors = {name: tensor for shard in sorted(model.glob("*.safetensors")) for name, tensor in load_file(shard).items()}
    if config.get("tie_word_embeddings"):  # openvino-genai asks for it by name
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in tensors.items():
        values = tensor.to(torch.float32).numpy()
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name:  # halves of a head's rotary pairs lie side by side in GGUF
                values = values.reshape(count, 2, size // 2, -1).swapaxes(1, 2).reshape(values.shape)
        kind = gguf.GGMLQuantizationType.Q8_0 if "embed" in name or "lm_head" in name else gguf.GGMLQuantizationType.Q4_0
        if values.ndim == 1:
            writer.add_tensor(names.get_name(name, (".weight",)), values)
        else:
            writer.add_tensor(names.get_name(name, (".weight",)), gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: Any, model: Path, vocab_size: int) -> None:
    """Add the vocabulary and merges of tokenizer.json, ids that it lacks as unused ones."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    ids = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    tokens = [special.get(i) or ids.get(i) or f"<unused {i}>" for i in range(vocab_size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i in special else 1 if i in ids else 5 for i in range(vocab_size)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)


OPEN = {
    "specbuild": open_specbuild, "transformers": open_transformers, "genai": open_genai, "openvino": open_openvino,
    "llama.cpp": open_llama_cpp,
}  # fmt: skip


def serve(name: str, job: dict[str, Any]) -> None:
    """Be a peer: answer lines of [prompts, draft length] on stdin with [tokens, seconds] on the stdout of before."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries may print
    try:
        with redirect_stdout(sys.stderr):
            decode = OPEN[name.partition(":")[0]](job)
    except Exception as error:  # noqa: BLE001  whatever it is, it is the reason
        answers.write(json.dumps({"error": describe(error)}) + "\n")
        return
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        prompts, draft_len = json.loads(line)
        try:
            start = time.perf_counter()
            tokens = sum(decode(ids, draft_len) for ids in prompts)
            answers.write(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - start}) + "\n")
        except Exception as error:  # noqa: BLE001
            answers.write(json.dumps({"error": describe(error)}) + "\n")


def describe(error: Exception) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]))
