"""verl 0.9.1 as judge: the same MTP settings with the same meaning, and the same arithmetic of GRPO and DAPO."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from forerun import MTPConfig, attach, load
from forerun.algorithms.advantages import grpo_advantages
from forerun.algorithms.aggregation import LossAggMode, LossCounts, aggregate_loss, sequence_lengths
from forerun.algorithms.policy_loss import policy_loss
from forerun.errors import UsageError
from forerun.models.carrier import MTPCarrier
from tests.models.tiny import gradients, tiny_model, token_rows
from tests.oracles.exchange import ask, run_script

pytestmark = pytest.mark.oracle


# ---- MtpConfig


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One with an MTP block, one without."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tiny_model(dtype=torch.float32).save_pretrained(folder / "without")
    attach(tiny_model(dtype=torch.float32), MTPConfig(enable=True)).save_pretrained(folder / "with")
    return folder / "with", folder / "without"


@pytest.fixture(scope="module")
def answer(verl_env: Path, checkpoints: tuple[Path, Path]) -> dict[str, Any]:
    return json.loads(run_script(verl_env, "verl/mtp_config.py", *map(str, checkpoints)))


def test_fields_types_and_defaults_are_verls(answer: dict[str, Any]) -> None:
    """verl/workers/config/model.py, class MtpConfig. Ours come after, each with a default."""
    ours = [[f.name, f.type, f.default] for f in dataclasses.fields(MTPConfig)]
    theirs = answer["fields"]
    assert len(theirs) == 11 and ours[:11] == theirs
    assert all(field.default is not dataclasses.MISSING for field in dataclasses.fields(MTPConfig)[11:])
    assert dataclasses.asdict(MTPConfig(**{name: default for name, _, default in theirs})) == dataclasses.asdict(
        MTPConfig()
    )


def test_enable_keeps_the_block_and_its_absence_clears_the_depth(
    answer: dict[str, Any], checkpoints: tuple[Path, Path]
) -> None:
    """verl/workers/config/model.py, HFModelConfig.__post_init__: "When MTP is disabled, zero out MTP layer counts"."""
    for enable, name in ((True, "enabled"), (False, "disabled")):
        ours = load(checkpoints[0], MTPConfig(enable=enable))
        assert ours.config.num_nextn_predict_layers == answer["depth"][name] == int(enable)
        assert isinstance(ours, MTPCarrier) == enable


def test_enable_on_a_model_without_a_block_is_an_error(answer: dict[str, Any], checkpoints: tuple[Path, Path]) -> None:
    """verl/utils/megatron_utils.py, check_mtp_config."""
    assert "enable mtp while model has no mtp layer" in answer["checked"]["enabled without a block"]["error"]
    with pytest.raises(UsageError, match="carries no MTP block"):
        load(checkpoints[1], MTPConfig(enable=True))
    assert answer["checked"]["disabled"] == {"mtp_num_layers": None}


def mtp_gradients(**settings: Any) -> dict[str, Tensor | None]:
    """Of the MTP loss alone: what the forward of a trunk that learns nothing from its own loss leaves behind."""
    model = attach(tiny_model(tied=False), MTPConfig(enable=True, **settings), init="plain").double().train()
    (model(input_ids=token_rows(2, 12), labels=token_rows(2, 12)).logits * 0.0).sum().backward()
    return gradients(model)


def size(grad: Tensor | None) -> float:
    return 0.0 if grad is None else float(grad.abs().sum())


def test_the_scaling_factor_is_the_one_that_megatron_divides_by_the_depths(answer: dict[str, Any]) -> None:
    """verl/models/mcore/mtp_patch.py: mtp_loss_scale = mtp_loss_scaling_factor / mtp_num_layers."""
    assert answer["checked"]["enabled"] == {"mtp_loss_scaling_factor": 0.25}
    name = "mtp.layers.0.proj.weight"
    ratio = size(mtp_gradients(enable_train=True, mtp_loss_scaling_factor=0.25)[name]) / size(
        mtp_gradients(enable_train=True)[name]
    )
    assert ratio == pytest.approx(2.5, rel=1e-6)


def test_enable_alone_trains_nothing() -> None:
    """MtpConfig's docstring: "Enable loading and saving of MTP parameters, but do not use them"."""
    assert sum(size(grad) for name, grad in mtp_gradients().items() if name.startswith("mtp.")) == 0
    assert sum(size(grad) for name, grad in mtp_gradients(enable_train=True).items() if name.startswith("mtp.")) > 0


def test_train_and_rollout_ask_for_enable_here_and_are_ignored_without_it_in_verl(answer: dict[str, Any]) -> None:
    """A difference. verl reads `mtp.enable and mtp.enable_train` (workers/engine/megatron/transformer_impl.py) and
    `mtp.enable and mtp.enable_rollout` (workers/rollout/*): without `enable` both are silently off."""
    assert answer["train or rollout without enable"]["enable_train"]
    for name in ("enable_train", "enable_rollout"):
        with pytest.raises(ValueError, match=f"mtp.{name}=true needs mtp.enable=true"):
            MTPConfig(**{name: True})


def test_detach_encoder_cuts_off_trunk_and_embedding_and_no_depth_from_those_before(answer: dict[str, Any]) -> None:
    """verl/models/mcore/mtp_patch.py, _patched_get_embeddings_for_detach: "Detach token embeddings and main-decoder
    hidden states". Depth 2's loss reaches depth 1's block, there as here."""
    assert answer["isolation"] == {"trunk": False, "embedding": False, "block_1": True, "block_2": True}
    ours = mtp_gradients(enable_train=True, detach_encoder=True, num_layers=2)
    assert all((size(grad) > 0) == name.startswith("mtp.") for name, grad in ours.items())
    alone = mtp_gradients(enable_train=True, detach_encoder=True, num_layers=1)["mtp.layers.0.proj.weight"]
    first = ours["mtp.layers.0.proj.weight"]
    assert alone is not None and first is not None
    # Half of depth 1's share (factor / D), and depth 2's on top.
    assert size(first - alone / 2) > 0.01 * size(alone)


def test_the_lm_head_learns_from_mtp_in_joint_training_here_and_never_in_verl(answer: dict[str, Any]) -> None:
    """A difference. verl's joint training detaches the LM head's weight all the same (mtp_patch.py, where Megatron-Core
    has no process_mtp_loss of its own); ours trains everything. With tied embeddings the embedding's share remains."""
    assert answer["head detached"]
    assert size(mtp_gradients(enable_train=True)["lm_head.weight"]) > 0
    assert size(mtp_gradients(enable_train=True, detach_encoder=True)["lm_head.weight"]) == 0


# ---- policy optimisation

LOSSES: dict[str, dict[str, Any]] = {
    f"{mode} {kind}": {"loss_agg_mode": mode, **settings}
    for mode in get_args(LossAggMode)
    for kind, settings in {
        "ppo": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, "weighted": False},
        "dapo": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5, "weighted": True},
    }.items()
}
LONGEST = 9
COUNTS = LossCounts(tokens=41, sequences=11)  # of a batch of which these rows are a part
GLOBAL = {"batch_num_tokens": COUNTS.tokens, "global_batch_size": COUNTS.sequences, "loss_scale_factor": LONGEST}


def responses() -> dict[str, Tensor]:
    """Eight answers in groups of 3, 4 and 1; one has no token, and masks have holes."""
    draw = torch.Generator().manual_seed(3)
    mask = torch.rand(8, LONGEST, generator=draw) < 0.7
    mask[5] = False
    mask[0] = True

    def normal() -> Tensor:
        return torch.randn(8, LONGEST, generator=draw, dtype=torch.float64)

    old = -normal().abs()
    scores = torch.tensor([1.0, 0.0, 0.5, 1.0, 1.0, 1.0, -1.0, 0.7])  # one group with an equal score but one
    rewards = torch.zeros(8, LONGEST)
    rewards[:, -1] = scores
    return {
        "mask": mask,
        "old_log_probs": old,
        "log_probs": old + normal(),  # ratios far outside the clip, so that every branch is taken
        "advantages": normal(),
        "weights": normal().abs(),
        "rewards": rewards,
        "group_ids": torch.tensor([4, 1, 4, 1, 1, 1, 4, 9]),
    }


@pytest.fixture(scope="module")
def theirs(verl_env: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    settings = {
        "losses": {name: case | {"global_batch_info": GLOBAL} for name, case in LOSSES.items()},
        "modes": list(get_args(LossAggMode)),
        "global_batch_info": GLOBAL,
    }
    given = {name: x.long() if x.dtype == torch.bool else x for name, x in responses().items()}
    return ask(verl_env, "verl/policy.py", tmp_path_factory.mktemp("policy"), settings, given)


@pytest.mark.parametrize("normalize", [True, False])
def test_grpo_advantages(theirs: dict[str, Tensor], normalize: bool) -> None:
    made = responses()
    ours = grpo_advantages(made["rewards"].sum(-1), made["group_ids"], normalize_by_std=normalize)
    # verl spreads an answer's advantage over its tokens.
    expected = theirs[f"advantages {normalize}"]
    torch.testing.assert_close(ours[:, None] * made["mask"], expected, rtol=1e-5, atol=1e-6)
    assert expected.abs().sum() > 1


@pytest.mark.parametrize("name", LOSSES)
def test_policy_loss_gradient_and_figures(theirs: dict[str, Tensor], name: str) -> None:
    made, case = responses(), LOSSES[name]
    log_probs = made["log_probs"].requires_grad_()
    result = policy_loss(
        log_probs,
        made["old_log_probs"],
        made["advantages"],
        made["mask"],
        case["clip_ratio_low"],
        case["clip_ratio_high"],
        case["clip_ratio_c"],
        importance_weights=made["weights"] if case["weighted"] else None,
    )
    rows = torch.arange(8)[:, None].expand(8, LONGEST)
    lengths = sequence_lengths(made["mask"], rows)
    loss = aggregate_loss(result.losses, made["mask"], case["loss_agg_mode"], COUNTS, lengths, LONGEST)
    # 1e-8 in a denominator of verl's seq-mean-token-mean.
    torch.testing.assert_close(loss, theirs[f"{name} loss"], rtol=1e-7, atol=1e-12)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(gradient, theirs[f"{name} gradient"], rtol=1e-7, atol=1e-12)
    figures = result.stats.compute()
    ours = [figures[key] for key in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl")]
    assert ours == pytest.approx(theirs[f"{name} metrics"].tolist(), rel=1e-6)
    assert ours[0] > 0 and ours[1] > 0  # both clips were at work


@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_a_micro_batch_s_share_of_the_global_loss(theirs: dict[str, Tensor], mode: LossAggMode) -> None:
    made = {name: x[:4] for name, x in responses().items()}
    lengths = sequence_lengths(made["mask"], torch.arange(4)[:, None].expand(4, LONGEST))
    ours = aggregate_loss(made["advantages"], made["mask"], mode, COUNTS, lengths, LONGEST)
    torch.testing.assert_close(ours, theirs[f"part {mode}"], rtol=1e-7, atol=1e-12)
