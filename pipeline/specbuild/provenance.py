"""specbuild.json: what made a directory. It decides whether a stage may be skipped."""

from __future__ import annotations

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
    """Return the digest of a stage's output: that of its specbuild.json, which names everything it was made from."""
    return digest_files([directory / FILE])


def is_current(directory: Path, record: Record) -> bool:
    """Tell whether a directory was made from this record and still has all its files."""
    try:
        found = json.loads((directory / FILE).read_text())
        files = found.pop("files")
        return bool(found == record.to_dict()) and files == digest_outputs(directory, files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def digest_outputs(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the digest of each file; without times, so that a copied directory is still what it was."""
    return {name: digest_files([directory / name], times=False) for name in names}


def make_artifact(directory: Path, record: Record, force: bool, make: Callable[[Path], None]) -> bool:
    """Run `make` into a new directory unless the one there is current; return whether it ran."""
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
def new_directory(final: Path) -> Iterator[Path]:
    """Give a temporary directory that becomes `final` when the block ends well; else it and the parents made for it are removed."""
    parents = [path for path in final.parents if not path.exists()]
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(final)
    partial = Path(tempfile.mkdtemp(prefix=f".{final.name}.{os.getpid()}.", suffix=".partial", dir=final.parent))
    partial.chmod(0o755)
    try:
        yield partial
        _replace(final, partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OSError):  # another run may use them by now
            for path in parents:
                path.rmdir()
        raise


def _replace(final: Path, partial: Path) -> None:
    if final.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{final.name}.{os.getpid()}.", suffix=".partial", dir=final.parent))
        final.rename(old / final.name)
        partial.rename(final)
        shutil.rmtree(old)
    else:
        partial.rename(final)


def _remove_abandoned(final: Path) -> None:
    """Remove what killed runs left: temporary directories whose process is gone, or had our number (1 in every container)."""
    for path in final.parent.glob(f".{final.name}.*.partial"):
        pid = path.name[len(final.name) + 2 :].split(".")[0]
        if pid == str(os.getpid()) or not (pid.isdigit() and Path(f"/proc/{pid}").exists()):
            log(f"removing {path}, left by a run that was killed")
            shutil.rmtree(path, ignore_errors=True)
