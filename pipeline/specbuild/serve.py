"""The serve stage: Triton in the foreground on a packaged repository, until a signal ends it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from specbuild.artifacts import Engine
from specbuild.built import check_built, roles_needed
from specbuild.compilers import find_compiler
from specbuild.config import ROLES, PairConfig
from specbuild.errors import ServingError
from specbuild.progress import log
from specbuild.triton.server import Ports, Server


def run_serve(config: PairConfig, ports: Ports, address: str, timeout: float) -> None:
    """Serve `<workdir>/model_repository` until SIGINT or SIGTERM; raise ServingError when the server fails by itself."""
    check_engines(config)
    check_built(config, roles_needed(config))
    server = Server(check_packaged(config.repository_dir), ports, address, log=sys.stderr)
    try:
        server.start()
        server.wait_until_ready(timeout)
        click.echo(f"ready: gRPC {address}:{ports.grpc}, HTTP {address}:{ports.http}, metrics {address}:{ports.metrics}; stop with Ctrl-C")
        code = server.wait()
        raise ServingError(f"Triton ended with code {code} while serving; its log is above.")
    except KeyboardInterrupt:
        log("stopping")
    finally:
        server.stop()
    log("stopped")


def check_engines(config: PairConfig) -> None:
    """Raise EngineError when TensorRT engines were built that cannot be served on this machine."""
    for role in ROLES:
        engine_dir = config.dir_of(role, "engine")
        if config.build.compiler == "tensorrt" and engine_dir.is_dir():
            find_compiler("tensorrt").check_serving(Engine.open(engine_dir))


def check_packaged(repository: Path) -> Path:
    """Return the repository; raise ServingError when it was never packaged."""
    if not (repository / "specbuild.json").exists():
        raise ServingError(f"Cannot serve {repository}: it is not there. Run `specbuild package` first.")
    return repository
