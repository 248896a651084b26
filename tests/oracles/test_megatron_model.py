"""A whole model with MTP against megatron-core's GPTModel: same weights and rows, one training step.

Main loss, loss per depth and the gradient of every parameter, through the entry path that trainers use: an attached
model called with labels, and `backward()` on the loss that it returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import forerun
from forerun.families import ATTACHED, FamilyRecord
from forerun.models.carrier import MTPCarrier
from forerun.mtp.block import ConcatOrder
from tests.oracles.exchange import ask
from tests.oracles.megatron_layout import rows_for_megatron, weights_for_megatron

pytestmark = pytest.mark.oracle

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


@dataclass(frozen=True)
class Case:
    depths: int
    tied: bool
    concat_order: ConcatOrder = "embed_hidden"
    cu_seqlens: tuple[int, ...] = ()

    def family(self) -> FamilyRecord:
        """What Megatron computes, which is a record's defaults: every hidden is handed on after its norm."""
        names = {"depth_key": ATTACHED.depth_key, "tensor_names": ATTACHED.tensor_names}
        return FamilyRecord(name="megatron", model_types=(), concat_order=self.concat_order, **names)

    def model(self) -> MTPCarrier:
        torch.manual_seed(self.depths)
        config = LlamaConfig(**SHAPE, tie_word_embeddings=self.tied, initializer_range=0.1)
        model = forerun.attach(
            LlamaForCausalLM(config),
            forerun.MTPConfig(enable=True, enable_train=True, num_layers=self.depths, chunk_size=7),
            init="plain",
            family=self.family(),
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms that differ from each other, so that none can stand in for another
                    parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
        return model.train()

    def boundaries(self) -> tuple[int, ...]:
        return self.cu_seqlens or (0, 20)

    def rows(self) -> dict[str, Tensor]:
        shape = (1 if self.cu_seqlens else 3, self.boundaries()[-1])
        generator = torch.Generator().manual_seed(7)
        ids = torch.randint(1, SHAPE["vocab_size"], shape, generator=generator)
        positions = torch.cat([torch.arange(end - start) for start, end in pairwise(self.boundaries())]).expand(shape)
        mask = torch.rand(shape, generator=generator) < 0.7
        return {"input_ids": ids, "position_ids": positions, "loss_mask": mask}


CASES = {
    "D1-tied": Case(1, tied=True),
    "D1-untied": Case(1, tied=False),
    "D2-tied": Case(2, tied=True),
    "D2-untied": Case(2, tied=False),
    "D2-hidden-first": Case(2, tied=True, concat_order="hidden_embed"),
    "D2-packed": Case(2, tied=False, cu_seqlens=(0, 9, 10, 22, 24, 40)),
}


@pytest.fixture(scope="module")
def megatron(megatron_env: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Megatron's answer to all cases."""
    settings, given = {}, {}
    for name, case in CASES.items():
        settings[name] = {"shape": SHAPE, "depths": case.depths, "tied": case.tied, "cu_seqlens": list(case.cu_seqlens)}
        model, rows = case.model(), case.rows()
        weights = weights_for_megatron(dict(model.named_parameters()), model.config, case.depths, case.concat_order)
        given |= {f"{name}/weight/{key}": tensor for key, tensor in weights.items()}
        theirs = rows_for_megatron(rows["input_ids"], rows["loss_mask"], list(pairwise(case.boundaries())))
        given |= {f"{name}/{field}": tensor for field, tensor in theirs.items()}
    return ask(megatron_env, "megatron/gpt.py", tmp_path_factory.mktemp("gpt"), settings, given)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_every_gradient(megatron: dict[str, Tensor], name: str) -> None:
    case = CASES[name]
    model, rows = case.model(), case.rows()
    # As a trainer hands it over; the first token of a document has no position before it that could predict it.
    starts = rows["position_ids"] == 0
    labels = torch.where(rows["loss_mask"] & ~starts, rows["input_ids"], -100)
    # Without use_cache=False transformers makes a cache, and then takes a packed row for one document.
    out = model(input_ids=rows["input_ids"], position_ids=rows["position_ids"], labels=labels, use_cache=False)
    loss = out.loss
    loss.backward()
    stats = model.pop_mtp_stats()
    assert stats is not None
    figures = stats.compute()

    torch.testing.assert_close(loss.detach(), megatron[f"{name}/main"], rtol=1e-6, atol=0)
    ours = torch.tensor([figures[f"mtp/depth_{depth}/loss"] for depth in range(1, case.depths + 1)])
    torch.testing.assert_close(ours, megatron[f"{name}/losses"], rtol=1e-6, atol=0)

    parameters = dict(model.named_parameters())
    assert all(p.grad is not None for p in parameters.values())
    gradients = weights_for_megatron(
        {n: p.grad for n, p in parameters.items()}, model.config, case.depths, case.concat_order
    )
    theirs = {key.split("/", 2)[2]: g for key, g in megatron.items() if key.startswith(f"{name}/gradient/")}
    assert gradients.keys() == theirs.keys()
    for key, gradient in gradients.items():
        difference = (gradient - theirs[key]).norm() / theirs[key].norm()
        assert difference < 2e-6, f"{key}: relative difference {difference:.1e}"
