"""Weights ask for large pages, and stay what they are."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest
import torch

from forerun.rollout.native import huge_pages
from forerun.rollout.native.products import ProductTable, TunedLinear

HUGE = 2**21
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def advised(address: int) -> bool:
    """Whether the mapping that holds the address asks for large pages (flag `hg`)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError("no such address")


def test_blocks_in_a_row_become_one_range() -> None:
    near, far = 2**12, 2**20
    blocks = [(10 * far, 100), (1000, 500), (1500 + near, 500), (5 * far, 7)]
    assert huge_pages.joined(blocks) == [(1000, 2000 + near), (5 * far, 5 * far + 7), (10 * far, 10 * far + 100)]


@pytest.mark.skipif(not SWITCH.exists(), reason="this kernel has no large pages")
def test_whole_large_pages_inside_a_block_are_advised_and_nothing_else() -> None:
    with mmap.mmap(-1, 6 * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = bytes(range(256)) * (len(memory) // 256)
        address = ctypes.addressof(view := ctypes.c_char.from_buffer(memory))
        first = -(-address // HUGE) * HUGE
        huge_pages.advise([(first + 1, 3 * HUGE)])  # holds two of them
        assert [advised(first + page * HUGE) for page in range(4)] == [False, True, True, False]
        assert memory[:] == bytes(range(256)) * (len(memory) // 256)
        del view


@pytest.mark.skipif(not SWITCH.exists(), reason="this kernel has no large pages")
def test_packed_weights_are_advised_each_time_that_they_are_packed() -> None:
    table = ProductTable("packed")
    linear = TunedLinear(torch.randn(4 * 1024, 1024), None, table)
    x = torch.randn(1, 1024)
    for _ in range(2):
        table.drop_packed()
        table.prepare()
        assert linear.packed is not None
        middle = torch.ops.mkldnn.data_ptr(linear.packed) + torch.ops.mkldnn._nbytes(linear.packed) // 2
        assert advised(middle)
        torch.testing.assert_close(linear(x), x @ linear.weight.T, atol=1e-4, rtol=1e-5)
