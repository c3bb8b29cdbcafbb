"""The deploy stage: a pair's YAML to the files that run it somewhere, and what to do with them."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specbuild.artifacts import is_local
from specbuild.check import check_names
from specbuild.config import ROLES, PairConfig
from specbuild.deploying import TARGETS
from specbuild.deploying.deployment import LOAD_SECONDS, Deployment, make_image, make_name, relative_to_work, shm_gib
from specbuild.deploying.placement import make_placement
from specbuild.errors import ConfigError
from specbuild.planning.hardware import DRIVER_NAMES
from specbuild.progress import log
from specbuild.provenance import locked, new_directory, new_parents

FIRST_LINE = "# Written by `specbuild deploy`."


@dataclass(frozen=True)
class Options:
    """What the command line says of where a pair is deployed."""

    to: str
    out: Path | None = None
    image: str | None = None
    gpus_per_node: int = 8
    gpu_product: str | None = None
    namespace: str | None = None
    storage: str | None = None


def run_deploy(config: PairConfig, options: Options) -> str | None:
    """Write the files into `out`, or return them as one text; say on stderr what to run next."""
    deployment = make_deployment(config, options)
    target = TARGETS[options.to]
    files = target.make_files(deployment)
    if options.out is not None:
        write_files(options.out, {name: format_documents(documents) for name, documents in files.items()})
        log(f"{options.out} written: {', '.join(files)}")
    head = "next:" if options.out is not None else "next, once they are written with --out DIR:"
    log("\n  ".join([head, *target.describe_steps(deployment, shlex.quote(str(options.out or "DIR")))]))
    return None if options.out is not None else format_documents([document for documents in files.values() for document in documents])


def make_deployment(config: PairConfig, options: Options) -> Deployment:
    """Return what is deployed; raise ConfigError at the first thing that cannot work."""
    check_names(config)
    if config.build.compiler not in LOAD_SECONDS:
        raise ConfigError(f"Cannot deploy compiler {config.build.compiler}: the images hold {' and '.join(LOAD_SECONDS)}. Use one of them.")
    config_path = find_config_path(config)
    relative_to_work("workdir", config.work_dir)
    for what, value, pattern in (
        ("--namespace", options.namespace, r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"),
        ("--storage", options.storage, r"[1-9]\d*(Mi|Gi|Ti)"),
        ("--gpu-product", options.gpu_product, r"[A-Za-z0-9]([\w.-]{0,61}[A-Za-z0-9])?"),
    ):
        if value is not None and not re.fullmatch(pattern, value):
            raise ConfigError(f"Cannot deploy with {what} {value!r}: expected a value like {_EXAMPLES[what]}.")
    placement = make_placement(config, options.gpus_per_node)
    return Deployment(
        name=make_name(config), config_path=config_path, inputs=tuple(dict.fromkeys([config_path, *local_inputs(config)])),
        compiler=config.build.compiler,
        image=make_image(options.image, config.build.compiler), placement=placement, shm_gib=shm_gib(config, placement),
        gpu_product=find_product(config, options), namespace=options.namespace, storage=options.storage or "100Gi",
        mount=os.path.relpath(Path.cwd(), options.out or ".").replace("$", "$$"),  # compose reads a lone $ as a variable
    )  # fmt: skip


_EXAMPLES = {"--namespace": "inference", "--storage": "100Gi", "--gpu-product": "NVIDIA-L40S"}


def find_config_path(config: PairConfig) -> str:
    """Return the YAML's path below the current directory, however it was given."""
    return relative_to_work("config", Path(os.path.relpath(config.path)))


def local_inputs(config: PairConfig) -> Iterator[str]:
    """Yield the files and directories of the YAML that are here, as they are below /work; others are hub ids, or on the volume already."""
    beside = config.path.parent
    for role in ROLES:
        model = config.model_of(role)
        calibration = model.quantize.calibration
        texts = (calibration.data if calibration and calibration.data != "builtin" else None, model.quantize.quality.data)
        source = model.model if is_local(model, config.path) or model.model.startswith((".", "/", "~")) else None
        for path in (source, model.merge_lora, *texts):
            if path is not None:
                relative = relative_to_work(f"the {role} with", Path(os.path.expanduser(path)), beside)  # noqa: PTH111
                if (beside / path).exists():
                    yield relative


def find_product(config: PairConfig, options: Options) -> str | None:
    """Return the label of the nodes that may build and serve; raise ConfigError where Kubernetes would choose any."""
    if config.build.compiler != "tensorrt":
        if options.gpu_product is not None:
            raise ConfigError(f"Cannot use --gpu-product {options.gpu_product!r}: compiler onnx-cpu needs no GPU. Leave it out.")
        return None
    gpu = config.serving.gpu
    if gpu is not None and gpu not in DRIVER_NAMES:
        raise ConfigError(f"Cannot deploy on serving.gpu {gpu!r}: expected one of {', '.join(DRIVER_NAMES)}.")
    # NVIDIA's GPU feature discovery labels a node with its driver's name of the product, dashes for spaces.
    product = options.gpu_product or (DRIVER_NAMES[gpu][0].replace(" ", "-") if gpu else None)
    if product is None and options.to == "kubernetes":
        raise ConfigError(
            "Cannot deploy TensorRT engines to kubernetes: they load only on the GPU generation that built them, and nothing says which "
            "nodes have it. Set serving.gpu, or give --gpu-product (the label nvidia.com/gpu.product of a node)."
        )
    return product


def format_documents(documents: list[dict[str, Any]]) -> str:
    """Return documents as one YAML text."""
    texts = [yaml.safe_dump(document, sort_keys=False, width=120) for document in documents]
    return f"{FIRST_LINE}\n" + "---\n".join(texts)


def write_files(out: Path, texts: dict[str, str]) -> None:
    """Write a directory of files at once; raise ConfigError for one that holds anything else than such files."""
    foreign = [path for path in sorted(out.iterdir()) if not was_written_here(path)] if out.is_dir() else []
    if foreign or (out.exists() and not out.is_dir()) or out.resolve() == Path.cwd():
        what = f"it holds {foreign[0].name}" if foreign else "it is no directory for this alone"
        raise ConfigError(f"Cannot write {out}: {what}, expected one that only `specbuild deploy` writes. Give another one with --out.")
    final = out.resolve()
    with new_parents(final), locked(final), new_directory(final) as partial:
        for name, text in texts.items():
            (partial / name).write_text(text, encoding="utf-8")


def was_written_here(path: Path) -> bool:
    """Tell whether a file is one of ours: what is stale among them must go, or `kubectl apply -f` would apply it."""
    if path.suffix != ".yaml" or not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline(200).decode(errors="replace").startswith(FIRST_LINE)
