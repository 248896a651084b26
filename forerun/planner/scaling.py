"""The tables of docs/scaling.md: `python -m forerun.planner.scaling` prints them, with a path it writes them there.

Each stands in the document between `<!-- NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from forerun.planner.from_config import Job
from forerun.planner.hardware import DEVICES, Hardware
from forerun.planner.memory import Peak
from forerun.planner.serving_memory import USABLE
from forerun.planner.shape import load_shape
from forerun.planner.traffic import flops
from forerun.planner.train_plan import GIB, TrainPlan, make_train_plan
from forerun.planner.training import Layout, TrainingRun

_SHOWN = ("h100", "h800", "h200", "b200")
# verl's reference script for MiMo-7B: 32 prompts of up to 2,048 tokens, 16 responses each of up to 8,192.
_RESPONSES, _ROW = 512, 10_240


def _megatron(ranks: int, tensor: int = 1, pipeline: int = 1, context: int = 1, expert: int = 1) -> Layout:
    return Layout("megatron", ranks, tensor=tensor, pipeline=pipeline, context=context, expert=expert)


_7B = (
    Layout(ranks=8, shards=8),
    Layout(ranks=8, shards=4),
    Layout(ranks=8, shards=2),
    _megatron(8, tensor=2),
    _megatron(8, tensor=4),
    _megatron(8, tensor=2, pipeline=2),
    _megatron(8, tensor=2, pipeline=2, context=2),
)
_671B = (
    Layout(ranks=512, shards=512),
    Layout(ranks=512, shards=256),
    _megatron(512, pipeline=16, expert=32),
    _megatron(512, pipeline=8, expert=64),
    _megatron(512, tensor=4, pipeline=16, expert=8),
    _megatron(512, tensor=8, pipeline=16, expert=4),
    _megatron(512, tensor=4, pipeline=16, context=2, expert=8),
)


def tables() -> dict[str, str]:
    """Markdown tables by name."""
    return {
        "devices": _devices(),
        "memory-7b": _memory("mimo-7b", _7B),
        "traffic-7b": _traffic("mimo-7b", _7B),
        "mtp-7b": _mtp("mimo-7b", _7B[0]),
        "memory-671b": _memory("deepseek-r1", _671B),
        "traffic-671b": _traffic("deepseek-r1", _671B),
        "mtp-671b": _mtp("deepseek-r1", _671B[2]),
        "check": _check(),
    }


def write(path: Path) -> None:
    """Put the tables into a document, each between its marks."""
    text = path.read_text(encoding="utf-8")
    for name, table in tables().items():
        text = re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", rf"\1{table}\2", text, flags=re.DOTALL)
    path.write_text(text, encoding="utf-8")


def reference_run(model: str, layout: Layout, recompute: bool = True) -> TrainingRun:
    """A policy update on 512 responses of 10,240 tokens with their prompts, one row at a time; no MTP.

    FSDP2: float32 weights and state, gathered in bfloat16, gradients summed in float32. Megatron: bfloat16 weights,
    gradients and state in float32.
    """
    return TrainingRun(
        shape=replace(load_shape(model), precision="bfloat16"),
        layout=layout,
        row_length=_ROW,
        packed=False,
        micro_batches=_RESPONSES,
        recompute=recompute,
        weight_bytes=4 if layout.engine == "torch" else 2,
        compute_bytes=2,
        reduce_bytes=4,
    )


def with_mtp(run: TrainingRun, isolated: bool) -> TrainingRun:
    """The same with one MTP layer, trained."""
    return replace(run, depths=1, chained=1, train_mtp=True, isolated=isolated)


def _devices() -> str:
    head = ("device", "bf16 TFLOP/s", "memory, GB", "NVLink, GB/s one way", "network, GB/s each", "source")
    rows = []
    for name in _SHOWN:
        device = DEVICES[name]
        figures = (device.bfloat16 / 1e12, device.memory / 1e9, device.link / 1e9, device.network / 1e9)
        rows.append([name.upper(), *[f"{figure:g}" for figure in figures], device.source])
    return _markdown(head, rows)


def _memory(model: str, layouts: Iterable[Layout]) -> str:
    head = ("layout", "weights, gradients, state", "peak, no MTP", "heads", "joint", "joint, no recompute", "fits")
    rows = []
    for layout in layouts:
        run = reference_run(model, layout)
        static = ("weights", "gradients", "optimizer")
        joint = _plan(with_mtp(run, isolated=False))
        rows.append(
            [
                str(layout),
                _gib(sum(joint.peaks[1].parts[name] for name in static)),
                _gib(_plan(run).peak),
                _gib(_plan(with_mtp(run, isolated=True)).peak),
                _gib(joint.peak),
                _gib(_plan(with_mtp(replace(run, recompute=False), isolated=False)).peak),
                _fitting(joint.peaks),
            ]
        )
    return _markdown(head, rows)


def _traffic(model: str, layouts: Iterable[Layout]) -> str:
    head = (
        "layout",
        "what a rank sends, GiB",
        "MTP adds",
        *[f"{name.upper()}: links / arithmetic, s" for name in _SHOWN],
    )
    rows = []
    for layout in layouts:
        plain = _plan(reference_run(model, layout))
        plan = _plan(with_mtp(reference_run(model, layout), isolated=False))
        total = sum(kind.bytes for kind in plan.traffic)
        more = total - sum(kind.bytes for kind in plain.traffic)
        said = ", ".join(f"{kind.what} {_short(kind.bytes / GIB)}" for kind in plan.traffic)
        rows.append([str(layout), said, f"{more / total:.1%}", *[_times(plan, DEVICES[name]) for name in _SHOWN]])
    return _markdown(head, rows)


def _mtp(model: str, layout: Layout) -> str:
    """What one MTP layer adds to weights, arithmetic and the fullest rank."""
    run = reference_run(model, layout)
    head = ("", "no MTP", "with one MTP layer", "ratio")
    joint = with_mtp(run, isolated=False)
    operations = flops(run) / run.micro_batches / run.row_length, flops(joint) / run.micro_batches / run.row_length
    pairs = (
        ("weights, billions", run.parameters / 1e9, joint.parameters / 1e9),
        ("GFLOP per token, recompute included", operations[0] / 1e9, operations[1] / 1e9),
        (f"peak, GiB ({layout})", _plan(run).peak / GIB, _plan(joint).peak / GIB),
    )
    return _markdown(head, [[what, f"{a:,.4g}", f"{b:,.4g}", f"{b / a:.3f}"] for what, a, b in pairs])


def _check() -> str:
    """DeepSeek-V3's pre-training, whose time is published."""
    published = 180e3
    return _markdown(
        ("DeepSeek-V3 pre-training, a trillion tokens", "H800 hours"),
        [
            ["published (arXiv 2412.19437, section 1), FP8 products", f"{published:,.0f}"],
            ["by these figures, bfloat16", f"{pretraining_hours():,.0f}"],
        ],
    )


def pretraining_hours() -> float:
    """H800 hours for a trillion tokens of DeepSeek-V3's pre-training: rows of 4,096, one MTP layer, no recompute."""
    layout = _megatron(2048, pipeline=16, expert=64)
    base = reference_run("deepseek-r1", layout, recompute=False)
    run = with_mtp(replace(base, row_length=4096, micro_batches=15_360), isolated=False)
    seconds = _plan(run, DEVICES["h800"]).compute_seconds() or 0.0
    return seconds * layout.ranks / 3600 * 1e12 / (run.row_length * run.micro_batches)


def _plan(run: TrainingRun, hardware: Hardware | None = None) -> TrainPlan:
    return make_train_plan(Job(run), hardware)


def _times(plan: TrainPlan, hardware: Hardware) -> str:
    sending = sum(kind.seconds(hardware) for kind in plan.traffic)
    arithmetic = replace(plan, hardware=hardware).compute_seconds() or 0.0
    return f"{_short(sending)} / {_short(arithmetic)}"


def _fitting(peaks: Sequence[Peak]) -> str:
    """The shown devices that have room, by memory."""
    need = max(peak.total for peak in peaks)
    found = [name.upper() for name in _SHOWN if need <= USABLE * DEVICES[name].memory]
    return ", ".join(found) or "none"


def _short(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f}"


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main(arguments: Sequence[str]) -> None:
    """Print the tables, or write them into the document that is named."""
    if arguments:
        write(Path(arguments[0]))
        return
    for name, table in tables().items():
        print(f"{name}\n\n{table}")


if __name__ == "__main__":
    main(sys.argv[1:])
