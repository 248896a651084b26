"""Trunks that run through transformers' own layers: experts, latent and gated attention, windows, recurrent layers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.errors import UsageError
from forerun.models.attach import attach
from forerun.models.carrier import MTPCarrier, mtp_weight_names, named_weights
from forerun.mtp.config import MTPConfig
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.native.trunks import ModuleTrunk
from forerun.rollout.protocol import Completion, Request, SamplingParams
from forerun.rollout.sync import digest
from tests.families.tiny import tiny_trunk
from tests.rollout import tiny

FAMILIES = [
    "attached_gemma",  # zero-centred norms, scaled embeddings
    "attached_moe",
    "deepseek_v3",
    "ernie4_5",  # rotates pairs
    "glm4_moe",
    "longcat_flash",  # two attentions a layer
    "qwen3_5",  # recurrent layers, a vision tower
    "qwen3_next",
]
RECURRENT = ["qwen3_5_text", "qwen3_next"]
# Other trunks, with what makes them special.
SPECIAL: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 5},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "Granite": {"residual_multiplier": 0.2, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "Phi3": {"partial_rotary_factor": 0.5},
}
family = cache(tiny.family_carrier)


def special(name: str) -> MTPCarrier:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "pad_token_id": None}
    trunk = tiny_trunk(name + "ForCausalLM", dtype=torch.float64, **sizes, **SPECIAL[name])
    text = torch.randint(0, tiny.VOCAB, (8, 48), generator=torch.Generator().manual_seed(2))
    return attach(trunk, MTPConfig(True), fit_to=[text]).eval()


def check_text(model: PreTrainedModel, completions: list[Completion], greedy: bool) -> None:
    """Every token's log-probability is the model's own, and a greedy text its first choices."""
    for c in completions:
        logits = tiny.teacher_forced(model, c.prompt_token_ids, c.token_ids)
        raw = logits.log_softmax(-1).gather(1, torch.tensor(c.token_ids)[:, None]).squeeze(1)
        # transformers' norms, routers and delta rule compute in float32 whatever the model's type.
        torch.testing.assert_close(torch.tensor(c.raw_log_probs, dtype=torch.float64), raw, rtol=0, atol=1e-4)
        if greedy:
            assert c.token_ids == logits.argmax(-1).tolist()


def check_engine(model: MTPCarrier) -> None:
    """Batches that rows join and leave, prompts in pieces and shared, with and without drafts."""
    engine = NativeEngine(model, products="linear", max_num_seqs=3, prefill_chunk_size=4)
    assert isinstance(engine.runner.trunk, ModuleTrunk)
    rows = tiny.prompts(7)
    accepted = rejected = 0
    for engine.num_speculative_tokens, greedy in ((0, True), (3, True), (2, False)):
        sampling = {"temperature": 0} if greedy else {"temperature": 1.0, "seed": 3}
        completions = engine.generate(tiny.requests(rows, max_tokens=12, **sampling))
        check_text(model, completions, greedy)
        accepted += sum(c.spec_num_accepted_tokens or 0 for c in completions)
        rejected += sum((c.spec_num_draft_tokens or 0) - (c.spec_num_accepted_tokens or 0) for c in completions)
    assert accepted > 0 and rejected > 0  # otherwise rolling back was never at stake


@pytest.mark.parametrize("name", FAMILIES)
def test_families_write_what_the_model_would(name: str) -> None:
    check_engine(family(name))


@pytest.mark.parametrize("name", list(SPECIAL))
def test_other_trunks_write_what_the_model_would(name: str) -> None:
    check_engine(special(name))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "deepseek_v3"])
def test_updates_reach_every_weight_of_copied_modules(name: str) -> None:
    model = tiny.family_carrier(name)
    engine = NativeEngine(model, products="linear", num_speculative_tokens=2)
    before = engine.drafter_digest()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    own = dict(named_weights(model))
    drafter: list[tuple[str, Tensor]] = [(key, own[key]) for key in mtp_weight_names(model).values()]
    assert engine.drafter_digest() == before != digest(drafter)  # a copy of its own
    engine.update_weights(own.items(), 1)
    assert engine.drafter_digest() == digest(drafter)
    check_text(model, engine.generate(tiny.requests(tiny.prompts(2), max_tokens=8, temperature=0)), greedy=True)


@pytest.mark.parametrize("name", RECURRENT)
def test_samples_of_one_prompt_share_its_state_only_while_it_stands_there(name: str) -> None:
    """Later samples start when the earlier ones have gone on, whose states are those of their own texts."""
    model = family(name)
    engine = NativeEngine(model, products="linear", num_speculative_tokens=2, max_num_seqs=2)
    prompt = [7, 8]  # short, as the states forget
    wanted = [Request(str(count), prompt, SamplingParams(max_tokens=count, seed=count)) for count in (3, 11, 5, 7, 4)]
    check_text(model, engine.generate(wanted), greedy=False)


@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_rolling_back_leaves_the_states_of_the_accepted_tokens_alone(kept: int) -> None:
    """Against a row that reads the accepted tokens only, and never the others."""
    runner = NativeEngine(family("qwen3_next"), products="linear").runner
    prompt, tokens = torch.tensor([[3, 1, 4, 1, 5]]), torch.tensor([[9, 2, 6, 5]])

    def states(keep: int, read: int) -> list[Tensor]:
        runner.allocate(2, 16)
        runner.prefill(prompt, None, [(0, 0, 5)])
        runner.copy_row(0, 1, 5)
        positions = 5 + torch.arange(read).expand(2, -1)
        runner.decode(tokens[:, :read].expand(2, -1), positions, 5 + read, uniform=True)
        runner.commit([keep, min(read, 4 - keep + 1)])  # the rows keep different counts
        assert runner.cache is not None
        (found,) = runner.cache.states.values()
        return [found.inputs[0], found.memory[0]]  # type: ignore[attr-defined]

    with torch.no_grad():
        for ours, expected in zip(states(kept, 4), states(kept, kept), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_no_second_copy_of_the_weights_is_kept() -> None:
    """Granite's layers look like Llama's, so the engine's own are tried first; they go before the others come."""
    model = special("Granite")
    engine = NativeEngine(model, products="linear")
    held = {id(linear) for linear in engine.runner.table.linears}
    used = {
        id(module)
        for part in (engine.runner.trunk, engine.runner.block, engine.runner.head)
        for module in part.modules()  # type: ignore[union-attr]
    }
    assert held <= used
    own = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert not own & {weight.data_ptr() for weight in engine.runner.weights.values()}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek_v32", "indexed_attention"),
        ("glm_moe_dsa", "indexed_attention"),
        ("nemotron_h", "rolls back recurrent layers of Qwen3-Next's kind only"),
    ],
)
def test_families_that_are_refused_say_why(name: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        NativeEngine(tiny_trunk(name))


def test_attention_with_more_than_a_mask_is_refused() -> None:
    with pytest.raises(UsageError, match="softcap"):
        NativeEngine(tiny_trunk("Gemma2ForCausalLM", head_dim=8))
