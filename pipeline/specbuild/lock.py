"""The lock of a pair: what its outputs are made from, pinned in `<config>.lock`, and what of it is no longer so.

A stage is held to what it reads: `convert` to the weights, `build` to no model file, and where engines are built and served in NVIDIA's
container, to the container in place of single packages.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from specbuild.artifacts import SMALL_FILES, find_model_dir, find_weight_files, is_local
from specbuild.calibration import BUILTIN, text_files
from specbuild.compilers import find_compiler
from specbuild.compilers.trtllm_machine import CONTAINER, PINNED, find_versions
from specbuild.config import ROLES, PairConfig, Role
from specbuild.convert import adapter_dir
from specbuild.errors import ConfigError
from specbuild.hf_formats import find_adapter_files
from specbuild.progress import bar
from specbuild.provenance import find_version

Stage = Literal["convert", "quantize", "build", "package", "serve"]
STAGES: tuple[Stage, ...] = ("convert", "quantize", "build", "package", "serve")
READS_SMALL_FILES = ("convert", "quantize", "package")  # of a model: its config and tokenizer
PACKAGES: Mapping[Stage, tuple[str, ...]] = {
    "convert": ("torch",),
    "quantize": ("tokenizers", "torch"),
    "build": (),  # the compiler's own
    "package": ("tokenizers", "tritonclient"),
    "serve": ("numpy", "nvidia-pytriton", "onnxruntime", "tokenizers"),
}
IN_CONTAINER = ("build", "package", "serve")  # with an image, these stages' packages are the image's
IMAGES = {"tensorrt": f"nvcr.io/nvidia/{CONTAINER}"}
DIGEST_VARIABLE = "SPECBUILD_CONTAINER_DIGEST"  # whoever starts a container knows its digest; from within it cannot be seen
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_BLOCK = 1 << 22
_SHOWN = 8
_NAMES = {"packages": "package", "texts": "text", "values": "key", "commit": "revision", "files": "file", "adapter": "adapter file"}


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ContainerPins(_Section):
    """An image and what it holds; None: not known where the lock was made, so not compared."""

    image: str
    digest: str | None = None
    tensorrt_llm: str | None = None
    tensorrt: str | None = None


class ModelPins(_Section):
    """A model's files by their SHA-256, its hub commit, and the adapter that is merged into it."""

    commit: str | None = None
    files: dict[str, str]
    adapter: dict[str, str] = {}


class Lock(_Section):
    """All that is pinned; of a lock that was made for some stages, what they read."""

    version: Literal[1] = 1
    packages: dict[str, str]
    container: ContainerPins | None = None
    models: dict[Role, ModelPins] = {}
    texts: dict[str, str] = {}
    values: dict[str, Any]


def lock_path(config: PairConfig) -> Path:
    """Return where the lock of a YAML lies: beside it."""
    return config.path.with_name(f"{config.path.name}.lock")


def run_lock(config: PairConfig, container_digest: str | None = None) -> list[str]:
    """Write `<config>.lock`; return what of it differs from the one before, which must be readable if it is there."""
    path = lock_path(config)
    before = load_lock(config) if path.exists() else None
    lock = make_lock(config, STAGES, container_digest)
    container = keep_known(lock.container, None if before is None else before.container)
    lock = lock.model_copy(update={"container": container})
    write_lock(path, config, lock)
    return [] if before is None else find_differences(before, lock)


def keep_known(now: ContainerPins | None, before: ContainerPins | None) -> ContainerPins | None:
    """Return what is known of an image now, and for the rest what was known before of the same image, or what its tag stands for."""
    if now is None:
        return None
    if before is None or now.image != before.image:
        before = ContainerPins(image=now.image, tensorrt_llm=PINNED)
    return before.model_copy(update=now.model_dump(exclude_none=True))


def check_lock(config: PairConfig, stages: Sequence[Stage] = STAGES) -> None:
    """Raise ConfigError that names whatever these stages read and is not as locked; weights are read only if all else is."""
    locked = load_lock(config)
    for weights in (False, True) if reads_weights(config, stages) else (False,):
        found = make_lock(config, stages, weights=weights)
        if differences := find_differences(select_pins(locked, config, stages, weights), found):
            more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
            raise ConfigError(
                f"Cannot use {config.path} as locked: {'; '.join(differences[:_SHOWN])}{more}. Undo it, or run `specbuild lock "
                f"{config.path}` if it is wanted."
            )


def make_lock(config: PairConfig, stages: Sequence[Stage], container_digest: str | None = None, weights: bool = True) -> Lock:
    """Return what these stages read now. `weights`: of `convert`, the weight files too."""
    small = any(stage in READS_SMALL_FILES for stage in stages)
    models = {role: pin_model(config, role, weights and reads_weights(config, stages)) for role in ROLES} if small else {}
    return Lock(
        packages={name: python_version() if name == "python" else find_version(name) for name in packages_of(config, stages)},
        container=pin_container(config, stages, container_digest),
        models=models,
        texts=pin_texts(config) if "quantize" in stages else {},
        values=config.model_dump(mode="json", exclude={"workdir"}),
    )


def select_pins(locked: Lock, config: PairConfig, stages: Sequence[Stage], weights: bool) -> Lock:
    """Return the part of a lock that make_lock finds for the same arguments."""
    models = locked.models if any(stage in READS_SMALL_FILES for stage in stages) else {}
    if not (weights and reads_weights(config, stages)):
        models = {role: pins.model_copy(update={"files": _without_weights(pins.files), "adapter": {}}) for role, pins in models.items()}
    wanted = packages_of(config, stages)
    packages = {name: version for name, version in locked.packages.items() if name in wanted}
    return locked.model_copy(
        update={"packages": packages, "models": models, "texts": locked.texts if "quantize" in stages else {}},
    )


def reads_weights(config: PairConfig, stages: Sequence[Stage]) -> bool:
    """Tell whether one of these stages reads weight files: convert, and package where the models' own files are served."""
    return "convert" in stages or ("package" in stages and not find_compiler(config.build.compiler).ENGINES)


def _without_weights(files: Mapping[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in files.items() if not name.endswith((".safetensors", ".bin"))}


def packages_of(config: PairConfig, stages: Sequence[Stage]) -> list[str]:
    """Return the packages, and python, that the outputs of these stages depend on, in order."""
    names = {"specbuild"}
    for stage in stages:
        if stage in IN_CONTAINER and config.build.compiler != "onnx-cpu":
            continue
        names |= {"python", *PACKAGES[stage], *(find_compiler(config.build.compiler).PACKAGES if stage == "build" else ())}
    if "quantize" in stages and any(config.model_of(role).quantize.calibration is not None for role in ROLES):
        names.add("nvidia-modelopt")
    return sorted(names)


def python_version() -> str:
    """Return the interpreter's version without its patch level: wheels and Triton's stubs are made for that."""
    return ".".join(platform.python_version_tuple()[:2])


def pin_model(config: PairConfig, role: Role, weights: bool) -> ModelPins:
    """Return the digests of the files that a model is loaded from."""
    model = config.model_of(role)
    directory = find_model_dir(model, config.path, weights=weights)
    paths = {path for pattern in SMALL_FILES for path in directory.glob(pattern)}
    if weights:
        paths |= {directory / name for name in find_weight_files(directory)[0]}
    adapter = adapter_dir(config, model) if weights else None
    return ModelPins(
        commit=None if is_local(model, config.path) else directory.name,  # a snapshot's name is its commit
        files=digest_named(paths, role, lambda path: path.name),
        adapter={} if adapter is None else digest_named(find_adapter_files(adapter), f"{role} adapter", lambda path: path.name),
    )


def pin_texts(config: PairConfig) -> dict[str, str]:
    """Return the digests of the text that models are calibrated and measured on, by their paths relative to the YAML."""
    paths = {path for role in ROLES for files in text_files(config.model_of(role).quantize, config.path).values() for path in files}
    shipped, base = Path(__file__).parent, config.path.absolute().parent
    return digest_named(
        paths, "text", lambda path: BUILTIN if path.parent == shipped else Path(os.path.relpath(path.absolute(), base)).as_posix()
    )


def pin_container(config: PairConfig, stages: Sequence[Stage], digest: str | None) -> ContainerPins | None:
    """Return the image that engines are built and served in, and of what it holds what is found on this machine."""
    image = IMAGES.get(config.build.compiler)
    if image is None:
        if digest is not None:
            raise ConfigError(f"Cannot pin a container for compiler {config.build.compiler}: it runs in none. Leave the digest out.")
        return None
    digest = digest or os.environ.get(DIGEST_VARIABLE) or None
    if digest is not None and not _DIGEST.fullmatch(digest):
        raise ConfigError(f"Cannot pin container digest {digest!r}: expected sha256: and 64 hexadecimal digits, as the registry shows it.")
    builder = shutil.which("trtllm-build") if "build" in stages else None
    version, tensorrt = find_versions(builder)[:2] if builder else (None, None)
    return ContainerPins(image=image, digest=digest, tensorrt_llm=version, tensorrt=tensorrt)


def digest_named(paths: Iterable[Path], label: str, name: Callable[[Path], str]) -> dict[str, str]:
    """Return the SHA-256 of whole files by name, in order; it is the one that the hub shows of a large file."""
    ordered = sorted(paths)
    digests = {}
    with bar(f"digest {label}", sum(path.stat().st_size for path in ordered), "B") as progress:
        for path in ordered:
            total = hashlib.sha256()
            with path.open("rb") as file:
                while block := file.read(_BLOCK):
                    total.update(block)
                    progress.update(len(block))
            digests[name(path)] = f"sha256:{total.hexdigest()}"
    return dict(sorted(digests.items()))


def write_lock(path: Path, config: PairConfig, lock: Lock) -> None:
    """Write a lock in one step, in an order that depends on nothing else."""
    head = [f"# Written by `specbuild lock {config.path.name}`: with --locked, whatever differs from this is refused. Commit it."]
    if lock.container is not None and lock.container.digest is None:
        head.append("# container: the tag alone is pinned, and a tag can move; --container-digest sha256:... pins what it stands for.")
    text = "\n".join([*head, yaml.safe_dump(lock.model_dump(mode="json"), sort_keys=False, width=140, allow_unicode=True)])
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_lock(config: PairConfig) -> Lock:
    """Read the lock of a YAML; raise ConfigError with one line when there is none, or it is damaged."""
    path = lock_path(config)
    try:
        return Lock.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ConfigError(f"Cannot use {config.path} as locked: {path} does not exist. Run `specbuild lock {config.path}` first.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none, bytes that are not UTF-8
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}"
        else:
            reason = " ".join(str(error).split())
        raise ConfigError(f"Cannot read lock {path}: {reason}. Take it from version control, or delete it and lock again.") from None


def find_differences(locked: Lock, found: Lock) -> list[str]:
    """Return a phrase for each thing that was pinned and is another now, is gone, or is new."""
    before, now = (dict(_leaves(lock.model_dump(mode="json"))) for lock in (locked, found))
    phrases = []
    for key in [*before, *(key for key in now if key not in before)]:
        if key[0] == "container" and key[1:] != ("image",) and None in (before.get(key), now.get(key)):
            continue  # not known on one side
        if key not in now:
            phrases.append(f"{_name(key)} is gone, locked {_short(before[key])}")
        elif key not in before:
            phrases.append(f"{_name(key)} is new ({_short(now[key])})")
        elif before[key] != now[key]:
            phrases.append(f"{_name(key)} is {_short(now[key])}, locked {_short(before[key])}")
    return phrases


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, (*path, key))
    else:
        yield path, value


def _name(key: tuple[str, ...]) -> str:
    """Return what a reader calls an entry."""
    section, *rest = key
    if section != "models":
        return " ".join([_NAMES.get(section, section), ".".join(rest)]).strip()
    role, kind, *file = rest
    return " ".join([role, _NAMES[kind], *file])


def _short(value: Any) -> str:
    if value is None:
        return "null"
    text = str(value)
    return text[: len("sha256:") + 12] if _DIGEST.fullmatch(text) else text
