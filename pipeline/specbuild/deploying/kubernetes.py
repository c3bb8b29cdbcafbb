"""Kubernetes manifests: a claim, a pod to fill it through, a Job that builds, a server, its Service and a PodMonitor."""

from __future__ import annotations

import shlex
from typing import Any

from specbuild.deploying import leader_worker_set
from specbuild.deploying.deployment import Deployment
from specbuild.deploying.pod import PORT_NAMES, VOLUME, make_container, make_metadata, make_pod, make_server, select

Document = dict[str, Any]


def make_files(deployment: Deployment) -> dict[str, list[Document]]:
    """Return the manifests by file name, in the order in which they are applied."""
    if deployment.placement.nodes > 1:
        server = {"leaderworkerset.yaml": leader_worker_set.make_documents(deployment)}
    else:
        server = {"deployment.yaml": [make_deployment(deployment)]}
    return {
        "pvc.yaml": [make_claim(deployment)],
        "files-pod.yaml": [make_files_pod(deployment)],
        "build-job.yaml": [make_build_job(deployment)],
        **server,
        "service.yaml": [make_service(deployment)],
        "podmonitor.yaml": [make_pod_monitor(deployment)],
    }


def make_claim(deployment: Deployment) -> Document:
    """Return the claim on the volume that every pod sees as /work; several nodes need one that all can mount."""
    mode = "ReadWriteMany" if deployment.placement.nodes > 1 else "ReadWriteOnce"
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": deployment.storage}}}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": make_metadata(deployment, "volume", name=deployment.name),
        "spec": spec,
    }


def make_files_pod(deployment: Deployment) -> Document:
    """Return a pod that waits, for copying a config and its models to the claim."""
    container = {**make_container(deployment, "files", ["86400"]), "command": ["sleep"]}
    pod = {**make_pod(deployment, container, on_gpu=False), "restartPolicy": "Never"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": make_metadata(deployment, "files"), "spec": pod}


def make_build_job(deployment: Deployment) -> Document:
    """Return the Job that runs all stages on the kind of GPU that serves: an engine loads on no other generation."""
    container = make_container(deployment, "build", deployment.build_arguments)
    token = {"name": f"{deployment.name}-hub", "key": "token", "optional": True}  # only models that the hub does not give to everybody
    container["env"].append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": token}})
    pod = {**make_pod(deployment, container), "restartPolicy": "Never"}
    template = {"metadata": {"labels": make_metadata(deployment, "build")["labels"]}, "spec": pod}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": make_metadata(deployment, "build"),
        "spec": {"backoffLimit": 1, "template": template},  # a stage that was done is skipped the second time
    }


def make_deployment(deployment: Deployment) -> Document:
    """Return the Deployment of a server on one node. A new pod waits for the old one's end: it needs the same GPUs and the same volume."""
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "progressDeadlineSeconds": deployment.load_seconds + 600,  # after the load, the time that pulling the image may take
        "selector": {"matchLabels": select(deployment)},
        "template": {"metadata": {"labels": make_metadata(deployment, "server")["labels"]}, "spec": make_server(deployment)},
    }
    metadata = make_metadata(deployment, "server", name=deployment.name)
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def make_service(deployment: Deployment) -> Document:
    """Return the Service that clients reach inside the cluster. Its name is not the server's: a LeaderWorkerSet makes one of that name."""
    ports = [{"name": name, "port": port, "targetPort": name, "appProtocol": protocol} for name, (port, protocol) in PORT_NAMES.items()]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": make_metadata(deployment, "triton"),
        "spec": {"type": "ClusterIP", "selector": select(deployment), "ports": ports},
    }


def make_pod_monitor(deployment: Deployment) -> Document:
    """Return what makes the Prometheus operator read the server's metrics."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": make_metadata(deployment, "server", name=deployment.name),
        "spec": {
            "selector": {"matchLabels": select(deployment)},
            "podMetricsEndpoints": [{"port": "metrics", "path": "/metrics", "interval": "15s"}],
        },
    }


def describe_steps(deployment: Deployment, where: str) -> list[str]:
    """Return the commands from an image to an answer."""
    kubectl = "kubectl" if deployment.namespace is None else f"kubectl -n {deployment.namespace}"
    several = deployment.placement.nodes > 1
    server = "leaderworkerset.yaml" if several else "deployment.yaml"
    kind = "gpu" if deployment.placement.gpus else "cpu"
    return [
        f"docker build --target {kind} -t {deployment.image} .    # in a checkout of specbuild; push it where the nodes pull from",
        *(leader_worker_set.describe_secret(deployment, kubectl) if several else []),
        f"{kubectl} apply -f {where}/pvc.yaml -f {where}/files-pod.yaml",
        f"{kubectl} wait --for=condition=ready --timeout=10m pod/{deployment.name}-files",
        f"tar ch {shlex.join(deployment.inputs)} | {kubectl} exec -i {deployment.name}-files -- tar x -C {VOLUME['mountPath']}",
        f"{kubectl} delete -f {where}/files-pod.yaml",
        f"{kubectl} delete --ignore-not-found -f {where}/build-job.yaml",
        f"{kubectl} apply -f {where}/build-job.yaml",
        f"{kubectl} wait --for=condition=complete --timeout=6h job/{deployment.name}-build",
        f"{kubectl} apply -f {where}/{server} -f {where}/service.yaml",
        f"{kubectl} apply -f {where}/podmonitor.yaml    # with the Prometheus operator",
        f"{kubectl} port-forward service/{deployment.name}-triton 8000 8001",
    ]
