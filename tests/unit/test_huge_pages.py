"""Huge pages, by what the kernel itself says of a process's memory."""

import ctypes
import mmap
import os
import platform
import re
from contextlib import contextmanager
from pathlib import Path

import pytest

from specbuild.compilers import huge_pages as module
from specbuild.compilers import ort_runner
from specbuild.compilers.huge_pages import SIZE, find_memory, huge_pages, subtract

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


def map_memory(address, size, access, flags=0):
    """Call mmap for memory of no file; return its address."""
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype, call.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    return call(address, size, access, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags, -1, 0)


@pytest.mark.usefixtures("collapses")
def test_old_memory_that_the_kernel_joins_with_new_stays_as_it_was():
    """A page here and there would be filled up to a huge one."""
    old, new, fixed, access = 128 * SIZE, 4 * SIZE, 0x10, mmap.PROT_READ | mmap.PROT_WRITE
    start = map_memory(None, old + new, 0)  # their place, not accessible yet
    assert map_memory(start, old, access, fixed) == start
    for address in range(start, start + old, SIZE):
        ctypes.memset(address, 1, 1)
    resident = read_resident()
    with huge_pages():
        assert map_memory(start + old, new, access, fixed) == start + old
        ctypes.memset(start + old, 1, new)
        assert any(low <= start and start + old + new <= high for low, high in find_memory())  # the kernel joined them
    assert read_resident() - resident < new + 8 * SIZE
    ctypes.CDLL(None).munmap(ctypes.c_void_p(start), ctypes.c_size_t(old + new))


def read_resident():
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10


@pytest.mark.parametrize(
    ("regions", "others", "left"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(2, 4), (6, 8)], [(0, 2), (4, 6), (8, 10)]),
        ([(5, 10), (20, 30)], [(0, 6), (25, 40)], [(6, 10), (20, 25)]),
        ([(5, 10)], [(0, 5), (10, 12)], [(5, 10)]),
    ],
)
def test_only_what_is_new_is_left(regions, others, left):
    assert list(subtract(regions, others)) == left


@pytest.mark.parametrize("name", [b"caf\xe9", b"a b", "a\u2028b".encode(), b"a\x0cb", b"a\x85b", b"a\rb"])
def test_files_of_any_name_may_be_mapped(tmp_path, name):
    path = tmp_path / os.fsdecode(name)
    path.write_bytes(b"x" * mmap.PAGESIZE)
    plain = find_memory()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), huge_pages():
        assert len(find_memory()) >= len(plain) - 1


def test_an_engine_s_weights_are_loaded_into_huge_pages_unless_they_are_small(tiny_pair, monkeypatch):
    used, engine = [], tiny_pair.dir_of("target", "engine")

    @contextmanager
    def record():
        used.append("loading")
        yield
        used.append("loaded")

    monkeypatch.setattr(ort_runner, "huge_pages", record)
    ort_runner.OrtRunner(engine, max_slots=1)
    assert used == []
    monkeypatch.setattr(ort_runner, "SMALL", 0)
    ort_runner.OrtRunner(engine, max_slots=1)
    assert used == ["loading", "loaded"]


def test_a_system_that_does_not_tell_its_memory_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "MAPS", tmp_path / "maps")
    with huge_pages():
        memory = allocate(2)
    assert memory[0] == ord("x")


def test_an_error_inside_is_passed_on():
    with pytest.raises(ValueError, match="inside"), huge_pages():
        raise ValueError("inside")
