"""A stage killed with SIGKILL half-way, then run again."""

import signal
import subprocess
import sys

import pytest

from specbuild.cli import COMMANDS
from specbuild.config import load_config
from specbuild.convert import run_convert
from specbuild.quantize import run_quantize

# Runs the command line in a process that kills itself at the n-th tensor it writes, or when the directory is renamed.
KILLED = """
import os, signal, sys
from pathlib import Path
from specbuild import tensorfile
from specbuild.cli import main

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

where = sys.argv.pop(1)
if where == "rename":
    Path.rename = die
else:
    written, write = [], tensorfile.TensorWriter.write
    def counted(self, name, tensor):
        written.append(name)
        write(self, name, tensor) if len(written) < int(where) else die()
    tensorfile.TensorWriter.write = counted
main()
"""
STAGES = {"convert": (run_convert, "checkpoint"), "quantize": (run_quantize, "quantized")}


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def partial_directories(directory):
    return [path.name for path in directory.iterdir() if path.name.endswith(".partial")]


@pytest.mark.parametrize(("stage", "where"), [("convert", "9"), ("convert", "rename"), ("quantize", "9"), ("quantize", "rename")])
def test_a_killed_stage_leaves_no_result_and_completes_when_run_again(tmp_path, write_pair_yaml, tiny_pair, stage, where):
    assert stage in COMMANDS
    path = write_pair_yaml(tmp_path)
    config = load_config(path)
    run_stage, name = STAGES[stage]
    if stage == "quantize":
        run_convert(config, "target")
    command = [sys.executable, "-c", KILLED, where, stage, str(path), "--only", "target"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == -signal.SIGKILL, result.stderr
    out = config.dir_of("target", name)
    assert not out.exists()
    assert len(partial_directories(out.parent)) == 1  # it died half-way, not before
    assert run_stage(config, "target")
    assert partial_directories(out.parent) == []
    assert contents(out) == contents(tiny_pair.dir_of("target", name))
    assert not run_stage(config, "target")  # and it counts as whole


def test_a_result_killed_while_it_is_replaced_is_made_again(tmp_path, write_pair_yaml, tiny_pair):
    path = write_pair_yaml(tmp_path)
    config = load_config(path)
    run_convert(config, "target")
    command = [sys.executable, "-c", KILLED, "9", "convert", str(path), "--only", "target", "--force"]
    assert subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == -signal.SIGKILL
    out = config.dir_of("target", "checkpoint")
    assert contents(out) == contents(tiny_pair.dir_of("target", "checkpoint"))  # the earlier one still stands
    assert run_convert(config, "target", force=True)
    assert partial_directories(out.parent) == []
