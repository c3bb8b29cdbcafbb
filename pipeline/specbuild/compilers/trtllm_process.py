"""Running trtllm-build: its log in a file, its ranks as progress, its end in every way that ours can come."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specbuild.errors import EngineError
from specbuild.progress import bar, log

LOG = "build.log"
POLL_SECONDS = 0.2
GRACE_SECONDS = 5
QUOTED_LINES = 3
QUOTED_CHARACTERS = 400


def run_builder(command: list[str], out: Path, label: str, ranks: int) -> None:
    """Run trtllm-build with its log in `out`; raise EngineError with its last lines when it fails."""
    log(f"build {label}: trtllm-build of {ranks} rank{'s' if ranks > 1 else ''}, its log is {out / LOG}")
    with (out / LOG).open("wb") as file, _terminated_like_interrupted():
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_die_with_parent
        )
        try:
            _show_ranks(process, out, label, ranks)
        finally:
            _end_group(process)
    if process.returncode:
        raise EngineError(f"Cannot build the {label}: trtllm-build ended with code {process.returncode}: {quote_end(out / LOG)}.")


@contextmanager
def failed_log_kept(out: Path) -> Iterator[None]:
    """Keep the builder's log of a block that fails, and name it: beside `out`, which then does not come to be."""
    kept = out.parent / f"failed-{LOG}"
    try:
        yield
    except EngineError as error:
        (out / LOG).replace(kept)
        raise EngineError(f"{error} The builder's log is {kept}.") from None
    kept.unlink(missing_ok=True)


def _show_ranks(process: subprocess.Popen[bytes], out: Path, label: str, ranks: int) -> None:
    """Wait for the process, showing the ranks that are written and the time that it takes."""
    with bar(f"build {label}", ranks, "rank") as progress:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            progress.n = len(list(out.glob("rank*.engine")))
            progress.refresh()


def quote_end(path: Path) -> str:
    """Return the last lines of a log that say something, as one line."""
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    text = " | ".join(lines[-QUOTED_LINES:]) or "(its log is empty)"
    text = text.rstrip(".")
    return text if len(text) <= QUOTED_CHARACTERS else "..." + text[-QUOTED_CHARACTERS:]


def _die_with_parent() -> None:
    """Ask the kernel to end this child when the process that started it ends (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the builder and its workers: SIGTERM, a grace time, then SIGKILL to whatever is left of the group."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that what it started ends too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
