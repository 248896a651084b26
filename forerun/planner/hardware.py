"""Accelerators as their spec sheets give them: dense arithmetic, memory and its bandwidth, links to others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forerun.errors import UsageError

Precision = Literal["float32", "bfloat16", "fp8"]

BYTES: dict[Precision, float] = {"float32": 4, "bfloat16": 2, "fp8": 1}


@dataclass(frozen=True)
class Hardware:
    """One device.

    Attributes:
        name: as `find` knows it.
        bfloat16, fp8, float32: dense floating-point operations per second; 0 where the device lacks the format.
        bandwidth: bytes per second of its memory.
        memory: bytes.
        link: bytes per second that it sends to others of its machine; 0 where there are none.
        network: bytes per second that it sends to other machines, in the vendor's reference machine.
        per_machine: devices of that machine.
        source: where the figures are from.
    """

    name: str
    bfloat16: float
    fp8: float
    float32: float
    bandwidth: float
    memory: float
    source: str
    link: float = 0
    network: float = 0
    per_machine: int = 1

    def peak(self, precision: Precision) -> float:
        """Operations per second. A device without fp8 arithmetic computes such weights in bfloat16."""
        return {"float32": self.float32, "bfloat16": self.bfloat16, "fp8": self.fp8 or self.bfloat16}[precision]


def _device(
    name: str,
    bf16: float,
    fp8: float,
    fp32: float,
    tb_per_s: float,
    gb: float,
    link: float,
    network: float,
    source: str,
) -> Hardware:
    """Tera-operations, terabytes and gigabytes; the links in gigabytes per second, one way."""
    arithmetic = (bf16 * 1e12, fp8 * 1e12, fp32 * 1e12)
    per_machine = 8 if link else 1
    return Hardware(name, *arithmetic, tb_per_s * 1e12, gb * 1e9, source, link * 1e9, network * 1e9, per_machine)


# Data sheets often print figures with structured sparsity, and links both ways; here they are halved. float32 is TF32's
# rate where frameworks use it for matrix products. Networks: an adapter for each device, of 200 Gb/s (DGX A100) or
# 400 Gb/s (DGX H100, H200 and B200; DeepSeek-V3's H800 cluster); Gaudi's Ethernet ports that leave the machine.
DEVICES = {
    device.name: device
    for device in (
        _device("a100", 312, 0, 156, 2.039, 80, 300, 25, "NVIDIA A100 80GB SXM data sheet"),
        _device("h100", 989, 1979, 494, 3.35, 80, 450, 50, "NVIDIA H100 SXM data sheet"),
        _device("h800", 989, 1979, 494, 3.35, 80, 200, 50, "as H100 SXM, with a slower NVLink"),
        _device("h200", 989, 1979, 494, 4.8, 141, 450, 50, "NVIDIA H200 SXM data sheet"),
        _device("h20", 148, 296, 74, 4.0, 96, 450, 50, "NVIDIA H20 data sheet; 148 also in verl docs/advance/mtp.md"),
        _device("b200", 2250, 4500, 1100, 8.0, 180, 900, 50, "NVIDIA HGX B200 data sheet, per GPU"),
        _device("gaudi2", 432, 865, 110, 2.45, 96, 262.5, 37.5, "Intel Gaudi 2 product brief"),
        _device("gaudi3", 1835, 1835, 229, 3.7, 128, 525, 75, "Intel Gaudi 3 white paper"),
        _device(
            "cpu", 0.33, 0, 0.16, 0.025, 16, 0, 0, "two AVX512-BF16 server cores at 2.6 GHz; --calibrate measures yours"
        ),
    )
}


def find(name: str) -> Hardware:
    """A device by name, in any case.

    Raises:
        UsageError: there is none; the line lists them.
    """
    if name.lower() not in DEVICES:
        raise UsageError(
            f"no spec sheet for hardware {name!r}: choose one of {', '.join(DEVICES)}, or --calibrate here"
        )
    return DEVICES[name.lower()]
