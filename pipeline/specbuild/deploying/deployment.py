"""What a deployment is, whatever it is written for: names, image, command, shared memory, times, and who the process runs as."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbuild import __version__
from specbuild.config import PairConfig
from specbuild.errors import ConfigError
from specbuild.triton.server import GRACE_SECONDS, Ports

if TYPE_CHECKING:
    from specbuild.deploying.placement import Placement

WORK = "/work"  # what the container sees of the directory that CONFIG and workdir are relative to
USER = 10001  # of the Dockerfile
PORTS = Ports()
STOP_SECONDS = GRACE_SECONDS + 20  # SIGTERM, the server's own grace time, and the kernel's for giving GPU memory back
# A server that loads is alive and not ready. GPU: 400 GB of engines from a network disk at 250 MB/s; CPU: 297 M parameters take seconds.
LOAD_SECONDS = {"tensorrt": 1800, "onnx-cpu": 300}
ENVIRONMENT = {"HOME": "/tmp", "USER": "specbuild", "HF_HOME": f"{WORK}/.cache/huggingface"}
_LARGEST_VOCABULARY = 262_144  # Gemma 3; the YAML does not say it, and the models need not be here
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"  # of an image's path, as registries define a reference
_IMAGE = re.compile(
    rf"(?:[A-Za-z0-9][A-Za-z0-9.-]*(?::\d+)?/)?{_PART}(?:/{_PART})*(?::(?P<tag>\w[\w.-]{{0,127}}))?(?P<digest>@sha256:[0-9a-f]{{64}})?",
    re.A,
)
_MIB, _GIB = 2**20, 2**30
_NCCL_BYTES = _GIB  # of a rank that talks to others: what NVIDIA's containers ask for (`--shm-size=1g`)


@dataclass(frozen=True)
class Deployment:
    """One pair as it is deployed."""

    name: str  # a DNS label
    config_path: str  # relative to WORK
    inputs: tuple[str, ...]  # files and directories that the pair is made of, relative to WORK
    compiler: str
    image: str
    placement: Placement
    shm_gib: int
    gpu_product: str | None
    namespace: str | None
    storage: str
    mount: str  # compose: the host's directory for WORK

    @property
    def load_seconds(self) -> int:
        return LOAD_SECONDS[self.compiler]

    @property
    def serve_arguments(self) -> list[str]:
        """The arguments of the server; its own time-out must not end a load that the probes still allow."""
        return ["serve", self.config_path, "--address", "0.0.0.0", "--timeout", str(self.load_seconds)]

    @property
    def build_arguments(self) -> list[str]:
        """The arguments of the build: all stages, those that are up to date skipped, on the kind of machine that serves."""
        return ["run", self.config_path]


@dataclass(frozen=True)
class Target:
    """One way to deploy: its files by name, each a list of YAML documents, and what to run next."""

    make_files: Callable[[Deployment], dict[str, list[dict[str, Any]]]]
    describe_steps: Callable[[Deployment, str], list[str]]


def make_name(config: PairConfig) -> str:
    """Return the name of all objects: a DNS label short enough for what controllers append to it."""
    word = re.sub(r"[^a-z0-9-]+", "-", config.name.lower()).strip("-")
    if not word or len(word) > 30:
        raise ConfigError(f"Cannot deploy {config.name!r}: expected a name of at most 30 letters, digits and dashes. Shorten `name`.")
    return f"specbuild-{word}"


def make_image(image: str | None, compiler: str) -> str:
    """Return the image; raise ConfigError for one without a fixed version."""
    if image is None:
        return f"specbuild:{__version__}-{'gpu' if compiler == 'tensorrt' else 'cpu'}"
    reference = _IMAGE.fullmatch(image)
    if reference is None or (reference["digest"] is None and reference["tag"] in (None, "latest")):
        raise ConfigError(f"Cannot deploy image {image!r}: expected a fixed version, as NAME:TAG (not latest) or NAME@sha256:DIGEST.")
    return image


def shm_gib(config: PairConfig, placement: Placement) -> int:
    """Return the size of /dev/shm in GiB: tensors between Triton's models, and NCCL's and MPI's buffers between ranks.

    A model in Python keeps its tensors there, from 1 MiB on (4 models, 64 MiB cover them). A request whose draft is judged by logits
    passes draft_len rows of them twice, to the loop and from it, in float32; with fast logits they do not pass.
    """
    tensors = 64 * _MIB
    if config.speculation.acceptance == "rejection" and config.speculation.drafter == "model" and not config.serving.fast_logits:
        tensors += 2 * config.build.max_batch_size * config.max_draft_len * _LARGEST_VOCABULARY * 4
    between = placement.ranks * _NCCL_BYTES if placement.ranks > 1 else 0
    return math.ceil((tensors + between) / _GIB)


def relative_to_work(what: str, path: Path, beside: Path = Path()) -> str:
    """Return a path of the YAML or the command line, relative to `beside`, as it is below WORK; raise ConfigError where it is not below."""
    root = WORK if path.is_absolute() else str(Path.cwd())
    relative = os.path.relpath(os.path.abspath(beside / path), root)  # noqa: PTH100  no link is followed: the container has its own
    if relative.split("/")[0] == ".." or "$" in relative:  # both targets would read a $ as a variable
        raise ConfigError(
            f"Cannot deploy {what} {path}: the container sees only what is below the current directory, as {WORK}. Run this in a directory "
            f"that holds it, and name it by a relative path without $ (or one below {WORK})."
        )
    return relative
