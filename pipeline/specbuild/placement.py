"""Where the TensorRT engines of a pair run in Triton: on which GPUs, as which MPI ranks, and with how much memory for their caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specbuild.artifacts import Engine, load_json
from specbuild.compilers import Limits, engine_card
from specbuild.compilers.tensorrt import check_logits, check_ranks
from specbuild.compilers.trtllm_command import check_engine_config, section
from specbuild.config import PairConfig, Role, roles_needed
from specbuild.errors import ConfigError, EngineError
from specbuild.plan import is_allowed, load_parts
from specbuild.planning.hardware import GPUS, Gpu, find_gpu
from specbuild.planning.memory import Part, plan_memory
from specbuild.planning.remedy import describe_misfit
from specbuild.triton.trtllm_model import Place

GPUS_PER_NODE = 8
"""What an engine's mapping says unless told otherwise (upstream's kDefaultGpusPerNode); larger ids end the load (worldConfig.cpp)."""


def make_places(config: PairConfig, engines: Mapping[Role, Engine]) -> dict[str, Place]:
    """Return the place of each engine, from what its directory says: no GPU is needed. Raise SpecbuildError when they cannot be served."""
    for role, engine in engines.items():
        check_engine(config, role, engine)
    check_together(config, engines)
    cards = {role: load_json(engine.directory / engine_card.FILE, EngineError) for role, engine in engines.items()}
    windows = {role: tuple(card.get("max_attention_window_size") or ()) for role, card in cards.items()}
    return plan_places(config, str(cards["target"].get("gpu")), windows)


def plan_places(config: PairConfig, built_on: str, windows: Mapping[Role, tuple[int, ...]] | None = None) -> dict[str, Place]:
    """Return the place of each engine, from the YAML and each model's config.json; `built_on` is the GPU's name by nvidia-smi."""
    devices = find_devices(config)
    participants = make_participants(devices) if config.serving.fast_logits else dict.fromkeys(devices, ())
    caches = plan_caches(config, choose_gpu(config, built_on), devices)
    return {role: Place(devices[role], participants[role], *caches[role], (windows or {}).get(role, ())) for role in devices}


def check_placement(config: PairConfig) -> None:
    """Raise ConfigError for a section `serving` that cannot work, as far as the YAML and each model's config.json tell."""
    devices = find_devices(config)
    if config.serving.gpu is not None:
        plan_caches(config, choose_gpu(config, ""), devices)


def find_devices(config: PairConfig) -> dict[Role, tuple[int, ...]]:
    """Return the GPU of each rank of each engine; raise ConfigError where that cannot work."""
    check_fast_logits(config)
    devices = {role: choose_devices(config, role) for role in roles_needed(config)}
    check_devices(devices)
    return devices


def check_engine(config: PairConfig, role: Role, engine: Engine) -> None:
    """Raise EngineError when an engine lacks a rank, has another number of them than the YAML, or cannot decode drafted tokens."""
    model, pretrained = config.model_of(role), section(engine.config, "pretrained_config")
    mapping, ranks = section(pretrained, "mapping"), model.tp * model.pp
    if mapping.get("world_size") != ranks or mapping.get("tp_size") != model.tp:
        raise EngineError(
            f"Cannot package {engine.directory}: it has {mapping.get('world_size')} ranks (tp {mapping.get('tp_size')}), {config.path} "
            f"says tp {model.tp}, pp {model.pp}. Run `specbuild run`."
        )
    if not isinstance(pretrained.get("vocab_size"), int):
        raise EngineError(f"Cannot package {engine.directory}: its config.json has no vocab_size. Run `specbuild build`.")
    if role == "draft" and engine.max_draft_len:
        raise EngineError(
            f"Cannot package {engine.directory}: a draft engine takes no drafted tokens, it has max_draft_len. Build it again."
        )
    check_ranks(engine.directory, ranks, role)
    gather_logits = config.speculation.acceptance == "rejection"
    limits = Limits(engine.max_batch_size, engine.max_seq_len, engine.max_draft_len, "", gather_logits)
    check_engine_config(engine.config, pretrained, limits, role)


def check_together(config: PairConfig, engines: Mapping[Role, Engine]) -> None:
    """Raise EngineError unless the engines take the same batch, and logits of one width where the draft's are handed on."""
    batches = {role: engine.max_batch_size for role, engine in engines.items()}
    if len(set(batches.values())) > 1:
        raise EngineError(
            f"Cannot package these engines: max_batch_size is {batches}, expected one number. Run `specbuild build` for both."
        )
    check_logits(config, {role: int(engine.config["pretrained_config"]["vocab_size"]) for role, engine in engines.items()})


def check_fast_logits(config: PairConfig) -> None:
    """Raise ConfigError when fast_logits is asked for where no logits are handed on."""
    speculation = config.speculation
    if config.serving.fast_logits and (speculation.acceptance != "rejection" or speculation.drafter != "model"):
        raise ConfigError(
            f"Cannot use serving.fast_logits with acceptance {speculation.acceptance}, drafter {speculation.drafter}: only a draft model "
            "judged by rejection hands logits on. Remove it, or set acceptance: rejection and drafter: model."
        )


def choose_devices(config: PairConfig, role: Role) -> tuple[int, ...]:
    """Return the GPU of each rank of a model: the YAML's, else the first ones. The same list again is another node's, with fast logits."""
    model = config.model_of(role)
    given = config.serving.target_gpus if role == "target" else config.serving.draft_gpus
    devices = tuple(range(model.tp * model.pp)) if given is None else given
    node = tuple(dict.fromkeys(devices))
    nodes = len(devices) // max(len(node), 1) if config.serving.fast_logits and role == "target" else 1
    if len(devices) != model.tp * model.pp or devices != node * nodes:
        raise ConfigError(
            f"Cannot place the {role} on GPUs {list(devices)}: it has {model.tp * model.pp} ranks (tp {model.tp}, pp {model.pp}), "
            f"expected a GPU of its own for each (the target's again for each further node, with fast_logits). Set serving.{role}_gpus."
        )
    return devices


def check_devices(devices: Mapping[Role, Sequence[int]]) -> None:
    """Raise ConfigError for a device that the backend does not count."""
    for role, numbers in devices.items():
        if max(numbers) >= GPUS_PER_NODE:
            raise ConfigError(
                f"Cannot place the {role} on GPU {max(numbers)}: TensorRT-LLM's backend counts those of a node from 0 to "
                f"{GPUS_PER_NODE - 1}. Choose such ones in serving.{role}_gpus; CUDA_VISIBLE_DEVICES gives others these numbers."
            )


def make_participants(devices: Mapping[Role, Sequence[int]]) -> dict[Role, tuple[int, ...]]:
    """Return the MPI ranks of each model: rank 0 serves, then the draft's, then the target's, as upstream's example has them."""
    participants: dict[Role, tuple[int, ...]] = {}
    first = 1
    for role in ("draft", "target"):
        participants[role] = tuple(range(first, first + len(devices[role])))
        first += len(devices[role])
    return participants


def choose_gpu(config: PairConfig, built_on: str) -> Gpu:
    """Return the device whose memory is shared: the YAML's, else the one that built the engines."""
    known = ", ".join(name for name, gpu in GPUS.items() if not gpu.is_cpu)
    name = config.serving.gpu
    gpu = find_gpu(built_on) if name is None else GPUS.get(name)
    if gpu is None or gpu.is_cpu:
        found = f"{built_on!r}, which built the engines: its memory is unknown"
        if name is not None:
            found = f"serving.gpu {name!r}: it is no GPU that is known"
        raise ConfigError(f"Cannot plan the caches on {found}. Set serving.gpu to one of {known} (the nearest that has no more memory).")
    return gpu


def plan_caches(config: PairConfig, gpu: Gpu, devices: Mapping[Role, Sequence[int]]) -> dict[Role, tuple[int, float]]:
    """Return (tokens, fraction) of each engine's cache; raise ConfigError when models that share a GPU do not fit on it.

    The backend takes the smaller of the two. Triton loads models side by side, in no order to rely on, and a fraction is of what is
    free at that moment; so the fraction is the one that suffices if the model is the last to load, and the number of tokens, the same
    in any order, decides.
    """
    parts = load_parts(config, gpu)
    shared = bool(set.intersection(*(set(numbers) for numbers in devices.values())))
    caches: dict[Role, tuple[int, float]] = {}
    for group in [parts] if shared else [[part] for part in parts]:
        plan = plan_memory(group, gpu)
        if not plan.fits:
            raise ConfigError(describe_misfit(plan, group, gpu, lambda part, other: other == gpu and is_allowed(part, other)))
        for part in group:
            caches[part.role] = plan_cache(part, [other for other in group if other is not part], gpu)
    return caches


def plan_cache(part: Part, others: Sequence[Part], gpu: Gpu) -> tuple[int, float]:
    """Return (tokens, fraction) of a cache whose model loads last."""
    memory = plan_memory([*others, part], gpu).models[part.role]
    return memory.cache_tokens, memory.fraction or 1.0
