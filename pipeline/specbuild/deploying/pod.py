"""The parts of pods: a container without rights on the work volume, its probes, and the pod around it, on the right nodes."""

from __future__ import annotations

from typing import Any

from specbuild import __version__
from specbuild.deploying.deployment import ENVIRONMENT, PORTS, STOP_SECONDS, USER, WORK, Deployment

PRODUCT_LABEL = "nvidia.com/gpu.product"
GPU = "nvidia.com/gpu"
PORT_NAMES = {"http": (PORTS.http, "http"), "grpc": (PORTS.grpc, "kubernetes.io/h2c"), "metrics": (PORTS.metrics, "http")}
VOLUME = {"name": "work", "mountPath": WORK}
_PROBE_SECONDS = 10


def select(deployment: Deployment) -> dict[str, str]:
    """Return the labels by which the server's pods are found; those never change."""
    return {
        "app.kubernetes.io/name": "specbuild",
        "app.kubernetes.io/instance": deployment.name,
        "app.kubernetes.io/component": "server",
    }


def make_metadata(deployment: Deployment, component: str, name: str | None = None) -> dict[str, Any]:
    """Return an object's metadata with the labels that Kubernetes recommends; named after the deployment and its component."""
    labels = {
        **select(deployment),
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/version": __version__,
        "app.kubernetes.io/managed-by": "specbuild",
    }
    namespace = {} if deployment.namespace is None else {"namespace": deployment.namespace}
    return {"name": name or f"{deployment.name}-{component}", **namespace, "labels": labels}


def make_container(deployment: Deployment, name: str, arguments: list[str], read_only: bool = False) -> dict[str, Any]:
    """Return a container that writes to its memory, /tmp and, unless `read_only`, to the work volume."""
    return {
        "name": name,
        "image": deployment.image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["specbuild"],
        "args": arguments,
        "workingDir": WORK,
        "env": [{"name": key, "value": value} for key, value in ENVIRONMENT.items()],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {**VOLUME, **({"readOnly": True} if read_only else {})},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }


def make_pod(deployment: Deployment, container: dict[str, Any], on_gpu: bool = True) -> dict[str, Any]:
    """Return a pod of one container, which gets a node's GPUs where the deployment has any."""
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": deployment.name}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{deployment.shm_gib}Gi"}},
        ],
    }
    if on_gpu and deployment.placement.gpus:
        container["resources"] = {"limits": {GPU: deployment.placement.gpus}}
        pod["nodeSelector"] = {PRODUCT_LABEL: deployment.gpu_product}
        pod["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    return pod


def make_server(deployment: Deployment) -> dict[str, Any]:
    """Return the pod that serves: not ready while it loads, restarted only when it does not answer after that."""
    container = {
        **make_container(deployment, "triton", deployment.serve_arguments, read_only=True),
        "ports": [{"name": name, "containerPort": port} for name, (port, _) in PORT_NAMES.items()],
        "startupProbe": make_probe("/v2/health/ready", deployment.load_seconds // _PROBE_SECONDS),
        "readinessProbe": make_probe("/v2/health/ready", 3),
        "livenessProbe": make_probe("/v2/health/live", 3),
    }
    return {**make_pod(deployment, container), "terminationGracePeriodSeconds": STOP_SECONDS}


def make_probe(path: str, failures: int) -> dict[str, Any]:
    """Return a probe of the HTTP port."""
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": _PROBE_SECONDS,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
