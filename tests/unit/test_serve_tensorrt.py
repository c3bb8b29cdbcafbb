"""`specbuild package` and `serve` of TensorRT engines, on a machine without a GPU: goldens, and everything that is refused."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import fake_trtllm_build
import pytest
import yaml
from click.testing import CliRunner
from fake_engines import write_engines
from one_line import problem

from specbuild.cli import cli as program
from specbuild.config import load_config
from specbuild.package import run_package
from specbuild.placement import plan_places
from specbuild.plan import load_parts
from specbuild.planning.hardware import DRIVER_NAMES, GPUS, find_gpu
from specbuild.planning.memory import plan_memory
from specbuild.serve import describe_serve, run_serve
from specbuild.spec.loop import Draft, commit, speculate
from specbuild.spec.sampling import Sampling
from specbuild.triton.pbtxt import load_config as load_pbtxt
from specbuild.triton.repository import check_repository
from specbuild.triton.server import Ports

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = ["shared-gpu", "two-gpus", "tp8-tp1", "tp8-tp1-fast-logits", "ngram-tp2"]
H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def pair(tmp_path, tokenizer, monkeypatch):
    """Return make(case, **sections): a golden case's YAML in a directory of its own, the sections merged in."""
    shutil.copytree(GOLDEN / "shapes", tmp_path / "shapes")
    for shape in (tmp_path / "shapes").iterdir():
        tokenizer.save(str(shape / "tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))

    def make(case, **sections):
        values = yaml.safe_load((GOLDEN / "triton" / case / "pair.yaml").read_text())
        fake_trtllm_build.merge(values, sections)
        path = tmp_path / "triton" / case / "pair.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(values))
        return load_config(path)

    return make


@pytest.fixture
def packaged(pair):
    """Return make(case, **sections): the same with engines, packaged."""

    def make(case, **sections):
        config = pair(case, **sections)
        write_engines(config)
        assert run_package(config)
        return config

    return make


def parameters(config, model):
    values = load_pbtxt(config.repository_dir / model / "config.pbtxt").parameters
    return {key: value.string_value for key, value in values.items()}


# --- goldens


def produce(config, tmp_path, monkeypatch):
    """Name and text of what a case's goldens hold, without the paths of this machine."""
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    files = {f"{model}.pbtxt": config.repository_dir / model / "config.pbtxt" for model in ("target", "draft")}
    texts = {name: path.read_text() for name, path in files.items() if path.exists()}
    command = CliRunner().invoke(program, ["serve", str(config.path), "--dry-run"], catch_exceptions=False).stdout
    return {**texts, "command.sh": command.replace(str(tmp_path), "/work")}


@pytest.mark.parametrize("case", CASES)
def test_repository_and_command_equal_the_reviewed_golden(case, packaged, tmp_path, monkeypatch):
    made = produce(packaged(case), tmp_path, monkeypatch)
    golden = {path.name: path.read_text() for path in (GOLDEN / "triton" / case).iterdir() if path.name != "pair.yaml"}
    assert made == golden


def test_there_is_no_other_golden():
    assert sorted(path.name for path in (GOLDEN / "triton").iterdir()) == sorted(CASES)


# --- what a repository says


def test_packaging_again_is_skipped_until_serving_changes(packaged, pair):
    config = packaged("two-gpus")
    assert not run_package(config)
    assert run_package(pair("two-gpus", serving={"draft_gpus": [2]}))
    assert parameters(config, "draft")["gpu_device_ids"] == "2"


def test_a_moved_repository_still_has_its_engines(packaged, tmp_path):
    """T-02: no path leads out of it."""
    config = packaged("shared-gpu")
    text = "".join(path.read_text() for path in config.repository_dir.rglob("*.pbtxt"))
    assert str(tmp_path) not in text
    shutil.rmtree(config.dir_of("target", "engine"))
    moved = config.repository_dir.rename(tmp_path / "elsewhere")
    check_repository(moved)
    assert (moved / load_pbtxt(moved / "target" / "config.pbtxt").parameters["gpt_model_path"].string_value / "rank0.engine").is_file()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order", [("target", "draft"), ("draft", "target")], ids=" first, ".join)
def test_s_20_both_caches_hold_what_was_planned_in_any_order_of_loading(case, order, packaged):
    """The backend allocates the smaller of max_tokens and fraction * free; both models' weights may lie there before either cache."""
    config = packaged(case)
    gpu = GPUS["h100"]
    plan = plan_memory(parts := load_parts(config, gpu), gpu)
    written = {role: parameters(config, role) for role in order if (config.repository_dir / role).exists()}
    sharing = [part.role for part in parts if "0" in written[part.role]["gpu_device_ids"].split(",")]
    for late in (False, True):  # a model's weights come just before its cache, or all weights before all caches
        free = gpu.memory - (sum(plan.models[role].total - plan.models[role].cache for role in sharing) if late else 0)
        for role in (role for role in order if role in sharing):
            memory = plan.models[role]
            free -= 0 if late else memory.total - memory.cache
            assert int(written[role]["max_tokens_in_paged_kv_cache"]) == memory.cache_tokens
            assert memory.cache <= float(written[role]["kv_cache_free_gpu_mem_fraction"]) * free
            free -= memory.cache
        assert free > 0


@pytest.mark.parametrize(("target_gpus", "draft_gpus", "shared"), [(None, None, True), ([1], [0, 1], True), ([0], [1, 2], False)])
def test_models_that_share_no_gpu_are_planned_alone(pair, target_gpus, draft_gpus, shared):
    tp = len(draft_gpus or [0])
    serving = {"target_gpus": target_gpus, "draft_gpus": draft_gpus}
    places = plan_places(pair("shared-gpu", draft={"tp": tp}, serving=serving), H100)
    alone = plan_places(pair("shared-gpu", draft={"tp": tp}, serving={"target_gpus": [0], "draft_gpus": list(range(1, 1 + tp))}), H100)
    assert (places["target"].cache_fraction > alone["target"].cache_fraction) == shared


@pytest.mark.parametrize("case", ["shared-gpu", "tp8-tp1"])
def test_the_loop_never_asks_for_what_an_engine_would_cut(case, packaged):
    """Contract 2.1 and 2.4: input at most max_seq_len - 1, also with a draft; n + 1 new tokens and the draft in max_seq_len."""
    config = packaged(case)
    loop = {key: value for key, value in parameters(config, "speculative_decoding").items() if key != "pair"}
    engines = {
        role: json.loads((config.dir_of(role, "engine") / "config.json").read_text())["build_config"] for role in ("target", "draft")
    }
    most, length = engines["target"]["max_draft_len"], engines["target"]["max_seq_len"]
    asked = []

    class Recorder:
        def propose(self, tokens, k, sampling):
            assert 0 < len(tokens) <= engines["draft"]["max_seq_len"] - k
            return Draft((7,) * k)

        def verify(self, tokens, draft, sampling, limit):
            prompt, n = len(tokens), len(draft.tokens)
            asked.append((prompt, n))
            assert n <= most
            assert prompt + n <= length - 1
            assert prompt + (n + 1) + (n or most) <= length
            return commit(draft, 0, 5, sampling, limit)

    context, draft_context = int(loop["context"]), int(loop["draft_context"])
    for prompt in (1, context - most - 2, context - most, context - 2, context - 1):
        for k in (0, 1, most):
            recorder = Recorder()
            steps = speculate(
                recorder, recorder, [1] * prompt, sampling=Sampling(), max_tokens=20, draft_len=k, context=context,
                draft_context=draft_context,
            )  # fmt: skip
            assert list(steps)[-1].finish_reason == "length"
    assert max(asked)[0] == context - 1  # the engine's last usable position is used


def test_loop_parameters_of_tensorrt(packaged):
    assert parameters(packaged("tp8-tp1-fast-logits"), "speculative_decoding") == {
        "pair": "tp8-tp1-fast-logits", "draft_len": "6", "max_draft_len": "10", "rule": "rejection", "drafter": "model", "context": "4096",
        "draft_context": "4096", "pad_id": "128001", "max_running": "64", "end_ids": "128001", "fast_logits": "true",
        "seed_per_request": "true",
    }  # fmt: skip


def test_c_17_windows_of_the_engine_card_are_the_backend_s(pair):
    config = pair("shared-gpu")
    write_engines(config)
    card = config.dir_of("target", "engine") / "engine_card.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "max_attention_window_size": [4096, 8200]}))
    run_package(config)
    assert parameters(config, "target")["max_attention_window_size"] == "4096,8200"
    assert "max_attention_window_size" not in parameters(config, "draft")


# --- what is refused


@pytest.mark.parametrize(
    ("case", "sections", "parts"),
    [
        ("tp8-tp1", {"serving": {"target_gpus": [0, 1]}}, ["target on GPUs [0, 1]", "8 ranks (tp 8, pp 1)", "Set serving.target_gpus"]),
        ("two-gpus", {"serving": {"draft_gpus": []}}, ["draft on GPUs []", "1 ranks", "Set serving.draft_gpus"]),
        ("two-gpus", {"serving": {"draft_gpus": [8]}}, ["draft on GPU 8", "counts those of a node from 0 to 7", "CUDA_VISIBLE_DEVICES"]),
        ("tp8-tp1", {"serving": {"target_gpus": list(range(1, 9))}}, ["target on GPU 8"]),
        ("tp8-tp1", {"serving": {"target_gpus": [0] * 8}}, ["a GPU of its own for each"]),
        ("tp8-tp1", {"serving": {"fast_logits": True}}, ["serving.fast_logits with acceptance exact", "set acceptance: rejection"]),
        ("ngram-tp2", {"serving": {"fast_logits": True}, "speculation": {"acceptance": "rejection"}}, ["drafter ngram"]),
        ("shared-gpu", {"serving": {"gpu": "h1000"}}, ["serving.gpu 'h1000'", "Set serving.gpu to one of h100, h200"]),
        ("shared-gpu", {"serving": {"gpu": "cpu"}}, ["serving.gpu 'cpu': it is no GPU"]),
        (
            "shared-gpu",
            {"serving": {"gpu": "l4"}, "build": {"max_batch_size": 64}},
            ["Cannot fit this pair on NVIDIA L4", "max_batch_size"],
        ),
    ],
)
def test_a_place_that_cannot_be_is_one_line(pair, case, sections, parts):
    config = pair(case, **sections)
    write_engines(config)
    text = problem(run_package, config)
    assert all(part in text for part in parts), text
    assert "--gpu" not in text  # that is an option of plan
    assert not config.repository_dir.exists()


def test_an_unknown_card_needs_a_name(pair):
    config = pair("shared-gpu")
    write_engines(config, gpu="NVIDIA A100-SXM4-40GB")
    assert "'NVIDIA A100-SXM4-40GB', which built the engines: its memory is unknown. Set serving.gpu" in problem(run_package, config)
    assert run_package(pair("shared-gpu", serving={"gpu": "l40s"}))


def test_every_driver_name_leads_to_one_device():
    names = [name for names in DRIVER_NAMES.values() for name in names]
    assert len(set(names)) == len(names)
    assert DRIVER_NAMES.keys() == {name for name, gpu in GPUS.items() if not gpu.is_cpu}
    assert find_gpu("NVIDIA A100-SXM4-80GB") is GPUS["a100-80"]
    assert find_gpu("NVIDIA A10G") is None


def edit_json(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


BROKEN = {
    "rank missing": ("target", lambda engine: (engine / "rank7.engine").unlink(), "rank7.engine is missing, expected 8 ranks"),
    "B-05 no paged context": (
        "target",
        lambda engine: edit_json(engine / "config.json", lambda v: v["build_config"]["plugin_config"].update(use_paged_context_fmha=False)),
        "use_paged_context_fmha is False, expected True",
    ),
    "B-01 not draft external": (
        "target",
        lambda engine: edit_json(engine / "config.json", lambda v: v["build_config"].update(speculative_decoding_mode=1)),
        "speculative_decoding_mode is 1, expected 2",
    ),
    "no card": ("draft", lambda engine: (engine / "engine_card.json").unlink(), "engine_card.json is missing"),
    "draft takes drafts": (
        "draft",
        lambda engine: edit_json(engine / "config.json", lambda v: v["build_config"].update(max_draft_len=4, max_seq_len=4100)),
        "a draft engine takes no drafted tokens",
    ),
    "T-03 batches differ": (
        "draft",
        lambda engine: edit_json(engine / "config.json", lambda v: v["build_config"].update(max_batch_size=32)),
        "max_batch_size is {'target': 64, 'draft': 32}, expected one number",
    ),
    "other ranks": (
        "target",
        lambda engine: edit_json(engine / "config.json", lambda v: v["pretrained_config"]["mapping"].update(world_size=4)),
        "it has 4 ranks (tp 8), triton/tp8-tp1/pair.yaml says tp 8, pp 1",
    ),
    "other tp": (
        "target",
        lambda engine: edit_json(engine / "config.json", lambda v: v["pretrained_config"]["mapping"].update(tp_size=4, pp_size=2)),
        "it has 8 ranks (tp 4), triton/tp8-tp1/pair.yaml says tp 8, pp 1",
    ),
    "no mapping": (
        "target", lambda engine: edit_json(engine / "config.json", lambda v: v["pretrained_config"].pop("mapping")), "it has None ranks",
    ),
    "no vocabulary": (
        "draft", lambda engine: edit_json(engine / "config.json", lambda v: v["pretrained_config"].pop("vocab_size")), "no vocab_size",
    ),
    "no build_config": (
        "draft", lambda engine: edit_json(engine / "config.json", lambda v: v.pop("build_config")), "its config.json has no build_config",
    ),
    "no record": ("target", lambda engine: (engine / "specbuild.json").unlink(), "engine: it has no specbuild.json"),
    "another compiler": (
        "draft",
        lambda engine: edit_json(engine / "config.json", lambda v: v.update(specbuild={"compiler": "onnx-cpu"})),
        "engines of compilers onnx-cpu and tensorrt together",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("role", "fault", "message"), BROKEN.values(), ids=BROKEN)
def test_an_engine_directory_with_a_fault_is_not_packaged(pair, role, fault, message, tmp_path):
    config = pair("tp8-tp1")
    write_engines(config)
    fault(config.dir_of(role, "engine"))
    assert message in problem(run_package, config).replace(f"{tmp_path}/", "")
    assert not config.repository_dir.exists()


def test_b_01_more_drafted_tokens_than_the_engine_takes_are_refused(pair):
    config = pair("tp8-tp1")
    write_engines(config)
    edit_json(config.dir_of("target", "engine") / "config.json", lambda v: v["build_config"].update(max_draft_len=3))
    assert "draft_len 6: the target engine was built for at most 3" in problem(run_package, config)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"speculation": {"draft_len": 2}}, "made for draft_len 4"),
        ({"speculation": {"acceptance": "exact"}}, "made for rule 'rejection'"),
        ({"speculation": {"drafter": "ngram"}}, "made for drafter 'model'"),
        ({"build": {"compiler": "llmapi"}}, "made for compiler 'tensorrt'"),
        ({"build": {"compiler": "onnx-cpu"}}, "made for compiler 'tensorrt'"),
    ],
)
def test_a_repository_of_another_yaml_is_not_served(packaged, pair, sections, message):
    packaged("shared-gpu")
    assert message in problem(describe_serve, pair("shared-gpu", **sections), Ports(), "127.0.0.1")


def test_a_repository_of_engines_that_were_built_anew_is_not_served(packaged):
    config = packaged("shared-gpu")
    edit_json(config.dir_of("draft", "engine") / "specbuild.json", lambda v: v["inputs"].update(checkpoint="another"))
    text = problem(describe_serve, config, Ports(), "127.0.0.1")
    assert "draft/engine was made anew since. Run `specbuild run`." in text
    assert run_package(config)
    assert describe_serve(config, Ports(), "127.0.0.1")


def test_the_engines_in_the_repository_are_compared_with_the_machine(packaged, machine):
    """Those that were built may be elsewhere, or newer."""
    config = packaged("two-gpus")
    for role in ("target", "draft"):
        shutil.rmtree(config.dir_of(role, "engine"))
    machine(gpus=("NVIDIA L4, 8.9, 575.57.08",) * 2)
    assert "built for GPUs of compute capability 9.0, this machine has 8.9" in problem(run_serve, config, Ports(), "127.0.0.1")


def test_a_repository_that_lacks_an_engine_s_model_is_not_served(packaged):
    config = packaged("shared-gpu")
    shutil.rmtree(config.repository_dir / "draft")
    assert "it calls draft, no model of this repository" in problem(describe_serve, config, Ports(), "127.0.0.1")
    shutil.rmtree(config.repository_dir / "target")
    assert "it calls target, no model" in problem(check_repository, config.repository_dir)


@pytest.mark.parametrize("number", ["1,2", "0,0"])
def test_num_nodes_that_is_no_number_is_one_line(packaged, number):
    config = packaged("tp8-tp1-fast-logits", serving={"target_gpus": [0, 1, 2, 3] * 2})
    path = config.repository_dir / "target" / "config.pbtxt"
    path.write_text(path.read_text().replace('string_value: "2"', f'string_value: "{number}"'))
    assert "num_nodes" in problem(check_repository, config.repository_dir)


def test_the_printed_command_names_no_path_with_a_space(packaged, tmp_path):
    """The Python backend would not start its stubs there: `serve` makes a link first."""
    config = packaged("shared-gpu", workdir=str(tmp_path / "a b"))
    text = describe_serve(config, Ports(), "127.0.0.1")
    assert "--model-repository=REPOSITORY " in text
    assert text.startswith(f"# REPOSITORY: a link to {config.repository_dir}, made at the start\n")
    assert f"cd '{config.repository_dir}'" in text


def test_logits_of_two_widths_are_refused_for_rejection_alone(pair):
    sizes = {"target": {"tp": 8}, "draft": {"tp": 1}}
    for acceptance in ("rejection", "exact"):
        config = pair("tp8-tp1", **sizes, name=acceptance, speculation={"acceptance": acceptance})
        write_engines(config)
        for role in ("target", "draft"):
            edit_json(config.dir_of(role, "engine") / "config.json", lambda v: v["pretrained_config"].update(vocab_size=128255))
        if acceptance == "rejection":
            assert "their logits are {'target': 128256, 'draft': 128255} wide" in problem(run_package, config)
        else:
            assert run_package(config)


def test_padded_logits_are_refused_for_rejection_unless_they_stay_in_the_backend(pair):
    """Their columns behind the vocabulary are 0, which the loop's softmax would count and no engine draws."""
    for fast_logits in (False, True):
        sections = {"target": {"tp": 2}, "draft": {"tp": 2}, "serving": {"fast_logits": fast_logits}, "name": f"fast-{fast_logits}"}
        config = pair("tp8-tp1", **sections, speculation={"acceptance": "rejection"})
        write_engines(config)
        for role in ("target", "draft"):
            edit_json(config.dir_of(role, "engine") / "config.json", lambda v: v["pretrained_config"].update(vocab_size=128255))
        if fast_logits:
            assert run_package(config)
        else:
            assert "their logits are {'target': 128256, 'draft': 128256} wide" in problem(run_package, config)


# --- serving


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return make(**facts): put a machine's programs on PATH; `server` adds a tritonserver and an mpirun."""

    def make(server=True, **facts):
        bin_dir = fake_trtllm_build.install(tmp_path / "machine", **facts)
        if server:
            for name, text in (("tritonserver", TRITONSERVER), ("mpirun", MPIRUN)):
                fake_trtllm_build.write_program(bin_dir / name, f"#!{sys.executable}\n{text}")
        monkeypatch.setenv("PATH", f"{bin_dir}:/usr/bin:/bin")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.delenv("CUDA_VERSION", raising=False)
        return bin_dir

    return make


# What the two do that matters here: a server that is not the one that serves blocks, mpirun gives each process a group of its own.
TRITONSERVER = """
import http.server, json, os, sys, time
flags = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[1:])
seen = {"pid": os.getpid(), "flags": sys.argv[1:], "engine": os.path.exists("target/1/engine/config.json"),
        "mode": os.environ.get("TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES")}
with open(os.environ["SEEN"], "a") as file:
    file.write(json.dumps(seen) + "\\n")
if "model-control-mode" in flags:
    time.sleep(600)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"name": flags["id"]}).encode())

http.server.HTTPServer((flags["http-address"], int(flags["http-port"])), Handler).serve_forever()
"""
MPIRUN = """
import os, subprocess, sys
words, segments = sys.argv[2:], [[]]
for word in words:
    segments.append([]) if word == ":" else segments[-1].append(word)
children = [subprocess.Popen(segment[2:], preexec_fn=lambda: os.setpgid(0, 0)) for segment in segments]
for child in children:
    child.wait()
"""
H100_ROW = f"{H100}, 9.0, 575.57.08"


def find_ports():
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    numbers = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return numbers


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("case", "ranks", "mode"), [("tp8-tp1-fast-logits", 10, "0"), ("two-gpus", 1, "1"), ("ngram-tp2", 2, None)])
def test_serve_starts_all_ranks_in_the_repository_and_ends_them(case, ranks, mode, packaged, machine, tmp_path, monkeypatch):
    config = packaged(case)
    machine(gpus=(H100_ROW,) * 8)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.jsonl"))
    http, grpc, metrics = find_ports()
    words = ["--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]
    command = [sys.executable, "-c", "from specbuild.cli import main; main()", "serve", config.path, *words]
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().startswith("ready: gRPC")
        deadline = time.monotonic() + 20
        while len(rows := [json.loads(row) for row in (tmp_path / "seen.jsonl").read_text().splitlines()]) < ranks:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert err.endswith("stopping\nstopped\n")
    assert len(rows) == ranks
    assert all(row["engine"] and row["mode"] == mode for row in rows)
    assert sum("--model-control-mode=explicit" in row["flags"] for row in rows) == ranks - 1
    assert [row["pid"] for row in rows if is_alive(row["pid"])] == []


def test_serve_refuses_a_machine_that_lacks_something(packaged, machine):
    config = packaged("two-gpus")
    machine(server=False, gpus=(H100_ROW,) * 2)
    text = problem(run_serve, config, Ports(), "127.0.0.1")
    assert "no tritonserver on PATH or at /opt/tritonserver/bin/tritonserver and no mpirun on PATH" in text
    machine(gpus=(H100_ROW,))
    assert "placed on GPUs 0 to 1, this machine has 1" in problem(run_serve, config, Ports(), "127.0.0.1")
    machine(gpus=())
    assert "it has no NVIDIA GPU" in problem(run_serve, config, Ports(), "127.0.0.1")
    machine(gpus=("NVIDIA L4, 8.9, 575.57.08",) * 2)
    assert "built for GPUs of compute capability 9.0, this machine has 8.9" in problem(run_serve, config, Ports(), "127.0.0.1")


def test_the_pools_of_every_gpu_of_the_machine_are_emptied(packaged, machine):
    config = packaged("two-gpus")
    machine(gpus=(H100_ROW,) * 4)
    assert "--cuda-memory-pool-byte-size=3:0" in describe_serve(config, Ports(), "127.0.0.1")


def test_a_repository_that_is_not_there_or_was_made_for_other_gpus_is_not_served(pair, packaged):
    assert "it is not there" in problem(describe_serve, pair("shared-gpu"), Ports(), "127.0.0.1")
    packaged("two-gpus")
    changed = pair("two-gpus", serving={"target_gpus": [3]})
    assert "was made for serving" in problem(describe_serve, changed, Ports(), "127.0.0.1")


def test_the_printed_command_runs_in_a_shell(packaged, machine, tmp_path, monkeypatch):
    config = packaged("ngram-tp2")
    machine(gpus=(H100_ROW,) * 2)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.jsonl"))
    text = describe_serve(config, Ports(*find_ports()), "127.0.0.1")
    process = subprocess.Popen(["sh", "-c", text], cwd="/", start_new_session=True)
    try:
        deadline = time.monotonic() + 20
        while not (tmp_path / "seen.jsonl").exists() or len((tmp_path / "seen.jsonl").read_text().splitlines()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        for row in (tmp_path / "seen.jsonl").read_text().splitlines():
            os.kill(json.loads(row)["pid"], signal.SIGKILL)
        process.wait(20)
    assert all(json.loads(row)["engine"] for row in (tmp_path / "seen.jsonl").read_text().splitlines())


def test_dry_run_of_onnx_cpu_prints_the_command_too(tiny_pair, tmp_path, monkeypatch, cli):
    config = tiny_pair.model_copy(update={"workdir": str(tmp_path / "work")})
    shutil.copytree(tiny_pair.work_dir, tmp_path / "work")
    run_package(config)
    binary = tmp_path / "bin" / "tritonserver"
    binary.parent.mkdir()
    fake_trtllm_build.write_program(binary, "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(binary.parent))
    text = describe_serve(config, Ports(), "127.0.0.1")
    assert f"{binary} --model-repository={config.repository_dir} --disable-auto-complete-config" in text
    assert "mpirun" not in text
    assert "TRTLLM" not in text
