"""compose.yaml: the server on one machine, and the build as a service of its own."""

from __future__ import annotations

from typing import Any

from specbuild.deploying.deployment import ENVIRONMENT, PORTS, STOP_SECONDS, WORK, Deployment
from specbuild.errors import ConfigError

USER = "SPECBUILD_USER"
_HEALTH = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{PORTS.http}/v2/health/ready', timeout=3)"


def make_files(deployment: Deployment) -> dict[str, list[dict[str, Any]]]:
    """Return compose.yaml; raise ConfigError for a pair that needs several machines."""
    if deployment.placement.nodes > 1:
        raise ConfigError(
            f"Cannot deploy to compose: the pair needs {deployment.placement.nodes} nodes, compose runs on one. Use --to kubernetes."
        )
    server = {
        **make_service(deployment, deployment.serve_arguments, read_only=True),
        "ports": [f"127.0.0.1:{port}:{port}" for port in PORTS.as_options().values()],  # Triton asks nobody who they are
        "healthcheck": {
            "test": ["CMD", "python3", "-c", _HEALTH],
            "interval": "10s",
            "timeout": "5s",
            "retries": 3,
            "start_period": f"{deployment.load_seconds}s",
        },
        "restart": "unless-stopped",
        "stop_grace_period": f"{STOP_SECONDS}s",
    }
    build = {**make_service(deployment, deployment.build_arguments, read_only=False), "profiles": ["build"], "restart": "no"}
    build["environment"]["HF_TOKEN"] = None  # the shell's, if it has one
    return {"compose.yaml": [{"name": deployment.name, "services": {"server": server, "build": build}}]}


def make_service(deployment: Deployment, arguments: list[str], read_only: bool) -> dict[str, Any]:
    """Return what both services have: one container without rights, which writes to its memory and, building, to the work directory."""
    service: dict[str, Any] = {
        "image": deployment.image,
        "entrypoint": ["specbuild"],
        "command": arguments,
        "working_dir": WORK,
        "user": f"${{{USER}:-1000:1000}}",  # the owner of the work directory: a bind mount keeps its owners
        "environment": dict(ENVIRONMENT),
        "volumes": [{"type": "bind", "source": deployment.mount, "target": WORK, "read_only": read_only}],
        "tmpfs": ["/tmp:mode=1777"],
        "shm_size": f"{deployment.shm_gib}gb",
        "init": True,
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
    }
    if deployment.placement.gpus:
        gpus = {"driver": "nvidia", "count": deployment.placement.gpus, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [gpus]}}}
        service["ulimits"] = {"memlock": -1, "stack": 67108864}  # pinned buffers of NCCL, as NVIDIA's containers ask for
    return service


def describe_steps(deployment: Deployment, where: str) -> list[str]:
    """Return the commands that build the image, build the pair and start the server."""
    kind = "gpu" if deployment.placement.gpus else "cpu"
    compose = f"docker compose -f {where}/compose.yaml"
    return [
        f"docker build --target {kind} -t {deployment.image} .    # in a checkout of specbuild",
        f"export {USER}=$(id -u):$(id -g)",
        f"{compose} run --rm build",
        f"{compose} up -d --wait --wait-timeout {deployment.load_seconds} server",
    ]
