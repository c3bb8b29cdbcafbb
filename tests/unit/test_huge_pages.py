"""Huge pages, by what the kernel itself says of a process's memory."""

import ctypes
import mmap
import platform
import re
from pathlib import Path

import pytest

from specbuild.compilers import huge_pages as module
from specbuild.compilers.huge_pages import SIZE, huge_pages

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="the memory of a process is described so by Linux alone")


def huge_bytes(memory):
    """Return how much of the region that this memory lies in is in huge pages."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for region in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, end = (int(bound, 16) for bound in region.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            return int(re.search(r"AnonHugePages: +(\d+) kB", region)[1]) << 10
    raise AssertionError(hex(address))


def allocate(pages):
    """Return touched memory, as a library gets it."""
    memory = mmap.mmap(-1, pages * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(b"x" * len(memory))
    return memory


@pytest.fixture
def collapses():
    """Skip where the kernel cannot collapse pages when told to (before Linux 6.1, or built without huge pages)."""
    probe = allocate(4)
    address = -(-ctypes.addressof(ctypes.c_char.from_buffer(probe)) // SIZE) * SIZE
    if ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(SIZE), module.MADV_COLLAPSE):
        pytest.skip("this kernel does not collapse pages")


@pytest.mark.usefixtures("collapses")
def test_what_is_allocated_inside_lies_in_huge_pages_behind():
    with huge_pages():
        memory = allocate(8)
        before = huge_bytes(memory)
    assert huge_bytes(memory) >= before + 7 * SIZE  # all but the ends, which need not be aligned
    assert memory[:] == b"x" * len(memory)


@pytest.mark.usefixtures("collapses")
def test_what_was_there_before_stays_as_it_was():
    memory = allocate(8)
    before = huge_bytes(memory)
    with huge_pages():
        pass
    assert huge_bytes(memory) == before


def test_a_system_that_does_not_tell_its_memory_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "MAPS", tmp_path / "maps")
    with huge_pages():
        memory = allocate(2)
    assert memory[0] == ord("x")


def test_an_error_inside_is_passed_on():
    with pytest.raises(ValueError, match="inside"), huge_pages():
        raise ValueError("inside")
