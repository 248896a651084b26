"""Speculation as others measured it: inputs and outcomes, and where inputs were not published, what is assumed.

`assumed` names what the source does not say. docs/planner.md shows these cases with their sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.planner.cost import Deployment, Roofline
from forerun.planner.hardware import find
from forerun.planner.plan import make_plan
from forerun.planner.shape import load_shape
from forerun.planner.timeline import Span, from_lengths


@dataclass(frozen=True)
class Case:
    """One published speed-up at one setting.

    Attributes:
        name: as in the documentation's table.
        model, hardware, deployment, acceptance, depth, timeline: inputs.
        published: tokens per second with drafts over those without.
        tolerance: largest relative error that is allowed of the prediction.
    """

    name: str
    model: str
    hardware: str
    deployment: Deployment
    acceptance: tuple[float, ...]
    depth: int
    timeline: list[Span]
    published: float
    tolerance: float

    def predict(self) -> float:
        cost = Roofline(load_shape(self.model), find(self.hardware), self.deployment)
        return make_plan(cost, self.acceptance, self.timeline, self.depth).run_speedups[self.depth]


# HabanaAI/vllm-fork pull request 1264: acceptance counts; 1254: 1,024 tokens in and out, one draft; the repository's
# examples/deepseek_on_gaudi: eight devices, vLLM V0 (batch expansion), max_num_seqs=256. Assumed: Gaudi 3 (the weights
# and 256 contexts do not fit eight Gaudi 2), and that "we hit maximum batch_size" at 256 means max_num_seqs.
_GAUDI = Deployment(tensor_parallel=8, expands_batch=True, max_tokens=256)


def _deepseek(rows: int, drafted: int, accepted: int, published: float, tolerance: float) -> Case:
    timeline = from_lengths([1024] * rows, 1024)
    name = f"DeepSeek-R1, batch {rows}"
    return Case(name, "deepseek-r1", "gaudi3", _GAUDI, (accepted / drafted,), 1, timeline, published, tolerance)


CASES = [
    # verl docs/advance/mtp.md: MiMo-7B on H20, SGLang on its own, -50 %; its example scripts draft 3 tokens in a chain.
    # Acceptance of MiMo-7B's own head used over and over: FastMTP (arXiv 2509.18362), 70 / 11 / 2 %.
    # Assumed: one device, 256 rows, 1,000 tokens of context.
    Case("MiMo-7B on H20", "mimo-7b", "h20", Deployment(), (0.70, 0.11, 0.02), 3, [Span(256, 1, 1000)], 0.50, 0.15),
    # SkyRL docs examples/spec_decode.mdx and run_megatron_dapo_qwen3.5_9b_specdecode.sh: eight engines of one H100, 256
    # responses of at most 8,192 tokens, enforce_eager=true. Assumed: responses as long as they may be, prompts of 500.
    Case(
        "Qwen3.5-9B on H100",
        "qwen3.5-9b",
        "h100",
        Deployment(launch="eager"),
        (0.886, 0.770, 0.663),
        3,
        from_lengths([8192] * 32, 500),
        2.03,
        0.10,
    ),
    _deepseek(4, 2180, 1918, 1.60, 0.20),
    _deepseek(32, 17408, 15371, 1.50, 0.20),
    _deepseek(128, 69988, 61143, 1.35, 0.20),
    _deepseek(256, 139286, 122973, 1.00, 0.20),
]

# Decoding without drafts. SemiAnalysisAI/InferenceX issue 870: DeepSeek-R1-0528 FP8, SGLang 0.5.7, eight H200, tensor
# parallel; (concurrency, prompt, response, mean milliseconds per output token).
PLAIN_STEPS = [
    (4, 1024, 8192, 10.93),
    (8, 1024, 1024, 12.8),
    (16, 1024, 1024, 17.2),
    (32, 1024, 1024, 25.6),
    (64, 1024, 1024, 34.6),
]


def plain_step(rows: int, prompt: int, response: int) -> float:
    """Milliseconds predicted for one of `PLAIN_STEPS`."""
    cost = Roofline(load_shape("deepseek-r1"), find("h200"), Deployment(tensor_parallel=8))
    return cost.seconds(rows, 0, prompt + response / 2) * 1e3
