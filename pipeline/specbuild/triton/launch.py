"""How many Triton processes serve a repository, and the command that starts them; as upstream's launch_triton_server.py does it.

| the repository has | mode | processes |
| --- | --- | --- |
| no engine of TensorRT-LLM's backend | alone | one tritonserver, without MPI |
| one such engine, or two on one GPU | leader | one for each rank of the engine; rank 0 serves |
| two such engines on several GPUs | spawn | one, which starts a worker for each rank of both |
| the same, with participant_ids (fast logits) | ranks | one that serves, and one for each rank of both |

A leader cannot hold engines of different sizes: its MPI world must be as large as each of them. Two engines of one rank on two GPUs are
started as upstream's example starts them, with workers.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tritonclient.grpc.model_config_pb2 import ModelConfig

from specbuild.errors import ServingError
from specbuild.triton.contract import DRAFT, TARGET
from specbuild.triton.llmapi_model import NAME as LLMAPI_MODEL
from specbuild.triton.trtllm_model import is_trtllm, read_list

MPIRUN = ("mpirun", "--allow-run-as-root")


@dataclass(frozen=True)
class Launch:
    """What is started. models: what ranks other than 0 load. gpus: how many the engines are placed on, or the machine has if more."""

    mode: Literal["alone", "leader", "spawn", "ranks"] = "alone"
    world_size: int = 1
    models: tuple[str, ...] = ()
    gpus: int = 0
    completes: bool = False  # a model completes its config.pbtxt by itself

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which the backend knows its mode."""
        if self.mode not in ("spawn", "ranks"):
            return {}
        return {"TRTLLM_ORCHESTRATOR": "1", "TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES": "1" if self.mode == "spawn" else "0"}

    def flags(self, rank: int) -> list[str]:
        """What the server of one rank is told besides what all are told."""
        flags = []
        if rank:  # it must not load what serves: the other models, and then the ports
            flags += ["--model-control-mode=explicit", *(f"--load-model={name}" for name in self.models)]
        if self.mode == "spawn":  # the GPUs are the workers': the server itself keeps no memory on them
            flags += ["--pinned-memory-pool-byte-size=0", "--enable-peer-access=false"]
            flags += [f"--cuda-memory-pool-byte-size={gpu}:0" for gpu in range(self.gpus)]
        return flags

    def make_command(self, make_server: Callable[[int], list[str]]) -> list[str]:
        """Make the command of all processes; `make_server(rank)` is what one of them runs."""
        if self.mode == "alone":
            return make_server(0)
        command = list(MPIRUN)
        for rank in range(self.world_size):
            command += [":"] * bool(rank) + ["-n", "1", *make_server(rank), *self.flags(rank)]
        return command


def find_launch(configs: Mapping[str, ModelConfig], visible_gpus: int = 0) -> Launch:
    """Tell how the models of a repository are started; `visible_gpus` where the machine that serves them is known."""
    engines = {name: config for name, config in configs.items() if is_trtllm(config)}
    if not engines:
        return Launch(completes=LLMAPI_MODEL in configs)
    devices = {name: read_list(config, "gpu_device_ids") for name, config in engines.items()}
    participants = {name: read_list(config, "participant_ids") for name, config in engines.items()}
    ranks = sum(len(numbers) for numbers in devices.values())
    gpus = max(visible_gpus, 1 + max(max(numbers) for numbers in devices.values()))
    names = tuple(name for name in (TARGET, DRAFT) if name in engines)
    if any(participants.values()):
        check_participants(participants)
        return Launch("ranks", 1 + sum(len(numbers) for numbers in participants.values()), names, gpus)
    if len(engines) == 1:
        return Launch("leader", ranks, names, gpus)
    one_gpu = ranks == len(engines) and len(set(devices.values())) == 1
    return Launch("leader" if one_gpu else "spawn", 1, names, gpus)


def check_participants(participants: Mapping[str, Sequence[int]]) -> None:
    """Raise ServingError unless the engines share out the ranks from 1 on; rank 0 serves."""
    numbers = sorted(number for each in participants.values() for number in each)
    if not all(participants.values()) or numbers != list(range(1, len(numbers) + 1)):
        raise ServingError(
            f"Cannot serve these engines: their participant_ids are {numbers}, expected each rank from 1 on once, and some for each "
            "engine. Run `specbuild package --force`."
        )


def format_command(command: Sequence[str], environment: Mapping[str, str], directory: str | None) -> str:
    """Return a command as a shell would take it, each process on a line of its own. Values of variables may refer to others."""
    lines = [f"cd {shlex.quote(directory)} &&"] if directory else []
    lines += [f'{name}="{value}"' for name, value in environment.items()]
    words: list[str] = []
    for word in command:
        if word == "-n":
            lines.append(" ".join(words))
            words = []
        words.append(shlex.quote(word))
    return " \\\n".join([*lines, " ".join(words)])
