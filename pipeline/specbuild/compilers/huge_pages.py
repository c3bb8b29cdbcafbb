"""Huge pages for what a library allocates: every pass reads the weights from end to end, and finding 4 KiB pages costs a part of it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SIZE = 2 << 20
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # asm-generic/mman-common.h; the second is of Linux 6.1, the first lets its daemon do it later
MAPS = Path("/proc/self/maps")
Region = tuple[int, int]


@contextmanager
def huge_pages() -> Iterator[None]:
    """Move memory that was allocated inside, and is still there behind, to huge pages, where the system has them."""
    before = find_memory()
    yield
    for start, end in subtract(find_memory(), before):
        first, last = -(-start // SIZE) * SIZE, end // SIZE * SIZE
        for advice in (MADV_HUGEPAGE, MADV_COLLAPSE) if first < last else ():
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


def find_memory() -> list[Region]:
    """Return the bounds of this process's writable memory that is of no file, ascending; none where the system does not tell."""
    try:
        lines = MAPS.read_bytes().split(b"\n")  # names are bytes, and may hold any but this one
    except OSError:
        return []
    found = []
    for bounds, access, _, _, inode, *name in (line.split() for line in lines if line):
        if (access, inode) == (b"rw-p", b"0") and name in ([], [b"[heap]"]):
            start, end = bounds.split(b"-")
            found.append((int(start, 16), int(end, 16)))
    return found


def subtract(regions: Sequence[Region], others: Sequence[Region]) -> Iterator[Region]:
    """Yield the parts of regions that are in none of the others, which ascend: the kernel joins neighbours, old and new."""
    for start, end in regions:
        for low, high in others:
            if start < high and low < end:
                if start < low:
                    yield start, low
                start = max(start, high)
        if start < end:
            yield start, end
