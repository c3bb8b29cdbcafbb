"""specbuild.json: what made a directory. It decides whether a stage may be skipped."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from specbuild import __version__
from specbuild.errors import ConfigError
from specbuild.progress import log

FILE = "specbuild.json"
_WHOLE = 16 << 20  # files up to this size are hashed whole, larger ones by size, time and both ends
_END = 1 << 20


@dataclass(frozen=True)
class Record:
    """What a stage's output depends on: same record, same output."""

    stage: str
    parameters: Mapping[str, Any]
    inputs: Mapping[str, str]
    packages: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        versions = {name: find_version(name) for name in self.packages}
        parameters = json.loads(json.dumps(dict(self.parameters)))
        return {"stage": self.stage, "specbuild": __version__, "parameters": parameters, "inputs": dict(self.inputs), "packages": versions}


def find_version(package: str) -> str:
    """Return an installed package's version, or "absent"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def digest_files(paths: Iterable[Path], times: bool = True) -> str:
    """Return a digest of files' names and content; of a large file its size, time (if asked) and both ends stand for the content."""
    total = hashlib.sha256()
    for path in sorted(paths):
        stat = path.stat()
        total.update(f"{path.name}\0{stat.st_size}\0".encode())
        with path.open("rb") as file:
            if stat.st_size <= _WHOLE:
                total.update(file.read())
            else:
                total.update((f"{stat.st_mtime_ns}\0" if times else "").encode() + file.read(_END))
                file.seek(-_END, os.SEEK_END)
                total.update(file.read())
    return total.hexdigest()


def digest_artifact(directory: Path) -> str:
    """Return the digest of a stage's output: that of its specbuild.json, which names all that it was made from; ConfigError without one."""
    if not (directory / FILE).is_file():
        raise ConfigError(f"Cannot use {directory}: it has no {FILE}, expected what a stage wrote, whole. Run `specbuild run`.")
    return digest_files([directory / FILE])


def is_current(directory: Path, record: Record) -> bool:
    """Tell whether a directory was made from this record and still has all its files."""
    try:
        found = json.loads((directory / FILE).read_text())
        files = found.pop("files")
        return bool(found == record.to_dict()) and files == digest_outputs(directory, files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def check_input(directory: Path, name: str, source: Path) -> None:
    """Raise ConfigError when `directory` was made of another `source` than lies there now. One that is absent is passed over."""
    try:
        used = json.loads((directory / FILE).read_text())["inputs"][name]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if (source / FILE).is_file() and digest_artifact(source) != used:
        raise ConfigError(f"Cannot use {directory}: {source} was made anew since. Run `specbuild run`.")


def find_parameters(directory: Path) -> dict[str, Any]:
    """Return the parameters that a directory was made with; empty when it was made by no stage."""
    try:
        return dict(json.loads((directory / FILE).read_text())["parameters"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def check_parameters(directory: Path, wanted: Mapping[str, Any], yaml_path: Path) -> None:
    """Raise ConfigError when a stage made `directory` from other values than those of the YAML; one that no stage made is passed over."""
    found = find_parameters(directory)
    for key, value in wanted.items() if found else ():
        if found.get(key) != value:
            raise ConfigError(
                f"Cannot use {directory}: it was made for {key} {found.get(key)!r}, {yaml_path} says {value!r}. Run `specbuild run`."
            )


def digest_outputs(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the digest of each file; without times, so that a copied directory is still what it was."""
    return {name: digest_files([directory / name], times=False) for name in names}


def make_artifact(directory: Path, record: Record, force: bool, make: Callable[[Path], None]) -> bool:
    """Run `make` into a new directory unless the one there is current; return whether it ran."""
    with new_parents(directory), locked(directory):
        if not force and is_current(directory, record):
            log(f"{directory} is up to date")
            return False
        with new_directory(directory) as partial:
            make(partial)
            names = [path.relative_to(partial).as_posix() for path in sorted(partial.rglob("*")) if path.is_file()]
            files = digest_outputs(partial, names)
            (partial / FILE).write_text(json.dumps({**record.to_dict(), "files": files}, indent=2) + "\n")
    log(f"{directory} written")
    return True


@contextmanager
def new_parents(directory: Path) -> Iterator[None]:
    """Make the parents of a directory; when the block fails, remove those that were made for it and are still empty."""
    made = [path for path in directory.parents if not path.exists()]
    directory.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # another run may use them by now
            for path in made:
                path.rmdir()
        raise


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Let one run at a time change what lies beside `directory`; temporary directories of its own that are there then were abandoned."""
    descriptor = os.open(directory.parent, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"waiting for another run that writes {directory.parent}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        for path in find_abandoned(directory):
            log(f"removing {path}, left by a run that was killed")
            shutil.rmtree(path, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


def find_abandoned(final: Path) -> list[Path]:
    """List the temporary directories of `final`; of others, beside it may lie anybody's."""
    names = (path for path in final.parent.iterdir() if path.name.startswith(f".{final.name}.") and path.name.endswith(".partial"))
    return [path for path in names if path.is_dir() and not path.is_symlink()]


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Give a temporary directory that becomes `final` when the block ends well, and is removed when it does not."""
    partial = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".partial", dir=final.parent))
    partial.chmod(0o755)
    try:
        yield partial
        _replace(final, partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _replace(final: Path, partial: Path) -> None:
    if final.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".partial", dir=final.parent))
        final.rename(old / final.name)
        partial.rename(final)
        shutil.rmtree(old)
    else:
        partial.rename(final)
