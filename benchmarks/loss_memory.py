"""Peak memory of the chunked MTP loss, forward and backward, against one depth's logits in float32, as JSON lines.

    python benchmarks/loss_memory.py [--positions 4096] [--vocabulary 49152] [--hidden 576] [--chunks 64] [--times 0]

Extra memory is what the call needs at its peak beyond its inputs (hiddens, LM head, the teacher's hiddens) and what
it returns (the loss, the hiddens' gradient and, with `head`, the LM head's gradient). It is measured twice: as the
bytes of all tensors alive, counted at every operator (`extra_mib`; what a kernel allocates inside itself is not seen),
and as the process's peak resident memory, which the kernel counts (`rss_extra_mib`, libraries' own buffers included;
Linux with glibc only, null elsewhere). `share` and `rss_share` are over the naive logits' size. With --times N every
case is also timed N times, the chunk sizes taking turns; `time_ratio` is the median over that of the first chunk size.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import statistics
import time
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from forerun.mtp import LossSpec, fused_loss
from forerun.mtp.losses import default_chunk_size

MIB = 2**20


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages made within it that are still alive: now, and at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if not isinstance(x, Tensor) or x.is_meta:  # which takes no memory
                continue
            if (key := x.untyped_storage()._cdata) not in given | self._alive:
                self._alive.add(key)
                self.now += x.untyped_storage().nbytes()
                weakref.finalize(x.untyped_storage(), self._freed, key, x.untyped_storage().nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _freed(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size


class Case:
    """One loss over fixed inputs."""

    def __init__(self, kind: str, head: bool, positions: int, vocabulary: int, size: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.spec = LossSpec(kind)  # type: ignore[arg-type]
        self.hidden = drawn(positions, size).requires_grad_()
        self.teacher = None if kind == "ce" else drawn(positions, size)
        self.weight = (drawn(vocabulary, size) * 0.05).requires_grad_(head)
        self.labels = torch.randint(vocabulary, (positions,), generator=generator)
        self.head = head

    def run(self, chunk_size: int, positions: int | None = None) -> tuple[Tensor, ...]:
        """Forward and backward over the first positions; the gradients."""
        loss = fused_loss(
            self.hidden[:positions],
            self.labels[:positions],
            lambda h: F.linear(h, self.weight),
            self.spec,
            chunk_size=chunk_size,
            teacher_hidden=None if self.teacher is None else self.teacher[:positions],
            projection_parameters=(self.weight,) if self.head else (),
        ).loss
        return torch.autograd.grad(loss, (self.hidden, self.weight) if self.head else (self.hidden,))

    @property
    def naive_bytes(self) -> int:
        return 4 * len(self.hidden) * len(self.weight)


def live_extra(case: Case, chunk_size: int) -> int:
    """Peak bytes of live tensors, less those of the gradients that are returned."""
    with LiveBytes() as live:
        gradients = case.run(chunk_size)
    return live.peak - sum(g.untyped_storage().nbytes() for g in gradients)


def resident_extra(case: Case, chunk_size: int) -> int | None:
    """The same from the process's peak resident memory, which Linux lets a process reset."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists() or platform.libc_ver()[0] != "glibc":
        return None
    # M_MMAP_THRESHOLD: blocks of 1 MiB and more go back to the system when freed, rather than to malloc's own store.
    libc = ctypes.CDLL(None)
    libc.mallopt(-3, MIB)

    def read(field: str) -> int:
        return 1024 * next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(field))

    case.run(chunk_size, positions=chunk_size)  # the libraries' own buffers
    gc.collect()
    libc.malloc_trim(0)
    reset.write_text("5")
    before = read("VmRSS:")
    gradients = case.run(chunk_size)
    return read("VmHWM:") - before - sum(g.untyped_storage().nbytes() for g in gradients)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--chunks", type=int, nargs="+", default=[default_chunk_size("cpu")])
    parser.add_argument("--losses", nargs="+", default=["ce", "soft_ce", "tv"], choices=["ce", "soft_ce", "tv"])
    parser.add_argument("--times", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for kind in args.losses:
        for head in (False, True):
            case = Case(kind, head, args.positions, args.vocabulary, args.hidden)
            times: dict[int, list[float]] = {chunk: [] for chunk in args.chunks}
            for _ in range(args.times):
                for chunk, found in times.items():
                    started = time.perf_counter()
                    case.run(chunk)
                    found.append(time.perf_counter() - started)
            for chunk in args.chunks:
                extra, resident = live_extra(case, chunk), resident_extra(case, chunk)
                line: dict[str, Any] = {
                    "loss": kind,
                    "head": head,
                    "chunk_size": chunk,
                    "naive_mib": round(case.naive_bytes / MIB, 1),
                    "extra_mib": round(extra / MIB, 1),
                    "rss_extra_mib": None if resident is None else round(resident / MIB, 1),
                    "share": round(extra / case.naive_bytes, 4),
                    "rss_share": None if resident is None else round(resident / case.naive_bytes, 4),
                }
                if args.times:
                    median = statistics.median(times[chunk])
                    line["seconds"] = round(median, 3)
                    line["time_ratio"] = round(median / statistics.median(times[args.chunks[0]]), 3)
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
