"""How large the key-value cache may be, and how it grows."""

from __future__ import annotations

import os

import torch

_ROUND = 64
_GROWTH = 1.5


def default_cache_bytes(device: torch.device) -> int:
    """Half of the memory that is free now: growing holds a part of the cache twice."""
    return free_bytes(device) // 2


def free_bytes(device: torch.device) -> int:
    """Memory that can be allocated on a device without pushing anything out, bytes."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def grown(
    size: tuple[int, int], rows: int, needed: int, longest: int, max_rows: int, max_tokens: int, overhead: int
) -> tuple[int, int]:
    """The size, (rows, positions per row), that a cache takes to hold `rows` rows of `needed` positions.

    It grows by half at least, so that copying stays a small part of the work, and to no more than what its rows can
    come to need.

    Args:
        size: of the cache now, which is too small.
        rows: rows in use, at most max_rows.
        needed: positions that they need now.
        longest: positions that they can come to need.
        max_rows: rows that can come to be in use.
        max_tokens: positions that all rows together may have, at least rows * (longest + overhead).
        overhead: what a row takes besides, in positions.
    """
    positions = size[1]
    if positions < needed:
        positions = min(max(needed, int(_GROWTH * positions)), longest)
        positions = -(-positions // _ROUND) * _ROUND
    roomy = max(rows, size[0], max_rows)
    if roomy * (positions + overhead) <= max_tokens:
        return roomy, positions
    return rows, min(positions, max_tokens // rows - overhead)
