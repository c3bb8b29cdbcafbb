"""What keeps a server from starting is said in one line, before it is started where possible."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from specbuild.errors import ServingError
from specbuild.triton import server
from specbuild.triton.client import stream_generate
from specbuild.triton.server import Installation, Ports, Server, check_ports, find_reason, make_command, make_environment


@pytest.fixture
def taken():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


@pytest.fixture
def free():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
def test_taken_port_is_named_with_its_option(taken, free, name):
    ports = replace(Ports(free, free + 1, free + 2), **{name: taken})
    with pytest.raises(ServingError, match=rf"127.0.0.1:{taken} is not free .*--{name}-port"):
        check_ports(ports, "127.0.0.1")


def test_same_port_twice():
    with pytest.raises(ServingError, match="--http-port and --metrics-port are both 8000"):
        check_ports(Ports(8000, 8001, 8000), "127.0.0.1")


def test_missing_server_says_how_to_install(monkeypatch):
    monkeypatch.setattr(server.shutil, "which", lambda name: None)
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServingError, match=r"pip install 'specbuild\[serve\]'"):
        server.find_installation()


def test_server_on_path_is_preferred(monkeypatch, tmp_path):
    binary = tmp_path / "tritonserver"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert server.find_installation() == Installation(binary)


def test_bundle_refuses_numpy_2(monkeypatch, tmp_path):
    (tmp_path / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}").mkdir(parents=True)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.1.0")
    with pytest.raises(ServingError, match=r"numpy 2.1.0: expected numpy < 2"):
        server.check_bundle(tmp_path)


def test_bundle_without_a_stub_for_this_python(tmp_path):
    (tmp_path / "python_backend_stubs" / "3.8").mkdir(parents=True)
    with pytest.raises(ServingError, match=r"no stub for Python 3\.\d+: expected one of 3.8"):
        server.check_bundle(tmp_path)


def test_environment_puts_this_interpreter_first(tmp_path):
    env = make_environment(tmp_path / "pytriton" / "tritonserver", {"PATH": "/bin", "LD_LIBRARY_PATH": "/x"})
    assert env["PATH"].split(":")[0] == os.path.dirname(sys.executable)  # noqa: PTH120 - not resolved, as a virtual environment is
    assert env["LD_LIBRARY_PATH"].endswith(f"{tmp_path}/nvidia_pytriton.libs:/x")


def test_command_listens_where_it_is_told(tmp_path):
    command = make_command(Installation(tmp_path / "t"), tmp_path, Ports(1, 2, 3), "127.0.0.1", None)
    assert {"--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1", "--grpc-port=2"} <= set(command)


LOG = [
    "W1129 20:40:57.260870 3692 pinned_memory_manager.cc:273] \"Unable to allocate pinned system memory\"",
    "E1129 20:40:57.261033 3692 server.cc:241] \"CudaDriverHelper has not been initialized.\"",
    "E1129 20:40:58.1 3692 model_lifecycle.cc:654] \"failed to load 'target' version 1: Internal: ImportError: no x\\n\\nAt:\\n  y.py\"",
    "error: creating server: Internal - failed to load all models",
]  # fmt: skip


def test_reason_is_the_model_that_failed():
    assert find_reason(LOG) == "failed to load 'target' version 1: Internal: ImportError: no x"
    assert find_reason(LOG[:2] + LOG[3:]) == LOG[3]
    assert find_reason([]) == "(it is empty)"


FAKE = """#!{python}
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
{body}
time.sleep(60)
"""


@pytest.fixture
def fake_server(monkeypatch, tmp_path):
    """Make a tritonserver of a few lines of Python, with a child process like a stub."""

    def make(body):
        binary = tmp_path / "bin" / "tritonserver"
        binary.parent.mkdir()
        binary.write_text(FAKE.format(python=sys.executable, body=body))
        binary.chmod(0o755)
        monkeypatch.setenv("PATH", f"{binary.parent}:{os.environ['PATH']}")
        monkeypatch.setattr(server, "GRACE_SECONDS", 0.3)
        (tmp_path / "repository").mkdir()
        return Server(tmp_path / "repository", Ports(*(41000 + (os.getpid() + i) % 8000 for i in range(3))))

    return make


def wait_for_child(running):
    while not running._lines:
        time.sleep(0.01)
    return int(running._lines[0])


def is_alive(pid, patience=2.0):
    """Whether a process is still there after a moment: one that was killed takes some time to go."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
                return False
        except (FileNotFoundError, ProcessLookupError):
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("body", ["", "signal.signal(signal.SIGTERM, signal.SIG_IGN)"], ids=["clean", "deaf to SIGTERM"])
def test_stop_leaves_nothing_running(fake_server, body):
    running = fake_server(body).start()
    child = wait_for_child(running)
    running.stop()
    assert not running.is_running()
    assert not is_alive(child)
    running.stop()


def test_early_death_is_reported_with_the_log(fake_server):
    line = LOG[2].replace("\\", "\\\\").replace("'", "\\'")
    running = fake_server(f"print('{line}', flush=True); sys.exit(3)").start()
    with pytest.raises(ServingError, match=r"ended with code 3 before it was ready: failed to load 'target' version 1"):
        running.wait_until_ready(20)


def test_not_ready_in_time_stops_it(fake_server):
    running = fake_server("").start()
    child = wait_for_child(running)
    with pytest.raises(ServingError, match=r"not ready within 0.2 s"):
        running.wait_until_ready(0.2)
    assert not is_alive(child)


def test_server_dies_with_the_process_that_started_it(fake_server, tmp_path):
    prepared = fake_server("")
    code = (
        "import sys; from pathlib import Path; from specbuild.triton.server import *\n"
        f"s = Server(Path({str(prepared.repository)!r}), {prepared.ports!r}).start()\n"
        "print(s._process.pid, flush=True); s.wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with parent:
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(pid)
    os.killpg(pid, signal.SIGKILL)  # the stand-in's child has no parent check of its own


def test_unreachable_server_is_one_line(free):
    with pytest.raises(ServingError, match=rf"^Cannot reach Triton at 127.0.0.1:{free}: .*specbuild serve CONFIG.*$"):
        next(stream_generate(f"127.0.0.1:{free}", "x", max_tokens=1))


def test_missing_repository(tmp_path):
    with pytest.raises(ServingError, match="no such model repository"):
        Server(tmp_path / "absent").start()
