"""Huge pages for what a library allocates: every pass reads the weights from end to end, and finding 4 KiB pages costs a part of it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIZE = 2 << 20
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # asm-generic/mman-common.h; the second is of Linux 6.1, the first lets its daemon do it later
MAPS = Path("/proc/self/maps")


@contextmanager
def huge_pages() -> Iterator[None]:
    """Move memory that was allocated inside, and is still there behind, to huge pages, where the system has them."""
    before = set(_private_memory())
    yield
    for start, end in _private_memory():
        first, last = -(-start // SIZE) * SIZE, end // SIZE * SIZE
        if (start, end) not in before and first < last:
            for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
                ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), advice)


def _private_memory() -> Iterator[tuple[int, int]]:
    """Yield the bounds of this process's writable memory that is of no file."""
    for line in MAPS.read_text().splitlines() if MAPS.exists() else ():
        bounds, access, _, _, inode, *name = line.split()
        if access == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            start, end = bounds.split("-")
            yield int(start, 16), int(end, 16)
