"""Start, watch and stop a tritonserver: the one on PATH, or the one that nvidia-pytriton carries; for TensorRT engines, several."""

import ctypes
import http.client
import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

from specbuild.errors import ServingError
from specbuild.triton.launch import MPIRUN, Launch, format_command

LOOPBACK = "127.0.0.1"
ALONE = Launch()
GRACE_SECONDS = 10
"""How long a server may take to unload its models after SIGTERM."""
CONTAINER_SERVER = Path("/opt/tritonserver/bin/tritonserver")
"""Where NVIDIA's containers have it."""


@dataclass(frozen=True)
class Ports:
    """The three ports of one server; the names are those of the command line's options."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    def as_options(self) -> dict[str, int]:
        """Map each option that sets a port to its number."""
        return {"--http-port": self.http, "--grpc-port": self.grpc, "--metrics-port": self.metrics}


@dataclass(frozen=True)
class Installation:
    """A tritonserver binary; `bundle` is the package directory it came in, None for one found on PATH."""

    binary: Path
    bundle: Path | None = None


def find_installation() -> Installation:
    """Find tritonserver on PATH, else in nvidia-pytriton; raises ServingError when there is neither."""
    if on_path := shutil.which("tritonserver"):
        return Installation(Path(on_path))
    spec = importlib.util.find_spec("pytriton")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    if not locations:
        raise ServingError(
            "Cannot find tritonserver: not on PATH, and nvidia-pytriton is not installed. Install it with `pip install 'specbuild[serve]'`."
        )
    bundle = Path(locations[0]) / "tritonserver"
    check_bundle(bundle)
    return Installation(bundle / "bin" / "tritonserver", bundle)


def find_trtllm_installation() -> Installation:
    """Find a tritonserver with TensorRT-LLM's backend, and mpirun; raises ServingError when one is missing."""
    binary = find_container_server()
    missing = [] if binary.is_file() else [f"no tritonserver on PATH or at {CONTAINER_SERVER}"]
    missing += [] if shutil.which(MPIRUN[0]) else [f"no {MPIRUN[0]} on PATH"]
    if missing:
        raise ServingError(
            f"Cannot serve TensorRT engines on this machine: {' and '.join(missing)}. Run `specbuild serve` in the container that built "
            "them, or set compiler: onnx-cpu. `--dry-run` prints the command anywhere."
        )
    return Installation(binary)


def find_container_server() -> Path:
    """Return the tritonserver on PATH, else where NVIDIA's containers have it, whether it is there or not."""
    return Path(shutil.which("tritonserver") or CONTAINER_SERVER)


def check_bundle(bundle: Path) -> None:
    """Raise ServingError unless the bundled server can run this interpreter's models."""
    from importlib.metadata import version

    python, numpy = f"{sys.version_info.major}.{sys.version_info.minor}", version("numpy")
    if not (bundle / "python_backend_stubs" / python).is_dir():
        have = ", ".join(sorted(path.name for path in (bundle / "python_backend_stubs").glob("*")))
        raise ServingError(f"The bundled tritonserver has no stub for Python {python}: expected one of {have}. Use another interpreter.")
    if int(numpy.split(".")[0]) >= 2:
        raise ServingError(
            f"The bundled tritonserver cannot run Python models with numpy {numpy}: expected numpy < 2. Run `pip install 'numpy<2'`."
        )


def write_backends(bundle: Path, backends_dir: Path) -> None:
    """Link the Python backend and the stub of this interpreter into one directory, as tritonserver expects them."""
    target = backends_dir / "python"
    target.mkdir(parents=True)
    stub = bundle / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}" / "triton_python_backend_stub"
    backend = bundle / "backends" / "python"
    for source in (backend / "libtriton_python.so", backend / "triton_python_backend_utils.py", stub):
        (target / source.name).symlink_to(source)


def make_environment(bundle: Path | None, base: Mapping[str, str]) -> dict[str, str]:
    """Make the server's environment: this interpreter first on PATH (the stub finds site-packages through it), libraries of the bundle."""
    env = dict(base)
    binaries = Path(sys.executable).parent
    env["PATH"] = os.pathsep.join([str(binaries), env.get("PATH", "")])
    if sys.prefix != sys.base_prefix:
        env["VIRTUAL_ENV"] = sys.prefix
    if bundle is not None:
        libraries = [sysconfig.get_config_var("LIBDIR") or "", str(bundle.parent.parent / "nvidia_pytriton.libs")]
        env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [*libraries, env.get("LD_LIBRARY_PATH", "")]))
    return env


def make_command(
    installation: Installation,
    repository: Path,
    ports: Ports,
    address: str,
    backends_dir: Path | None,
    launch: Launch = ALONE,
    name: str | None = None,
) -> list[str]:
    """Make the command line; models are loaded exactly as their config.pbtxt says, unless one completes its own. `name`: see `make_id`."""
    server_id = name or make_id(ports)
    command = [str(installation.binary), f"--model-repository={repository}"]
    command += [] if launch.completes else ["--disable-auto-complete-config"]
    command += [f"{option}={number}" for option, number in ports.as_options().items()]
    command += [f"--{service}-address={address}" for service in ("http", "grpc", "metrics")]
    command += [f"--id={server_id}", f"--exit-timeout-secs={GRACE_SECONDS // 2}"]
    command += [] if backends_dir is None else [f"--backend-directory={backends_dir}"]

    def make_server(rank: int) -> list[str]:
        # Processes on one machine share /dev/shm: each needs names of its own there.
        return [*command, f"--backend-config=python,shm-region-prefix-name={server_id}{f'{rank}-' if rank else ''}"]

    return launch.make_command(make_server)


def make_id(ports: Ports) -> str:
    """The name by which a server answers, and under which its Python backend keeps regions in /dev/shm: one for each process."""
    return f"specbuild-{ports.grpc}-{os.getpid()}-"


def find_address(address: str) -> str:
    """Return the IPv4 address of a host name or address; raises ServingError when it has none."""
    try:
        return str(socket.getaddrinfo(address or "(empty)", None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        reason = f"it is no IPv4 address and no name of one ({error.strerror or error})"
        raise ServingError(f"Cannot listen on {address!r}: {reason}. Use 127.0.0.1, or 0.0.0.0 for all.") from error


def make_scratch() -> "tempfile.TemporaryDirectory[str]":
    """Make a temporary directory whose path a shell reads as one word."""
    standard = tempfile.gettempdir()
    return tempfile.TemporaryDirectory(prefix="specbuild-triton-", dir=standard if shlex.quote(standard) == standard else "/tmp")


def check_ports(ports: Ports, address: str) -> None:
    """Raise ServingError naming the first port that is taken, or asked for twice."""
    options = ports.as_options()
    for option, number in options.items():
        twins = [name for name, other in options.items() if other == number]
        if len(twins) > 1:
            raise ServingError(f"Cannot start Triton: {' and '.join(twins)} are both {number}. Give each its own port.")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, number))
            except OSError as error:
                reason = f"{address}:{number} is not free ({error.strerror or error})"
                raise ServingError(f"Cannot start Triton: {reason}. Stop what uses it, or choose another port with {option}.") from error


def find_reason(lines: Sequence[str]) -> str:
    """Find the log line that says why a server did not start: a model that failed, else the first error, else the last line.

    Errors about CUDA are passed over: a machine without a GPU always has some.
    """
    errors = [line for line in lines if line[:1] == "E" and line[1:5].isdigit() and "cuda" not in line.lower()]
    failed = [line for line in errors if "failed to load" in line]
    reason = (failed or errors or list(lines)[-1:] or ["(it is empty)"])[0]
    # The message stands behind the source position, in quotes; its own line breaks are written as \\n.
    return reason.split("] ", 1)[-1].strip().strip('"').split("\\n")[0].rstrip(".")


def _die_with_parent() -> None:
    """Ask the kernel to end this child when the process that started it ends (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@dataclass
class Server:
    """One tritonserver, or mpirun and the several that it starts; use as a context manager, or call start, wait_until_ready and stop."""

    repository: Path
    ports: Ports = field(default_factory=Ports)
    address: str = LOOPBACK
    log: IO[str] | None = None
    launch: Launch = ALONE
    _process: "subprocess.Popen[str] | None" = field(default=None, init=False)
    _lines: "deque[str]" = field(default_factory=lambda: deque(maxlen=500), init=False)
    _scratch: "tempfile.TemporaryDirectory[str] | None" = field(default=None, init=False)
    _pump: threading.Thread | None = field(default=None, init=False)

    def start(self) -> "Server":
        """Start the process; raises ServingError when the server is missing, the repository absent or a port taken."""
        if not self.repository.is_dir():
            raise ServingError(f"Cannot serve {self.repository}: no such model repository. Make it with `specbuild package CONFIG`.")
        installation = find_installation() if self.launch == ALONE else find_trtllm_installation()
        self.address = find_address(self.address)
        check_ports(self.ports, self.address)
        self._scratch = make_scratch()
        # The Python backend starts its stubs through a shell, with paths as they are: none of them may hold a space.
        repository, backends_dir = self.repository.resolve(), None
        if shlex.quote(str(repository)) != str(repository):  # else its own path: ranks on other nodes do not see this one's links
            repository = Path(self._scratch.name) / "repository"
            repository.symlink_to(self.repository.resolve())
        if installation.bundle is not None:
            backends_dir = Path(self._scratch.name) / "backends"
            write_backends(installation.bundle, backends_dir)
        self._process = subprocess.Popen(
            make_command(installation, repository, self.ports, self.address, backends_dir, self.launch),
            env=make_environment(installation.bundle, os.environ) | self.launch.environment,
            cwd=None if self.launch == ALONE else repository,  # TensorRT-LLM's backend takes paths from here
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self._pump = threading.Thread(target=self._copy_log, args=(self._process.stdout,), daemon=True)
        self._pump.start()
        return self

    def describe(self) -> str:
        """Return the command that `start` would run, for a shell, after what it changes in the environment."""
        installation = find_installation() if self.launch == ALONE else Installation(find_container_server())
        backends_dir = None if installation.bundle is None else Path("BACKENDS")
        name, repository = f"specbuild-{self.ports.grpc}-", self.repository.resolve()
        shown = repository if shlex.quote(str(repository)) == str(repository) else Path("REPOSITORY")  # as in `start`
        command = make_command(installation, shown, self.ports, find_address(self.address), backends_dir, self.launch, name)
        before = {variable: f"${variable}" for variable in ("PATH", "LD_LIBRARY_PATH")}
        changes = (make_environment(installation.bundle, before) | self.launch.environment).items() - before.items()
        text = format_command(command, dict(sorted(changes)), None if self.launch == ALONE else str(repository))
        notes = [f"# REPOSITORY: a link to {repository}, made at the start\n"] * (shown != repository)
        if backends_dir:
            notes += [f"# BACKENDS: a directory of links to the Python backend in {installation.bundle}, made at the start\n"]
        return "".join(notes) + text

    def _copy_log(self, stream: IO[str]) -> None:
        """Keep the last lines of the server's log, and pass each on to `log`."""
        with stream:
            for line in stream:
                self._lines.append(line.rstrip("\n"))
                if self.log is not None:
                    self.log.write(line)
                    self.log.flush()

    def wait_until_ready(self, timeout: float = 60.0) -> None:
        """Return when every model is ready; stops the server and raises ServingError when it ends, or after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not self.is_running():
                code = self.stop()
                raise ServingError(f"Triton ended with code {code} before it was ready: {find_reason(self._lines)}")
            if self._is_ready():
                return
            time.sleep(0.05)
        self.stop()
        reason = find_reason(self._lines)
        raise ServingError(f"Triton was not ready within {timeout:g} s; its log says: {reason}. Allow more time with --timeout.")

    def _is_ready(self) -> bool:
        """Whether this server answers that it is ready; another one on the same port is not this."""
        connection = http.client.HTTPConnection(self.address, self.ports.http, timeout=2)
        try:
            connection.request("GET", "/v2")
            name = json.loads(connection.getresponse().read()).get("name")
            connection.request("GET", "/v2/health/ready")
            return bool(name == make_id(self.ports)) and connection.getresponse().status == 200
        except (OSError, ValueError, AttributeError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def is_running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the process to end; its exit code, or None when `timeout` seconds were not enough."""
        if self._process is None:
            return None
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> int | None:
        """End the server and all that it started: SIGTERM, a grace time, then SIGKILL to the whole session. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _kill_session(process.pid)
            code = process.wait()
        if self._pump is not None:
            self._pump.join(timeout=5)
        if self._scratch is not None:
            self._scratch.cleanup()
        for region in Path("/dev/shm").glob(f"{make_id(self.ports)}*"):  # a server that was killed leaves its own
            region.unlink(missing_ok=True)
        return code

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def _kill_session(session: int) -> None:
    """SIGKILL whatever is left of a session: mpirun gives each process that it starts a group of its own."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):  # it may end, or be another user's
            # The name of a program, in parentheses, may hold spaces and parentheses.
            if int(path.read_text(errors="replace").rpartition(")")[2].split()[3]) == session:
                os.kill(int(path.parent.name), signal.SIGKILL)
