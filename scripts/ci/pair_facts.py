#!/usr/bin/env python3
"""Print what a CI step has to know of a pair, one line. usage: pair_facts.py name|workdir|container|key|machine CONFIG

key: digest of what its engines are built from, the same wherever and whenever the same checkpoints are made. container: the image that
builds and serves them. machine: what else an engine depends on, of the machine that this runs on.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from specbuild import __version__
from specbuild.artifacts import TllmCheckpoint
from specbuild.build import build_parameters
from specbuild.compilers.trtllm_machine import find_machine
from specbuild.config import ROLES, PairConfig, load_config
from specbuild.errors import SpecbuildError
from specbuild.lock import IMAGES, digest_named, load_lock, lock_path


def make_key(config: PairConfig) -> str:
    """Return the digest of both quantized checkpoints, of what they are built for, and of the image that builds.

    The checkpoints' bytes, not their specbuild.json: that holds the times of large source files, which every download sets anew.
    """
    parts: dict[str, object] = {"specbuild": __version__, "container": make_container(config)}
    for role in ROLES:
        source = TllmCheckpoint.open(config.dir_of(role, "quantized"))
        files = digest_named([source.directory / "config.json", *source.rank_files], role, lambda path: path.name)
        parts[role] = {"files": files, "build": build_parameters(config, role, source.shape)}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def make_container(config: PairConfig) -> str:
    """Return the image, by its digest where the lock has one; "none" for a compiler that needs none."""
    image = IMAGES.get(config.build.compiler, "none")
    pins = load_lock(config).container if lock_path(config).exists() else None
    return f"{image}@{pins.digest}" if pins is not None and pins.image == image and pins.digest else image


def describe_machine(config: PairConfig) -> str:
    """Return "any" for engines that run anywhere, else the GPU's compute capability and the versions that an engine is tied to."""
    if config.build.compiler != "tensorrt":
        return "any"
    machine = find_machine()
    return f"cc{machine.compute_capability}-trtllm{machine.tensorrt_llm}-trt{machine.tensorrt}"


FACTS = {
    "name": lambda config: config.name,
    "workdir": lambda config: str(config.work_dir),
    "container": make_container,
    "key": make_key,
    "machine": describe_machine,
}


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] not in FACTS:
        print(str(__doc__).split("\n\n")[0], file=sys.stderr)
        return 2
    try:
        print(FACTS[arguments[0]](load_config(Path(arguments[1]))))
    except SpecbuildError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
