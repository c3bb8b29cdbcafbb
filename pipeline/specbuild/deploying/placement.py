"""Where the ranks of a pair run: nodes and GPUs of each, from the YAML alone, as the TensorRT-LLM backend can use them.

The backend numbers devices within a node: the ids of a model are distinct, rank r takes the one at r modulo their number, and ids times
nodes are the ranks (upstream's WorldConfig and executor). So a YAML says how many nodes it means by naming each device once for each:
`target_gpus: [0, 1, 0, 1]` is two ranks on each of two nodes. Only ranks that mpirun starts can lie on another node, and those are with
fast logits alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from specbuild.config import PairConfig, roles_needed
from specbuild.errors import ConfigError
from specbuild.placement import check_fast_logits, choose_devices

ORCHESTRATOR = 1  # mpirun's process 0 serves and holds no rank


@dataclass(frozen=True)
class Placement:
    """GPUs of each node, and the processes that mpirun starts on each node where there are several; no GPUs: a CPU deployment."""

    gpus: int = 0
    processes: tuple[int, ...] = (1,)
    ranks: int = 1  # of both models on the fullest node

    @property
    def nodes(self) -> int:
        return len(self.processes)


def make_placement(config: PairConfig, gpus_per_node: int) -> Placement:
    """Return where the engines of a pair run; raise ConfigError where that cannot work."""
    if config.build.compiler != "tensorrt":
        return Placement()
    check_fast_logits(config)
    devices = {role: choose_devices(config, role) for role in roles_needed(config)}
    target, draft = tuple(dict.fromkeys(devices["target"])), devices.get("draft", ())
    nodes = len(devices["target"]) // len(target)
    used = sorted({*target, *draft})
    if used != list(range(len(used))):
        raise ConfigError(
            f"Cannot deploy on GPUs {used}: a container numbers those it is given from 0, expected {list(range(len(used)))}. Number "
            "serving.target_gpus and serving.draft_gpus so."
        )
    if len(used) > gpus_per_node:
        raise ConfigError(describe_overflow(config, len(used), gpus_per_node))
    if nodes > 1:
        check_nodes(config, len(target), len(used))
    first = ORCHESTRATOR + len(draft) + len(target)
    return Placement(len(used), (first, *[len(target)] * (nodes - 1)), len(target) + len(draft))


def describe_overflow(config: PairConfig, needed: int, gpus_per_node: int) -> str:
    """Say why a pair needs more GPUs than a node has, and how its YAML spreads it."""
    ranks = config.target.tp * config.target.pp
    failed = f"Cannot deploy on nodes of {gpus_per_node} GPUs: the pair uses {needed} on one."
    if ranks <= gpus_per_node or ranks % gpus_per_node:
        return f"{failed} Share GPUs between target and draft, choose tp x pp a multiple of {gpus_per_node}, or give --gpus-per-node."
    return (
        f"{failed} To spread it over {ranks // gpus_per_node} nodes, set serving.fast_logits: true, by which mpirun starts every rank, and "
        f"write {list(range(gpus_per_node))} once for each node into serving.target_gpus, as one list; or give --gpus-per-node."
    )


def check_nodes(config: PairConfig, target_gpus: int, used: int) -> None:
    """Raise ConfigError for a pair whose ranks cannot be spread over nodes."""
    if used > target_gpus:
        raise ConfigError(
            f"Cannot deploy on several nodes with {used} GPUs on the first and {target_gpus} on the others: every pod gets the same. Let "
            "the draft share GPUs with the target."
        )
    tp = config.target.tp
    if target_gpus % tp and tp % target_gpus:
        raise ConfigError(
            f"Cannot deploy tp {tp} on nodes of {target_gpus} GPUs: a tensor parallel group would lie across a node's border. Use a tp "
            f"that divides {target_gpus}, or a multiple of it."
        )
