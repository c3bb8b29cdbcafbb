"""specbuild deploy: every manifest by the published schemas, what they say of each other, and what cannot be deployed."""

import copy
import json
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from specbuild.cli import cli
from specbuild.config import load_config
from specbuild.deploy import Options, make_deployment, run_deploy
from specbuild.deploying import TARGETS
from specbuild.deploying.deployment import LOAD_SECONDS, STOP_SECONDS, Deployment
from specbuild.errors import ConfigError
from specbuild.placement import choose_devices, make_participants
from specbuild.planning.hardware import DRIVER_NAMES
from specbuild.triton.launch import find_launch
from specbuild.triton.server import GRACE_SECONDS
from specbuild.triton.trtllm_model import Place, make_trtllm_model

SCHEMAS = Path(__file__).parents[1] / "golden" / "schemas"
KUBERNETES = ("1.30", "1.37")  # the oldest that is still run widely, and the newest whose schemas are known
PAIR = {
    "name": "Llama_3.1-70b",
    "target": {"model": "models/target", "quantize": {"scheme": "int4_awq"}},
    "draft": {"model": "meta-llama/Llama-3.2-1B", "quantize": {"scheme": "int8_wo"}},
}
TENSORRT = {"build": {"compiler": "tensorrt"}, "serving": {"gpu": "h100"}}
NODE = list(range(8))
CASES = {  # name: (changes of the YAML, GPUs of a node, processes on each node)
    "cpu": ({}, 0, (1,)),
    "one GPU": (TENSORRT, 1, None),
    "two GPUs": ({**TENSORRT, "serving": {"gpu": "l4", "target_gpus": [0], "draft_gpus": [1]}}, 2, None),
    "tp 8 and 1": ({**TENSORRT, "target": {"tp": 8}}, 8, None),
    "ngram": ({**TENSORRT, "target": {"tp": 4}, "speculation": {"drafter": "ngram", "acceptance": "exact"}}, 4, None),
    # 1 serves, 1 is the draft's, 8 of the target's 16 ranks are on the first node (participant ids 1, then 2 to 17)
    "two nodes": ({**TENSORRT, "target": {"tp": 8, "pp": 2}, "serving": {"gpu": "h100", "fast_logits": True, "target_gpus": NODE * 2}}, 8,
                  (10, 8)),
    "three nodes": ({**TENSORRT, "target": {"tp": 2, "pp": 3}, "draft": {"tp": 2},
                     "serving": {"gpu": "a100-80", "fast_logits": True, "target_gpus": [0, 1] * 3}}, 2, (5, 2, 2)),
}  # fmt: skip
SEVERAL = ("two nodes", "three nodes")


def merged(values, changes):
    values = copy.deepcopy(values)
    for key, value in changes.items():
        values[key] = merged(values[key], value) if isinstance(value, dict) and isinstance(values.get(key), dict) else value
    return values


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A directory with a local target in it, which is the current one; returns write(**changes) -> the config of the YAML."""
    (tmp_path / "configs" / "models" / "target").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    def write(**changes):
        Path("configs/pair.yaml").write_text(yaml.safe_dump(merged(PAIR, changes)))
        return load_config(Path("configs/pair.yaml"))

    return write


@pytest.fixture(params=CASES)
def case(request, project):
    """(name, config, GPUs of a node, processes on each node) of every case."""
    changes, gpus, processes = CASES[request.param]
    return request.param, project(**changes), gpus, processes


def documents_of(config, **options):
    return list(yaml.safe_load_all(run_deploy(config, Options("kubernetes", **options))))


def pods_of(documents):
    """(name, labels, spec) of every pod that the documents make."""
    pods = []
    for document in documents:
        spec, name = document.get("spec", {}), document["kind"]
        if name == "Pod":
            pods.append((name, document["metadata"]["labels"], spec))
        elif name in ("Deployment", "Job"):
            pods.append((name, spec["template"]["metadata"]["labels"], spec["template"]["spec"]))
        elif name == "LeaderWorkerSet":
            for part in ("leaderTemplate", "workerTemplate"):
                template = spec["leaderWorkerTemplate"][part]
                pods.append((part, template["metadata"]["labels"], template["spec"]))
    return pods


def containers_of(pod):
    return [*pod["containers"], *pod.get("initContainers", [])]


def check_schema(document, version="1.37"):
    """Validate a document by its published schema, unknown keys forbidden; pods in custom resources as Pods."""
    custom = {"LeaderWorkerSet": "leaderworkerset.json", "PodMonitor": "podmonitor.json"}
    if document["kind"] not in custom:
        kubernetes_validate.validate(document, version, strict=True)
        return
    jsonschema.validate(document, json.loads((SCHEMAS / custom[document["kind"]]).read_text()))
    for _, labels, spec in pods_of([document]):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"labels": labels}, "spec": spec}, version, strict=True
        )


@pytest.mark.parametrize("version", KUBERNETES)
def test_every_manifest_is_valid_by_the_kubernetes_schemas(case, version):
    documents = documents_of(case[1], namespace="inference")
    kinds = {document["kind"] for document in documents}
    assert kinds >= {"PersistentVolumeClaim", "Pod", "Job", "Service", "PodMonitor"}
    assert ("LeaderWorkerSet" in kinds) != ("Deployment" in kinds)
    for document in documents:
        check_schema(document, version)
        assert document["metadata"]["namespace"] == "inference"


@pytest.mark.parametrize("kind", ["Deployment", "LeaderWorkerSet", "Job", "Service", "PodMonitor", "PersistentVolumeClaim", "Pod"])
def test_a_wrong_key_in_a_manifest_would_be_seen(project, kind):
    config = project(**CASES["two nodes" if kind == "LeaderWorkerSet" else "one GPU"][0])
    document = next(each for each in documents_of(config) if each["kind"] == kind)
    check_schema(document)
    document["spec"]["replica"] = 1
    with pytest.raises(jsonschema.ValidationError):
        check_schema(document)


def test_a_wrong_key_in_a_worker_s_container_would_be_seen(project):
    document = next(each for each in documents_of(project(**CASES["two nodes"][0])) if each["kind"] == "LeaderWorkerSet")
    document["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"][0]["arguments"] = []
    with pytest.raises(jsonschema.ValidationError):
        check_schema(document)


@pytest.mark.parametrize("name", [name for name in CASES if name not in SEVERAL])
def test_compose_is_valid_by_the_specification_s_schema(project, name):
    changes, gpus, _ = CASES[name]
    document = yaml.safe_load(run_deploy(project(**changes), Options("compose")))
    validator = jsonschema.Draft7Validator(json.loads((SCHEMAS / "compose-spec.json").read_text()))
    validator.validate(document)
    for service in document["services"].values():
        devices = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
        assert [device["count"] for device in devices] == ([gpus] if gpus else [])
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "latest" not in service["image"]
    assert document["services"]["server"]["volumes"][0]["read_only"] is True
    assert document["services"]["build"]["volumes"][0]["read_only"] is False
    document["services"]["server"]["shm"] = "1gb"
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(document)


def test_services_select_the_pods_that_serve_and_no_others(case):
    documents = documents_of(case[1])
    for kind, find in (("Service", lambda spec: spec["selector"]), ("PodMonitor", lambda spec: spec["selector"]["matchLabels"])):
        selector = find(next(document["spec"] for document in documents if document["kind"] == kind))
        chosen = [name for name, labels, _ in pods_of(documents) if selector.items() <= labels.items()]
        assert chosen == ["leaderTemplate" if case[0] in SEVERAL else "Deployment"]
    for document in documents:
        if document["kind"] == "Deployment":
            assert document["spec"]["selector"]["matchLabels"].items() <= document["spec"]["template"]["metadata"]["labels"].items()
        assert set(document["metadata"]["labels"]) >= {
            f"app.kubernetes.io/{key}" for key in ("name", "instance", "component", "managed-by")
        }


def test_ports_that_are_named_are_the_server_s(case):
    documents = documents_of(case[1])
    server = next(pod for name, _, pod in pods_of(documents) if name in ("Deployment", "leaderTemplate"))["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert ports == {"http": 8000, "grpc": 8001, "metrics": 8002}
    service = next(document for document in documents if document["kind"] == "Service")
    assert {port["targetPort"]: port["port"] for port in service["spec"]["ports"]} == ports
    monitor = next(document for document in documents if document["kind"] == "PodMonitor")
    assert [(each["port"], each["path"]) for each in monitor["spec"]["podMetricsEndpoints"]] == [("metrics", "/metrics")]
    paths = {name: server[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {
        "startupProbe": {"path": "/v2/health/ready", "port": "http"},
        "readinessProbe": {"path": "/v2/health/ready", "port": "http"},
        "livenessProbe": {"path": "/v2/health/live", "port": "http"},
    }


def test_what_pods_mount_is_there(case):
    documents = documents_of(case[1])
    there = {(document["kind"], document["metadata"]["name"]) for document in documents}
    steps = " ".join(TARGETS["kubernetes"].describe_steps(make_deployment(case[1], Options("kubernetes")), "DIR"))
    for name, _, pod in pods_of(documents):
        for volume in pod["volumes"]:
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in there
            elif "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in there
            elif "secret" in volume:
                assert f"create secret generic {volume['secret']['secretName']} " in steps
            else:
                assert set(volume) == {"name", "emptyDir"}
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for container in containers_of(pod) for mount in container["volumeMounts"]} <= volumes, name


def test_no_pod_has_rights(case):
    for _, _, pod in pods_of(documents_of(case[1])):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
        for container in containers_of(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
            }  # fmt: skip
            assert not container["image"].endswith(":latest")
            assert ":" in container["image"]


def test_gpus_are_asked_for_where_engines_are_built_and_served(case):
    _, config, gpus, _ = case
    product = DRIVER_NAMES[config.serving.gpu][0].replace(" ", "-") if config.serving.gpu else None
    for kind, _, pod in pods_of(documents_of(config)):
        limits = pod["containers"][0].get("resources", {}).get("limits", {})
        if kind == "Pod" or not gpus:  # the pod that files go through needs none
            assert limits == {}
            assert "nodeSelector" not in pod
        else:
            assert limits == {"nvidia.com/gpu": gpus}
            assert pod["nodeSelector"] == {"nvidia.com/gpu.product": product}


@pytest.mark.parametrize(
    ("gpu", "label"),
    [
        ("h100", "NVIDIA-H100-80GB-HBM3"),
        ("a100-80", "NVIDIA-A100-SXM4-80GB"),
        ("l40s", "NVIDIA-L40S"),
        ("rtx4090", "NVIDIA-GeForce-RTX-4090"),
    ],
)
def test_nodes_are_chosen_by_the_label_of_gpu_feature_discovery(project, gpu, label):
    config = project(**merged(TENSORRT, {"serving": {"gpu": gpu}}))
    assert make_deployment(config, Options("kubernetes")).gpu_product == label
    assert make_deployment(config, Options("kubernetes", gpu_product="NVIDIA-A10G")).gpu_product == "NVIDIA-A10G"


def test_b03_the_engines_are_built_on_the_gpus_that_serve_them(project):
    with pytest.raises(ConfigError, match=r"load only on the GPU generation that built them.* --gpu-product"):
        run_deploy(project(build={"compiler": "tensorrt"}), Options("kubernetes"))
    job, server = (pod["nodeSelector"] for name, _, pod in pods_of(documents_of(project(**TENSORRT))) if name != "Pod")
    assert job == server


def test_a_load_may_take_as_long_as_the_server_s_own_time_out(case):
    server = next(pod for name, _, pod in pods_of(documents_of(case[1])) if name in ("Deployment", "leaderTemplate"))
    container = server["containers"][0]
    timeout = int(container["args"][container["args"].index("--timeout") + 1])
    assert timeout == container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
    assert timeout == LOAD_SECONDS[case[1].build.compiler]
    assert server["terminationGracePeriodSeconds"] == STOP_SECONDS > GRACE_SECONDS


@pytest.mark.parametrize("name", SEVERAL)
def test_the_processes_of_several_nodes_have_slots_in_the_order_of_their_ranks(project, name):
    changes, _, processes = CASES[name]
    documents = documents_of(project(**changes), namespace="inference")
    lines = next(each for each in documents if each["kind"] == "ConfigMap")["data"]["hostfile"].splitlines()
    workers = next(each for each in documents if each["kind"] == "LeaderWorkerSet")
    assert workers["spec"]["leaderWorkerTemplate"]["size"] == len(lines) == len(processes)
    assert [int(line.split("slots=")[1]) for line in lines] == list(processes)
    target, draft = changes["target"], changes.get("draft", {"tp": 1})
    assert sum(processes) == 1 + draft["tp"] + target["tp"] * target["pp"]  # one orchestrator and every rank of both
    set_name = workers["metadata"]["name"]  # the controller names pod i of group 0 so, below a service of the set's name
    assert [line.split()[0] for line in lines] == ["localhost", *(f"{set_name}-0-{i}.{set_name}" for i in range(1, len(processes)))]
    assert set_name != next(each for each in documents if each["kind"] == "Service")["metadata"]["name"]


@pytest.mark.parametrize("name", SEVERAL)
def test_a_repository_for_several_nodes_says_what_the_manifests_say(project, name):
    """Upstream: device ids are distinct and below a node's GPUs, ids x num_nodes = ranks, and rank 0 holds no model."""
    changes, gpus, processes = CASES[name]
    config = project(**changes)
    devices = {role: choose_devices(config, role) for role in ("target", "draft")}
    participants = make_participants(devices)
    configs = {role: make_trtllm_model(role, Place(devices[role], participants[role], 64, 0.5), 8, fast_logits=True) for role in devices}
    target = {key: value.string_value for key, value in configs["target"].parameters.items()}
    assert target["gpu_device_ids"] == ",".join(map(str, range(gpus)))
    assert target["num_nodes"] == str(len(processes))
    assert "num_nodes" not in configs["draft"].parameters
    first = processes[0] - gpus  # the orchestrator and the draft's ranks come before the target's, on the first node
    assert target["participant_ids"] == ",".join(str(first + rank) for rank in range(gpus * len(processes)))
    assert find_launch(configs).world_size == sum(processes)


def test_several_nodes_share_one_volume_that_all_can_mount(project):
    for name, mode in (("two nodes", "ReadWriteMany"), ("one GPU", "ReadWriteOnce")):
        claim = next(each for each in documents_of(project(**CASES[name][0])) if each["kind"] == "PersistentVolumeClaim")
        assert claim["spec"]["accessModes"] == [mode]


SEVERAL_NODES = CASES["two nodes"][0]


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        (merged(TENSORRT, {"target": {"tp": 16}}), {},
         r"16 on one\. To spread it over 2 nodes, .*fast_logits.* write \[0, 1, 2, 3, 4, 5, 6, 7\] once"),
        (merged(TENSORRT, {"target": {"tp": 8}}), {"gpus_per_node": 6}, r"on nodes of 6 GPUs: the pair uses 8 on one\. Share GPUs"),
        (merged(TENSORRT, {"target": {"tp": 2}, "serving": {"target_gpus": [2, 3], "draft_gpus": [2]}}), {},
         r"on GPUs \[2, 3\]: a container numbers those it is given from 0, expected \[0, 1\]"),
        (merged(TENSORRT, {"target": {"tp": 2}, "serving": {"target_gpus": [0]}}), {}, r"the target on GPUs \[0\]: it has 2 ranks"),
        (merged(TENSORRT, {"draft": {"tp": 2}, "serving": {"draft_gpus": [0, 0]}}), {}, r"the draft on GPUs \[0, 0\]: it has 2 ranks"),
        (merged(TENSORRT, {"target": {"tp": 3}, "serving": {"target_gpus": [0, 1, 0]}}), {},
         r"\[0, 1, 0\]: it has 3 ranks"),
        (merged(SEVERAL_NODES, {"serving": {"fast_logits": False}}), {},
         r"expected a GPU of its own for each \(the target's again for each further node, with fast_logits\)"),
        (merged(SEVERAL_NODES, {"speculation": {"acceptance": "exact"}}), {}, r"fast_logits with acceptance exact"),
        (merged(SEVERAL_NODES, {"target": {"tp": 16, "pp": 1}, "serving": {"target_gpus": [0, 1] * 8, "draft_gpus": [2]}}), {},
         r"3 GPUs on the first and 2 on the others"),
        (merged(SEVERAL_NODES, {"target": {"tp": 3, "pp": 4}, "serving": {"target_gpus": [0, 1, 2, 3] * 3}}), {},
         r"tp 3 on nodes of 4 GPUs"),
        (merged(TENSORRT, {"serving": {"gpu": "h1000"}}), {}, r"serving\.gpu 'h1000': expected one of h100, "),
        (merged(TENSORRT, {"serving": {"gpu": "cpu"}}), {}, r"serving\.gpu 'cpu'"),
        ({"build": {"compiler": "gcc"}}, {}, r"compiler 'gcc'"),
        ({"name": "a" * 31}, {}, r"name of at most 30"),
        ({"name": "0" + "_" * 3}, {"image": "specbuild"}, r"image 'specbuild': expected a fixed version"),
        ({}, {"image": "registry.example:5000/specbuild"}, r"expected a fixed version"),
        ({}, {"image": "specbuild:latest"}, r"expected a fixed version"),
        ({}, {"image": "specbuild@sha256:12"}, r"expected a fixed version"),
        ({}, {"image": "-v:1"}, r"expected a fixed version"),
        ({}, {"image": "Specbuild::1"}, r"expected a fixed version"),
        ({}, {"namespace": "Inference"}, r"--namespace 'Inference'"),
        ({}, {"storage": "100 GB"}, r"--storage '100 GB'"),
        ({}, {"gpu_product": "NVIDIA L4"}, r"--gpu-product 'NVIDIA L4'"),
        ({}, {"gpu_product": "NVIDIA-L4"}, r"--gpu-product 'NVIDIA-L4': compiler onnx-cpu needs no GPU"),
        ({"workdir": "/scratch/pair"}, {}, r"workdir /scratch/pair: the container sees only"),
        ({"workdir": "../pair"}, {}, r"workdir \.\./pair"),
        ({"workdir": "build/$USER"}, {}, r"without \$"),
        ({"target": {"model": "../../models/llama"}}, {}, r"target with \.\./\.\./models/llama"),
        ({"draft": {"merge_lora": "/adapters/one"}}, {}, r"draft with /adapters/one"),
    ],
)  # fmt: skip
def test_what_cannot_be_deployed_is_one_line(project, changes, options, message):
    with pytest.raises(ConfigError, match=message) as error:
        run_deploy(project(**changes), Options("kubernetes", **options))
    assert "\n" not in str(error.value)


def test_compose_mounts_a_directory_with_a_dollar_as_it_is_named(project, monkeypatch, tmp_path):
    config = project()
    (tmp_path / "in$PWD").mkdir()
    monkeypatch.chdir(tmp_path / "in$PWD")
    deployment = make_deployment(config.model_copy(update={"path": Path("pair.yaml")}), Options("compose", out=tmp_path / "out"))
    assert deployment.mount == "../in$$PWD"  # compose's way of writing one $


def test_the_next_steps_quote_a_directory_with_spaces(project, capsys, tmp_path):
    run_deploy(project(), Options("compose", out=tmp_path / "my files"))
    assert f"-f '{tmp_path}/my files'/compose.yaml up" in capsys.readouterr().err


def test_compose_refuses_several_nodes(project):
    with pytest.raises(ConfigError, match="needs 2 nodes, compose runs on one"):
        run_deploy(project(**SEVERAL_NODES), Options("compose"))


def test_a_config_outside_the_current_directory_is_refused(project, monkeypatch, tmp_path):
    config = project()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="only what is below the current directory"):
        run_deploy(config.model_copy(update={"path": tmp_path / "configs" / "pair.yaml"}), Options("compose"))


def test_an_absolute_config_path_is_relative_in_the_container(project, tmp_path):
    config = project()
    deployment = make_deployment(config.model_copy(update={"path": tmp_path / "configs" / "pair.yaml"}), Options("compose"))
    assert deployment.serve_arguments[:2] == ["serve", "configs/pair.yaml"]


# By hand: 64 MiB of Triton's, 2 x batch x draft x 262144 x 4 bytes of logits, and 1 GiB for each of several ranks, rounded up.
@pytest.mark.parametrize(
    ("changes", "gib"),
    [
        ({"build": {"max_batch_size": 8}}, 1),  # 128 MiB of logits
        ({"build": {"max_batch_size": 64}}, 2),  # 1 GiB of logits, and 64 MiB
        ({"build": {"max_batch_size": 64}, "speculation": {"acceptance": "exact"}}, 1),
        ({"build": {"max_batch_size": 64, "max_draft_len": 16}}, 3),
        (merged(TENSORRT, {"target": {"tp": 8}}), 10),  # 9 ranks, and 192 MiB
        (SEVERAL_NODES, 10),  # 9 of the 17 ranks are on the fullest node; the logits do not pass
    ],
)
def test_shared_memory_is_what_passes_through_it(project, changes, gib):
    assert make_deployment(project(**changes), Options("kubernetes")).shm_gib == gib


def test_the_files_are_those_that_are_printed_and_the_steps_name_each_of_them(case, tmp_path):
    _, config, _, _ = case
    assert run_deploy(config, Options("kubernetes", out=tmp_path / "out")) is None
    files = {path.name: list(yaml.safe_load_all(path.read_text())) for path in (tmp_path / "out").iterdir()}
    printed = documents_of(config)
    order = TARGETS["kubernetes"].make_files(make_deployment(config, Options("kubernetes")))
    assert [document for file in order for document in files[file]] == printed
    steps = "\n".join(TARGETS["kubernetes"].describe_steps(make_deployment(config, Options("kubernetes")), "out"))
    assert {word.removeprefix("out/") for word in steps.split() if word.startswith("out/")} == set(files)
    assert "&id" not in "".join(path.read_text() for path in (tmp_path / "out").iterdir())  # no YAML anchors


def test_the_copied_files_are_all_that_a_build_reads(project, tmp_path):
    """The step's own tar command, into an empty directory: the YAML finds everything there."""
    for path in ("configs/adapter", "configs/models/text"):
        Path(path).mkdir()
    Path("configs/models/text/a.txt").write_text("text")
    Path("real").mkdir()
    Path("configs/models/link").symlink_to(tmp_path / "real")
    config = project(
        target={"merge_lora": "adapter", "quantize": {"calibration": {"data": "models/text"}, "quality": {"data": "models/text/a.txt"}}},
        draft={"model": "models/link"},
    )
    steps = TARGETS["kubernetes"].describe_steps(make_deployment(config, Options("kubernetes")), "DIR")
    tar = next(step for step in steps if step.startswith("tar "))
    (tmp_path / "volume").mkdir()
    pack, unpack = tar.split(" | ")
    subprocess.run(f"{pack} | tar x -C volume", shell=True, check=True, timeout=60)
    assert unpack.endswith("-- tar x -C /work")
    copied = sorted(path.relative_to("volume").as_posix() for path in Path("volume").rglob("*"))
    assert copied == [
        "configs", "configs/adapter", "configs/models", "configs/models/link", "configs/models/target", "configs/models/text",
        "configs/models/text/a.txt", "configs/pair.yaml",
    ]  # fmt: skip
    assert not Path("volume/configs/models/link").is_symlink()
    assert load_config(Path("volume/configs/pair.yaml")).target == config.target


def test_a_model_on_the_volume_is_not_copied(project):
    deployment = make_deployment(project(target={"model": "/work/models/llama"}), Options("kubernetes"))
    assert deployment.inputs == ("configs/pair.yaml",)


def test_written_again_what_is_stale_is_gone(project, tmp_path):
    out = tmp_path / "deploy" / "here"
    run_deploy(project(**SEVERAL_NODES), Options("kubernetes", out=out))
    assert (out / "leaderworkerset.yaml").exists()
    run_deploy(project(**TENSORRT), Options("kubernetes", out=out))
    assert (out / "deployment.yaml").exists()
    assert not (out / "leaderworkerset.yaml").exists()  # `kubectl apply -f DIR` would start it


@pytest.mark.parametrize("foreign", ["notes.txt", "values.yaml"])
def test_a_directory_with_other_files_is_left_alone(project, tmp_path, foreign):
    out = tmp_path / "deploy"
    out.mkdir()
    (out / foreign).write_text("kept: true\n")
    with pytest.raises(ConfigError, match=rf"Cannot write .*it holds {foreign}"):
        run_deploy(project(), Options("compose", out=out))
    assert [path.name for path in out.iterdir()] == [foreign]
    with pytest.raises(ConfigError, match="Cannot write"):
        run_deploy(project(), Options("compose", out=Path("configs/pair.yaml")))


def test_compose_mounts_the_directory_that_paths_are_relative_to(project, tmp_path):
    run_deploy(project(), Options("compose", out=Path("build/deploy")))
    source = yaml.safe_load(Path("build/deploy/compose.yaml").read_text())["services"]["server"]["volumes"][0]["source"]
    assert (Path("build/deploy") / source).resolve() == tmp_path.resolve()


def test_the_command_line(project, tmp_path):
    project()
    runner = CliRunner()
    done = runner.invoke(cli, ["deploy", "configs/pair.yaml", "--to", "compose", "--out", "out"])
    assert (done.exit_code, done.stdout) == (0, "")
    assert "docker compose -f out/compose.yaml up" in done.stderr
    printed = runner.invoke(cli, ["deploy", "configs/pair.yaml", "--to", "kubernetes"])
    assert printed.exit_code == 0
    assert [document["kind"] for document in yaml.safe_load_all(printed.stdout)][:2] == ["PersistentVolumeClaim", "Pod"]
    assert runner.invoke(cli, ["deploy", "configs/pair.yaml"]).exit_code == 2
    assert runner.invoke(cli, ["deploy", "configs/pair.yaml", "--to", "compose", "--namespace", "a"]).exit_code == 2


def test_no_secret_is_written(case):
    kinds = {document["kind"] for document in documents_of(case[1])}
    assert "Secret" not in kinds


def test_names_are_dns_labels_short_enough_for_what_controllers_append(case):
    deployment: Deployment = make_deployment(case[1], Options("kubernetes"))
    assert deployment.name == "specbuild-llama-3-1-70b"
    assert all(len(document["metadata"]["name"]) <= 52 for document in documents_of(case[1]))  # a Job's pod names add 11 to at most 63
