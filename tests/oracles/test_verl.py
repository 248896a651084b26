"""verl 0.9.1 as judge: the same MTP settings with the same meaning, and the same policy arithmetic."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from forerun import MTPConfig, attach, load
from forerun.algorithms.advantages import grpo_advantages, rloo_advantages
from forerun.algorithms.aggregation import LossAggMode, LossCounts, aggregate_loss
from forerun.algorithms.importance import importance_weights
from forerun.algorithms.kl import KLLossType, kl_estimate
from forerun.algorithms.policy_loss import gspo_log_ratio, policy_loss
from forerun.algorithms.rejection import Criterion, rejection_mask
from forerun.algorithms.sequences import sequence_lengths
from forerun.config_algorithm import RolloutCorrectionConfig
from forerun.errors import UsageError
from forerun.models.carrier import MTPCarrier
from forerun.mtp.log_probs import chunked_log_probs
from forerun.rewards.overlong import overlong_penalty
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
        "gspo": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0, "weighted": True},
    }.items()
}
for name, case in LOSSES.items():
    case["loss_mode"] = "gspo" if name.endswith("gspo") else "vanilla"
CORRECTIONS: dict[str, dict[str, Any]] = {
    f"{level} {threshold}": {"rollout_is": level, "rollout_is_threshold": threshold, "rollout_rs": None}
    for level in ("token", "sequence")
    for threshold in ("1.5", "0.7_1.5")
}
RATIOS = {"token_k1": "0.8_1.25", "seq_mean_k1": "0.8_1.25", "seq_sum_k1": "0.25_4.0"}
THRESHOLDS = {"token": "0.3", "seq_sum": "0.8", "seq_mean": "0.13", "seq_max": "0.4"}  # of k2 and k3
CORRECTIONS |= {
    name: {
        "rollout_is": None,
        "rollout_rs": name,
        "rollout_rs_threshold": RATIOS.get(name) or THRESHOLDS[name.rpartition("_")[0]],
    }
    for name in get_args(Criterion)
}
CORRECTIONS["several"] = {
    "rollout_is": "token",
    "rollout_is_threshold": "2.0",
    "rollout_rs": "token_k1,seq_mean_k3",
    "rollout_rs_threshold": "1.8,0.4",
}
OVERLONG = {
    "half": {"max_response_length": 20, "buffer": {"enable": True, "len": 8, "penalty_factor": 0.5, "log": False}},
    "all": {"max_response_length": 5, "buffer": {"enable": True, "len": 5, "penalty_factor": 1.0, "log": False}},
    "off": {"max_response_length": 5, "buffer": {"enable": False, "len": 5, "penalty_factor": 1.0, "log": False}},
}
LONGEST, TEMPERATURE = 9, 0.7
ROWS = torch.arange(8)[:, None].expand(8, LONGEST)  # each answer is a row
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
        "rollout_log_probs": old + 0.5 * normal(),
        "rewards": rewards,
        "group_ids": torch.tensor([4, 1, 4, 1, 1, 1, 4, 9]),
        "logits": 3 * torch.randn(8, LONGEST, 13, generator=draw, dtype=torch.float64),
    }


@pytest.fixture(scope="module")
def theirs(verl_env: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    settings = {
        "losses": {name: case | {"global_batch_info": GLOBAL} for name, case in LOSSES.items()},
        "modes": list(get_args(LossAggMode)),
        "temperature": TEMPERATURE,
        "kl": list(get_args(KLLossType)),
        "corrections": CORRECTIONS,
        "overlong": OVERLONG,
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


def test_rloo_advantages(theirs: dict[str, Tensor]) -> None:
    made = responses()
    ours = rloo_advantages(made["rewards"].sum(-1), made["group_ids"])
    torch.testing.assert_close(ours[:, None] * made["mask"], theirs["advantages rloo"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_policy_loss_gradient_and_figures(theirs: dict[str, Tensor], name: str) -> None:
    made, case = responses(), LOSSES[name]
    log_probs = made["log_probs"].requires_grad_()
    gspo = case["loss_mode"] == "gspo"
    result = policy_loss(
        log_probs,
        made["old_log_probs"],
        made["advantages"],
        made["mask"],
        case["clip_ratio_low"],
        case["clip_ratio_high"],
        None if gspo else case["clip_ratio_c"],
        importance_weights=made["weights"] if case["weighted"] else None,
        log_ratio=gspo_log_ratio(log_probs, made["old_log_probs"], made["mask"], ROWS) if gspo else None,
    )
    lengths = sequence_lengths(made["mask"], ROWS)
    loss = aggregate_loss(result.losses, made["mask"], case["loss_agg_mode"], COUNTS, lengths, LONGEST)
    # 1e-8 in a denominator of verl's seq-mean-token-mean.
    torch.testing.assert_close(loss, theirs[f"{name} loss"], rtol=1e-7, atol=1e-12)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(gradient, theirs[f"{name} gradient"], rtol=1e-7, atol=1e-12)
    figures = result.stats.compute()
    ours = [figures[key] for key in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl")]
    assert ours == pytest.approx(theirs[f"{name} metrics"].tolist(), rel=1e-6)
    assert ours[0] > 0 and (ours[1] > 0) != gspo  # both clips were at work


@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_a_micro_batch_s_share_of_the_global_loss(theirs: dict[str, Tensor], mode: LossAggMode) -> None:
    made = {name: x[:4] for name, x in responses().items()}
    lengths = sequence_lengths(made["mask"], torch.arange(4)[:, None].expand(4, LONGEST))
    ours = aggregate_loss(made["advantages"], made["mask"], mode, COUNTS, lengths, LONGEST)
    torch.testing.assert_close(ours, theirs[f"part {mode}"], rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("mode", get_args(LossAggMode))
def test_entropy_and_its_gradient(theirs: dict[str, Tensor], mode: LossAggMode) -> None:
    made = responses()
    logits, mask = made["logits"].requires_grad_(), made["mask"]
    tokens = torch.zeros(mask.numel(), dtype=torch.long)
    _, entropies = chunked_log_probs(logits.flatten(0, 1), tokens, lambda hidden: hidden, 5, TEMPERATURE)
    lengths = sequence_lengths(mask, ROWS)
    ours = aggregate_loss(entropies.view(mask.shape), mask, mode, COUNTS, lengths, LONGEST)
    torch.testing.assert_close(ours.detach(), theirs[f"entropy {mode}"], rtol=1e-7, atol=1e-12)
    (gradient,) = torch.autograd.grad(ours, logits)
    torch.testing.assert_close(gradient, theirs[f"entropy {mode} gradient"], rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("kind", get_args(KLLossType))
def test_kl_estimates_and_their_gradients(theirs: dict[str, Tensor], kind: KLLossType) -> None:
    made = responses()
    policy, everywhere = made["log_probs"].requires_grad_(), torch.ones(8, LONGEST, dtype=torch.bool)
    ours = kl_estimate(policy, made["old_log_probs"], everywhere, kind)
    torch.testing.assert_close(ours.detach(), theirs[f"kl {kind}"], rtol=1e-9, atol=1e-12)
    (gradient,) = torch.autograd.grad(ours.sum(), policy)
    torch.testing.assert_close(gradient, theirs[f"kl {kind} gradient"], rtol=1e-9, atol=1e-12)


def test_kl_in_the_reward(theirs: dict[str, Tensor]) -> None:
    """verl's token rewards less 0.5 x KL, summed over a response as its estimators do."""
    made = responses()
    kl = kl_estimate(made["log_probs"], made["old_log_probs"], made["mask"], "kl")
    expected = torch.where(made["mask"], theirs["rewards less kl"] - made["rewards"], 0.0).sum(-1)
    torch.testing.assert_close(-0.5 * kl.sum(-1), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_rollout_correction(theirs: dict[str, Tensor], name: str) -> None:
    made = responses()
    config = RolloutCorrectionConfig(**CORRECTIONS[name])
    old, rollout, mask = made["old_log_probs"], made["rollout_log_probs"], made["mask"]
    kept = rejection_mask(old, rollout, mask, ROWS, config.criteria())
    assert torch.equal(kept, theirs[f"{name} mask"].bool())
    if config.rollout_rs is not None:
        rejected = 1 - kept.sum() / mask.sum()
        assert 0 < float(rejected) < 1
        assert float(rejected) == pytest.approx(float(theirs[f"{name} rejected"]), abs=1e-6)
    if config.rollout_is is not None:
        upper, lower = config.importance_bounds()
        ours = importance_weights(old, rollout, mask, ROWS, config.rollout_is, upper, lower)
        torch.testing.assert_close(ours, theirs[f"{name} weights"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OVERLONG)
def test_overlong_reward_is_the_dapo_manager_s(theirs: dict[str, Tensor], name: str) -> None:
    case = OVERLONG[name]
    longest, buffer = case["max_response_length"], case["buffer"]
    penalties = [
        overlong_penalty(length, longest, buffer["len"], buffer["penalty_factor"]) if buffer["enable"] else 0.0
        for length in range(1, longest + 1)
    ]
    assert (min(penalties) < 0) == buffer["enable"]
    torch.testing.assert_close(0.25 + torch.tensor(penalties), theirs[f"overlong {name}"], rtol=1e-6, atol=1e-6)
