"""A server on several nodes: a LeaderWorkerSet whose leader starts the ranks on its workers by mpirun over ssh.

`specbuild serve` in the leader runs the mpirun command as it does on one machine; what differs is Open MPI's environment: which hosts have
how many slots, how to reach them, and which variables the processes there get. Workers run an sshd as the same user without rights, which
takes one key only; the same key proves the host, so that no host is trusted unseen.
"""

from __future__ import annotations

from typing import Any

from specbuild.deploying.deployment import Deployment
from specbuild.deploying.pod import make_container, make_metadata, make_pod, make_server

SSH_PORT = 2222  # above 1023: no right is needed to listen on it
_SSH, _HOSTS = "/etc/specbuild-ssh", "/etc/specbuild-hosts"
_SSH_OPTIONS = f"-p {SSH_PORT} -i {_SSH}/id -o IdentitiesOnly=yes -o StrictHostKeyChecking=yes -o UserKnownHostsFile={_SSH}/known_hosts"
_SSHD_OPTIONS = {
    "AuthorizedKeysFile": f"{_SSH}/authorized_keys",
    "PasswordAuthentication": "no",
    "KbdInteractiveAuthentication": "no",
    "UsePAM": "no",
    "StrictModes": "no",  # the key's files belong to root, and the group may read them: a secret's volume
    "PidFile": "none",
    # The image's environment, which a login does not have.
    "SetEnv": "PATH=$PATH LD_LIBRARY_PATH=$LD_LIBRARY_PATH ${OPAL_PREFIX:+OPAL_PREFIX=$OPAL_PREFIX}",
}
_SSHD = f"exec /usr/sbin/sshd -D -e -f /dev/null -p {SSH_PORT} -h {_SSH}/id " + " ".join(
    f'-o "{key}={value}"' for key, value in _SSHD_OPTIONS.items()
)
_OPEN_MPI = {  # of Open MPI 4, in the pinned container
    "OMPI_MCA_orte_default_hostfile": f"{_HOSTS}/hostfile",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",  # a worker is not found by the first part of its name
    "OMPI_MCA_plm_rsh_agent": "ssh",
    "OMPI_MCA_plm_rsh_args": _SSH_OPTIONS,
    "OMPI_MCA_mca_base_env_list": "HOME;USER;TRTLLM_ORCHESTRATOR;TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES",  # ssh hands none on
}


def make_documents(deployment: Deployment) -> list[dict[str, Any]]:
    """Return the list of hosts and the LeaderWorkerSet."""
    hosts = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": make_metadata(deployment, "hosts"),
        "data": {"hostfile": make_hostfile(deployment)},
    }
    template = {
        "size": deployment.placement.nodes,
        "restartPolicy": "RecreateGroupOnPodRestart",  # ranks that lost one of them do not find each other again
        "leaderTemplate": {"metadata": {"labels": make_metadata(deployment, "server")["labels"]}, "spec": make_leader(deployment)},
        "workerTemplate": {"metadata": {"labels": make_metadata(deployment, "worker")["labels"]}, "spec": make_worker(deployment)},
    }
    workers = {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": make_metadata(deployment, "server", name=deployment.name),
        "spec": {"replicas": 1, "startupPolicy": "LeaderCreated", "leaderWorkerTemplate": template},
    }
    return [hosts, workers]


def worker_hosts(deployment: Deployment) -> list[str]:
    """Return the host names that the LeaderWorkerSet gives to the workers of its one group."""
    return [f"{deployment.name}-0-{index}.{deployment.name}" for index in range(1, deployment.placement.nodes)]


def make_hostfile(deployment: Deployment) -> str:
    """Return Open MPI's hosts and slots; it fills them in order, so ranks lie as the YAML's devices say."""
    hosts = ["localhost", *worker_hosts(deployment)]
    return "".join(f"{host} slots={slots}\n" for host, slots in zip(hosts, deployment.placement.processes, strict=True))


def make_leader(deployment: Deployment) -> dict[str, Any]:
    """Return the leader's pod: it waits until every worker can be reached, then serves."""
    pod = make_server(deployment)
    add_volumes(pod, deployment)
    pod["containers"][0]["env"] += [{"name": key, "value": value} for key, value in _OPEN_MPI.items()]
    wait = f"for host in {' '.join(worker_hosts(deployment))}; do until (echo > /dev/tcp/$host/{SSH_PORT}); do sleep 2; done; done"
    first = make_container(deployment, "wait-for-workers", ["-c", wait])
    pod["initContainers"] = [{**first, "command": ["bash"], "volumeMounts": []}]
    return pod


def make_worker(deployment: Deployment) -> dict[str, Any]:
    """Return a worker's pod: an sshd, under which mpirun starts the ranks of this node."""
    container = {
        **make_container(deployment, "ranks", ["-c", _SSHD], read_only=True),
        "command": ["bash"],
        "ports": [{"name": "ssh", "containerPort": SSH_PORT}],
        "readinessProbe": {"tcpSocket": {"port": "ssh"}, "periodSeconds": 10},
        "livenessProbe": {"tcpSocket": {"port": "ssh"}, "periodSeconds": 10, "failureThreshold": 3},
    }
    pod = make_pod(deployment, container)
    add_volumes(pod, deployment)
    return pod


def add_volumes(pod: dict[str, Any], deployment: Deployment) -> None:
    """Give a pod the key and the list of hosts."""
    secret = {"secretName": f"{deployment.name}-ssh", "defaultMode": 0o440}
    pod["volumes"] += [{"name": "ssh", "secret": secret}, {"name": "hosts", "configMap": {"name": f"{deployment.name}-hosts"}}]
    mounts = [{"name": "ssh", "mountPath": _SSH, "readOnly": True}, {"name": "hosts", "mountPath": _HOSTS, "readOnly": True}]
    pod["containers"][0]["volumeMounts"] += mounts


def describe_secret(deployment: Deployment, kubectl: str) -> list[str]:
    """Return the commands that make the group's key; it is in no file of ours."""
    return [
        "ssh-keygen -q -t ed25519 -N '' -C '' -f specbuild-ssh",
        f"{kubectl} create secret generic {deployment.name}-ssh --from-file=id=specbuild-ssh --from-file=authorized_keys=specbuild-ssh.pub "
        '--from-literal=known_hosts="* $(cat specbuild-ssh.pub)"',
        "rm specbuild-ssh specbuild-ssh.pub",
    ]
