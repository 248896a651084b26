"""`forerun plan`: from options to a plan, and the plan in print."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from forerun.errors import UsageError
from forerun.planner.cost import Deployment, Roofline, StepCost
from forerun.planner.hardware import BYTES, DEVICES, Hardware, Precision, find
from forerun.planner.plan import Plan, make_plan
from forerun.planner.prompts import PROMPTS
from forerun.planner.serving_memory import USABLE, Serving, serving
from forerun.planner.shape import ModelShape, load_shape, shown_weights
from forerun.planner.timeline import Span, parse

_DEFAULT_DEPTH = 3
_MOST_CALIBRATED_ROWS = 64
_SHOWN_BATCHES = 12


@dataclass(frozen=True)
class PlanOptions:
    """What to plan for.

    Attributes:
        model: directory, config.json, or a name out of models.json.
        hardware: a spec sheet's name; None with `calibrate`.
        acceptance: accepted drafts per draft at each depth; None measures the checkpoint.
        text: what to measure it on.
        temperature: of the rollouts, for measuring.
        batch: timeline, see `forerun.planner.timeline.parse`.
        prompt_length, context: tokens of a prompt; tokens in a row's cache where the timeline does not tell.
        max_depth: deepest depth considered; None is the acceptances given, or 3.
        weights: precision of the weights; None is the config's.
        deployment: how the engine runs.
        calibrate: measure steps here with the native engine, instead of a spec sheet.
        as_json: one JSON object instead of tables.
    """

    model: str
    hardware: str | None = None
    acceptance: list[float] | None = None
    text: Path | None = None
    temperature: float = 0.0
    batch: str = "tail:32:2048"
    prompt_length: int = 512
    context: float = 1024
    max_depth: int | None = None
    weights: Precision | None = None
    deployment: Deployment = field(default_factory=Deployment)
    calibrate: bool = False
    as_json: bool = False


def run(options: PlanOptions) -> int:
    """Make the plan and print it; returns 0, the exit code.

    Raises:
        UsageError: options that contradict each other or cannot be used.
    """
    if options.calibrate == (options.hardware is not None):
        raise UsageError(f"give either --hardware, one of {', '.join(DEVICES)}, or --calibrate to measure here")
    if options.calibrate and (options.deployment != Deployment() or options.weights is not None):
        raise UsageError(
            "--calibrate measures the native engine as it runs here: leave out the options of a deployment"
        )
    if not 0 <= options.temperature < math.inf:
        raise UsageError(f"--temperature {options.temperature} must be a number of at least 0 (0 is greedy)")
    timeline = parse(options.batch, options.prompt_length, options.context)
    shape = load_shape(options.model)
    if options.weights is not None:
        shape = replace(shape, precision=options.weights)
    acceptance = options.acceptance
    cost: StepCost
    if options.calibrate:
        cost, measured = _calibrate(options, timeline)
        acceptance = acceptance or measured
    else:
        assert options.hardware is not None
        cost = Roofline(shape, find(options.hardware), options.deployment)
        if acceptance is None:
            acceptance = _measure(options)
    depth = options.max_depth or (len(options.acceptance) if options.acceptance else _DEFAULT_DEPTH)
    most = options.deployment.max_tokens
    if most is not None and most <= depth:
        raise UsageError(f"--max-step-tokens {most} leaves no room for {depth} drafts and a token: take {depth + 1}")
    plan = make_plan(cost, acceptance, timeline, depth)
    memory = None
    if options.hardware is not None:
        devices, cache = options.deployment.tensor_parallel, options.deployment.cache
        held = [serving(shape, span.rows, span.context, cache, devices) for span in timeline]
        memory = max(held, key=lambda one: one.total)
    if options.as_json:
        print(json.dumps(_as_json(plan, shape, acceptance, options, memory)))
    else:
        _print(plan, shape, acceptance, options, memory)
    return 0


def parse_acceptance(text: str) -> list[float]:
    """Shares with commas between them.

    Raises:
        UsageError: they are no numbers.
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--acceptance {text!r} must be shares between 0 and 1, as in 0.88,0.77,0.66") from None


def parse_precision(text: str, option: str) -> Precision:
    """The precision of that name.

    Raises:
        UsageError: there is none.
    """
    for precision in BYTES:
        if precision == text:
            return precision
    raise UsageError(f"{option} {text!r} must be one of {', '.join(BYTES)}")


def _measure(options: PlanOptions) -> list[float]:
    if options.text is None:
        raise UsageError(
            "give --acceptance, as in 0.88,0.77,0.66, or --text with what the model writes to measure its own MTP block"
        )
    from forerun.planner.acceptance import measure_acceptance

    return measure_acceptance(Path(options.model), options.text, options.temperature)


def _calibrate(options: PlanOptions, timeline: list[Span]) -> tuple[StepCost, list[float]]:
    from forerun.models.carrier import MTPCarrier
    from forerun.models.loading import load
    from forerun.planner.acceptance import load_tokenizer, read_text
    from forerun.planner.calibrate import calibrate_native
    from forerun.rollout.native.engine import NativeEngine
    from forerun.rollout.protocol import Request, SamplingParams

    model = load(options.model)
    if not isinstance(model, MTPCarrier):
        raise UsageError(f"{options.model} carries no MTP block to draft with: plan with --hardware and --acceptance")
    tokenizer = load_tokenizer(options.model)
    prompts = list(PROMPTS)
    if options.text is not None:
        prompts = [line for line in read_text(options.text).splitlines() if line.strip()]
    sampling = SamplingParams(temperature=options.temperature, seed=0)
    requests = [Request(f"{i}", tokenizer(prompt)["input_ids"], sampling) for i, prompt in enumerate(prompts)]
    depth = options.max_depth or _DEFAULT_DEPTH
    rows = min(max(span.rows for span in timeline), _MOST_CALIBRATED_ROWS)
    engine = NativeEngine(model, num_speculative_tokens=depth, max_num_seqs=rows)
    found = calibrate_native(engine, requests, rows, depth)
    return found, found.acceptance


def _as_json(
    plan: Plan, shape: ModelShape, acceptance: list[float], options: PlanOptions, memory: Serving | None
) -> dict[str, Any]:
    fits = None if memory is None or options.hardware is None else memory.fits(find(options.hardware))
    return {
        "model": shape.name,
        "hardware": options.hardware or "measured here",
        "acceptance": acceptance,
        **asdict(plan),
        "memory": None if memory is None else asdict(memory),
        "fits": fits,
        "worth_it": plan.worth_it,
        "sentence": plan.sentence(),
    }


def _print(
    plan: Plan, shape: ModelShape, acceptance: list[float], options: PlanOptions, memory: Serving | None
) -> None:
    # The same count as that of `forerun plan train`.
    size = (
        f"{shown_weights(shape.trunk + max(1, shape.depths) * shape.drafter.parameters)} weights, an MTP layer included"
    )
    if shape.active != shape.parameters:
        size += f", {shown_weights(shape.active)} active"
    where = options.hardware or "this machine, measured"
    devices = options.deployment.tensor_parallel
    print(f"{shape.name}: {size}, {shape.precision}; {where}{f' x {devices}' if devices > 1 else ''}")
    print(f"acceptance per depth {', '.join(f'{a:.3f}' for a in acceptance)}; " + _lengths(plan))
    depths = range(len(plan.tokens_per_step))
    print(
        f"\n{'rows':>6}  "
        + "".join(f"{f'ms, k={k}':>11}" for k in depths)
        + "".join(f"{f'x, k={k}':>8}" for k in depths[1:])
    )
    for batch in _shown(plan):
        print(
            f"{batch.rows:>6}  "
            + "".join(f"{seconds * 1e3:>11.2f}" for seconds in batch.step_seconds)
            + "".join(
                f"{f'{gain:.2f}' + ('*' if k == batch.best_depth else ''):>8}"
                for k, gain in enumerate(batch.speedups)
                if k
            )
        )
    print(
        "\nwhole rollout: "
        + ", ".join(f"k={k} {plan.run_speedups[k]:.2f}x" for k in depths[1:])
        + f", best depth at every moment {plan.adaptive_speedup:.2f}x\n"
    )
    print(plan.sentence())
    if memory is not None and options.hardware is not None:
        print(_room(memory, find(options.hardware)))


def _room(memory: Serving, hardware: Hardware) -> str:
    """Whether the model and its cache fit a device, and what to change if they do not."""
    need = f"{memory.total / 2**30:.3g} GiB on each device ({memory.weights / 2**30:.3g} of them weights)"
    room = f"{USABLE * hardware.memory / 2**30:.3g} GiB usable"
    if memory.fits(hardware):
        return f"Memory: {need}, {room}."
    rows = memory.most_rows(hardware)
    mend = f"run at most {rows} rows, or raise --tensor-parallel" if rows else "raise --tensor-parallel"
    return f"It does not fit: {need}, {room}; {mend}."


def _lengths(plan: Plan) -> str:
    return "tokens per step " + ", ".join(f"{tokens:.2f}" for tokens in plan.tokens_per_step[1:])


def _shown(plan: Plan) -> list[Any]:
    """Every batch, or about a dozen of them, the largest and the smallest among them."""
    count = len(plan.batches)
    if count <= _SHOWN_BATCHES:
        return plan.batches
    chosen = {round(i * (count - 1) / (_SHOWN_BATCHES - 1)) for i in range(_SHOWN_BATCHES)}
    return [plan.batches[i] for i in sorted(chosen)]
