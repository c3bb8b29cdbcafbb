"""The serve stage: Triton in the foreground on a packaged repository, until a signal ends it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from specbuild.artifacts import Engine
from specbuild.built import check_built
from specbuild.compilers import find_compiler
from specbuild.compilers.trtllm_machine import find_gpus
from specbuild.config import PairConfig, roles_needed
from specbuild.errors import ServingError
from specbuild.package import package_parameters
from specbuild.progress import log
from specbuild.provenance import check_input, check_parameters
from specbuild.triton.launch import find_launch
from specbuild.triton.llmapi_model import find_template
from specbuild.triton.repository import check_repository, load_configs
from specbuild.triton.server import Ports, Server
from specbuild.triton.trtllm_model import ENGINE_DIR

ALONE_SECONDS, ENGINES_SECONDS = 120, 1800  # until ready; TensorRT engines can be of hundreds of gigabytes


def run_serve(config: PairConfig, ports: Ports, address: str, timeout: float | None = None) -> None:
    """Serve `<workdir>/model_repository` until SIGINT or SIGTERM; raise ServingError when the server fails by itself."""
    if find_compiler(config.build.compiler).ENGINES:
        check_engines(config)
        check_built(config, roles_needed(config))
    else:
        find_template()
    server = make_server(config, ports, address)
    if server.launch.gpus:
        check_gpus(server.launch.gpus)
    try:
        server.start()
        server.wait_until_ready(timeout or (ENGINES_SECONDS if server.launch.gpus or server.launch.completes else ALONE_SECONDS))
        click.echo(f"ready: gRPC {address}:{ports.grpc}, HTTP {address}:{ports.http}, metrics {address}:{ports.metrics}; stop with Ctrl-C")
        code = server.wait()
        raise ServingError(f"Triton ended with code {code} while serving; its log is above.")
    except KeyboardInterrupt:
        log("stopping")
    finally:
        server.stop()
    log("stopped")


def describe_serve(config: PairConfig, ports: Ports, address: str) -> str:
    """Return the command that would be run; the engines need not be of this machine, nor Triton be on it."""
    return make_server(config, ports, address).describe()


def make_server(config: PairConfig, ports: Ports, address: str) -> Server:
    """Return the server of a packaged repository, not started; raise ServingError when Triton would not load it."""
    repository = check_packaged(config.repository_dir)
    check_parameters(repository, package_parameters(config), config.path)
    for role in roles_needed(config):
        check_input(repository, role, config.dir_of(role, "engine"))
    check_repository(repository)
    launch = find_launch(load_configs(repository), visible_gpus=len(find_gpus()) if config.build.compiler == "tensorrt" else 0)
    return Server(repository, ports, address, log=sys.stderr, launch=launch)


def check_engines(config: PairConfig) -> None:
    """Raise EngineError when an engine of the repository, which need not be the one last built, cannot be served on this machine."""
    for role in roles_needed(config):
        engine_dir = config.repository_dir / role / "1" / ENGINE_DIR
        if engine_dir.is_dir():
            engine = Engine.open(engine_dir)
            find_compiler(engine.compiler).check_serving(engine)


def check_gpus(needed: int) -> None:
    """Raise ServingError when this machine has fewer GPUs than the engines are placed on."""
    if (found := len(find_gpus())) < needed:
        raise ServingError(
            f"Cannot serve this repository: its engines are placed on GPUs 0 to {needed - 1}, this machine has {found}. Set "
            "serving.target_gpus and draft_gpus, and package again."
        )


def check_packaged(repository: Path) -> Path:
    """Return the repository; raise ServingError when it was never packaged."""
    if not (repository / "specbuild.json").exists():
        raise ServingError(f"Cannot serve {repository}: it is not there. Run `specbuild package` first.")
    return repository
