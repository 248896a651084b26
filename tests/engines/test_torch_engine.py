"""The torch engine: split invariance, isolation, recompute, resume, failures - on a tiny random Llama."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import forerun
from forerun.data.batch import Batch
from forerun.data.packing import Document
from forerun.engines.accumulation import predicted_mask
from forerun.engines.checkpoint_directory import checkpoints, latest_checkpoint, prune_checkpoints
from forerun.engines.hidden_cache import HiddenCache
from forerun.engines.optimizer import OptimizerConfig
from forerun.engines.protocol import NonFiniteError, TrainingEngine
from forerun.engines.state import restore_optimizer
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig
from forerun.errors import ForerunError, UsageError
from forerun.models.attach import attach
from forerun.mtp.config import MTPConfig
from forerun.trainers.batching import Rows, micro_batches, stack_rows
from forerun.trainers.sft import NextTokenLoss
from tests.families.tiny import VOCAB, tiny_trunk


def tiny_model(tied: bool = True, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return tiny_trunk("attached", dtype=dtype, seed=seed, initializer_range=0.02, tie_word_embeddings=tied).train()


def mtp_config(**changes: object) -> MTPConfig:
    settings: dict[str, object] = {
        "enable": True,
        "enable_train": True,
        "detach_encoder": True,
        "num_layers": 2,
        "mtp_loss_scaling_factor": 0.5,
        "chunk_size": 7,
    }
    return MTPConfig(**(settings | changes))  # type: ignore[arg-type]


def documents(seed: int = 1) -> list[Document]:
    """Uneven lengths and masks, so that every kind of per-part mean differs from the global one."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for length, prompt in ((19, 3), (5, 1), (11, 8), (14, 2), (4, 1), (9, 0)):
        ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        made.append(Document(ids, [j >= prompt for j in range(length)]))
    return made


def rows(seed: int = 1) -> list[Batch]:
    return Rows(documents(seed), max_length=24, packing=True)


def engine_for(model: PreTrainedModel, lr: float = 1e-2, **changes: object) -> TorchEngine:
    optimizer = OptimizerConfig(lr=lr, weight_decay=0.1, max_grad_norm=0.5)
    return TorchEngine(model, TorchEngineConfig(optimizer=optimizer, chunk_size=5, **changes))  # type: ignore[arg-type]


def gradients(engine: TorchEngine, batches: list[Batch]) -> tuple[dict[str, Tensor], dict[str, float]]:
    metrics = engine.forward_backward(batches, NextTokenLoss(batches))
    found = {n: p.grad.clone() for n, p in engine.model.named_parameters() if p.grad is not None}
    engine.optimizer.zero_grad(set_to_none=True)
    return found, metrics


def train(engine: TorchEngine, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        batches = micro_batches(rows(seed=step), 1)
        engine.forward_backward(batches, NextTokenLoss(batches))
        engine.step()


def weights(engine: TorchEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def trunk_weights(engine: TorchEngine) -> dict[str, Tensor]:
    head = {name for name, _ in engine.drafter_weights()}
    return {name: tensor for name, tensor in weights(engine).items() if name not in head}


def assert_same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_engine_fulfils_the_protocol() -> None:
    assert isinstance(engine_for(tiny_model()), TrainingEngine)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize("loss", ["ce", "soft_ce", "tv"])
def test_any_split_has_the_gradient_of_the_whole(tied: bool, isolated: bool, loss: str) -> None:
    model = attach(tiny_model(tied, dtype=torch.float64), mtp_config(detach_encoder=isolated, loss=loss), init="plain")
    engine = engine_for(model)
    packed = rows()
    assert len(packed) >= 3
    whole, whole_metrics = gradients(engine, [stack_rows(packed)])
    assert any(name.startswith("mtp.") for name in whole)
    padded = Rows(documents(), max_length=24, packing=False)
    for split in (micro_batches(packed, 1), micro_batches(packed, 2), micro_batches(padded, 4)):
        part, metrics = gradients(engine, split)
        assert part.keys() == whole.keys()
        for name, gradient in whole.items():
            torch.testing.assert_close(part[name], gradient, rtol=1e-5, atol=1e-9, msg=name)
        for name in ("loss", "mtp_loss", "mtp/depth_1/loss", "mtp/depth_2/loss", "entropy_sum", "target_count"):
            assert metrics[name] == pytest.approx(whole_metrics[name], rel=1e-6), name


def test_log_probs_equal_the_models_own_logits() -> None:
    model = tiny_model(dtype=torch.float64)
    engine = engine_for(model)
    padded = Rows(documents(), max_length=24, packing=False)
    packed = [stack_rows(rows())]
    temperature = 0.7
    (log_probs, entropy), *_ = engine.log_probs(packed, temperature)
    by_document = {}
    packed_hidden = engine.trunk_hidden_states(packed[0])
    for row in padded:
        ids = row.input_ids
        with torch.no_grad():
            alone = model(input_ids=ids, output_hidden_states=True)
        hidden = packed_hidden[packed[0].document_ids == row.document_ids[0, 0]]
        torch.testing.assert_close(hidden, alone.hidden_states[-1][0])
        reference = (alone.logits / temperature).log_softmax(-1)[0, :-1]
        chosen = reference.gather(-1, ids[0, 1:, None])[:, 0]
        spread = -(reference.exp() * reference).sum(-1)
        by_document[int(row.document_ids[0, 0])] = (chosen, spread, row.loss_mask[0, 1:])
    mask = predicted_mask(packed[0])
    assert not log_probs[~mask].any() and not entropy[~mask].any()
    for document, (chosen, spread, supervised) in by_document.items():
        here = (packed[0].document_ids == document) & mask
        torch.testing.assert_close(log_probs[here], chosen[supervised])
        torch.testing.assert_close(entropy[here], spread[supervised])


@pytest.mark.parametrize("tied", [True, False])
def test_heads_isolation_leaves_the_trunk_bit_identical(tied: bool) -> None:
    plain = engine_for(tiny_model(tied))
    isolated = engine_for(attach(tiny_model(tied), mtp_config(), init="plain"))
    head_before = {name: tensor.clone() for name, tensor in isolated.drafter_weights()}
    train(plain, 4)
    train(isolated, 4)
    assert_same(trunk_weights(isolated), weights(plain))
    head_after = dict(isolated.drafter_weights())
    assert head_before.keys() == head_after.keys() and head_before
    assert all(not torch.equal(head_before[name], head_after[name]) for name in head_before)


def test_joint_training_changes_the_trunk_and_scale_zero_does_not() -> None:
    plain = engine_for(tiny_model())
    joint = engine_for(attach(tiny_model(), mtp_config(detach_encoder=False), init="plain"))
    silent = engine_for(
        attach(tiny_model(), mtp_config(detach_encoder=False, mtp_loss_scaling_factor=0.0), init="plain")
    )
    for engine in (plain, joint, silent):
        train(engine, 2)
    reference, moved = weights(plain), trunk_weights(joint)
    assert reference.keys() == moved.keys()
    assert all(not torch.equal(reference[name], moved[name]) for name in reference)
    for name, tensor in trunk_weights(silent).items():
        torch.testing.assert_close(tensor, reference[name], msg=name)


def test_frozen_trunk_trains_the_head_alone_with_the_gradient_of_isolation() -> None:
    frozen = engine_for(attach(tiny_model(), mtp_config(), init="plain"), train_trunk=False)
    free = engine_for(attach(tiny_model(), mtp_config(), init="plain"))
    batches = micro_batches(rows(), 2)
    head_only, metrics = gradients(frozen, batches)
    both, _ = gradients(free, batches)
    assert head_only.keys() == {name for name in both if name.startswith("mtp.")}
    for name, gradient in head_only.items():
        torch.testing.assert_close(gradient, both[name], msg=name)
    assert "loss" not in metrics and metrics["mtp_loss"] > 0
    before = trunk_weights(frozen)
    train(frozen, 2)
    assert_same(before, trunk_weights(frozen))


def test_cached_hiddens_change_nothing_and_spare_the_trunk() -> None:
    direct = engine_for(attach(tiny_model(), mtp_config(), init="plain"), train_trunk=False)
    cache = HiddenCache()
    cached = TorchEngine(attach(tiny_model(), mtp_config(), init="plain"), direct.config, hidden_cache=cache)
    packed = rows()
    first, _ = gradients(cached, micro_batches(packed, 2))
    assert (cache.hits, cache.misses) == (0, len(packed))
    again, _ = gradients(cached, micro_batches(packed[::-1], 1))
    assert (cache.hits, cache.misses) == (len(packed), len(packed))
    reference, _ = gradients(direct, micro_batches(packed, 2))
    for name, gradient in reference.items():
        torch.testing.assert_close(first[name], gradient, msg=name)
        torch.testing.assert_close(again[name], gradient, msg=name)


def test_hidden_cache_refuses_a_trunk_that_moves() -> None:
    with pytest.raises(UsageError, match="train_trunk=false"):
        TorchEngine(attach(tiny_model(), mtp_config(), init="plain"), hidden_cache=HiddenCache())


@pytest.mark.parametrize("isolated", [True, False])
def test_activation_recompute_gives_identical_gradients(isolated: bool) -> None:
    batches = micro_batches(rows(), 2)
    plain, _ = gradients(engine_for(attach(tiny_model(), mtp_config(detach_encoder=isolated), init="plain")), batches)
    recomputed, _ = gradients(
        engine_for(attach(tiny_model(), mtp_config(detach_encoder=isolated), init="plain"), activation_recompute=True),
        batches,
    )
    assert_same(plain, recomputed)


def test_autocast_trains_float32_weights() -> None:
    engine = engine_for(attach(tiny_model(), mtp_config(), init="plain"), autocast="bfloat16")
    exact, _ = gradients(engine_for(attach(tiny_model(), mtp_config(), init="plain")), [stack_rows(rows())])
    rounded, _ = gradients(engine, [stack_rows(rows())])
    assert exact.keys() == rounded.keys()
    for name, gradient in exact.items():
        assert rounded[name].dtype == torch.float32
        assert (rounded[name] - gradient).norm() < 0.1 * gradient.norm() + 1e-4, name


def test_head_has_its_own_learning_rate_and_clipping() -> None:
    model = attach(tiny_model(), mtp_config(), init="plain")
    config = OptimizerConfig(lr=1e-3, mtp_lr=1e-2, max_grad_norm=1e-3, lr_scheduler_type="linear", total_steps=4)
    engine = TorchEngine(model, TorchEngineConfig(optimizer=config))
    batches = [stack_rows(rows())]
    engine.forward_backward(batches, NextTokenLoss(batches))
    report = engine.step()
    assert (report["lr"], report["mtp_lr"]) == (1e-3, 1e-2)
    assert report["grad_norm"] > 1e-3 and report["mtp_grad_norm"] > 1e-3
    engine.forward_backward(batches, NextTokenLoss(batches))
    assert engine.step()["lr"] == pytest.approx(0.75e-3)


def test_the_fused_update_is_the_same_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(fused: bool, saved: Path | None) -> dict[str, Tensor]:
        monkeypatch.setattr("forerun.engines.optimizer._fused", lambda parameters: fused)
        optimizer = OptimizerConfig(lr=1e-2, weight_decay=0.1)
        model = attach(tiny_model(dtype=torch.float64), mtp_config())
        engine = TorchEngine(model, TorchEngineConfig(optimizer=optimizer, chunk_size=5))
        if saved is None:
            train(engine, 2)
            engine.save(tmp_path / f"checkpoint-{fused:d}")
        else:
            engine.load(saved)
        train(engine, 2, first=2)
        assert engine.optimizer.defaults["fused"] is fused
        return weights(engine)

    expected = trained(False, None)
    for found in (
        trained(True, None),
        trained(True, tmp_path / "checkpoint-0"),
        trained(False, tmp_path / "checkpoint-1"),
    ):
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (None, "cpu")])
def test_the_fused_update_counts_its_steps_beside_the_weights(fused: bool | None, device: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = torch.optim.AdamW([weight], fused=fused)
    restore_optimizer(optimizer, {"weight": weight}, {"step:weight": torch.tensor(3.0)})
    assert optimizer.state[weight]["step"].device.type == device


def test_schedule_without_length_is_refused() -> None:
    config = TorchEngineConfig(optimizer=OptimizerConfig(lr_scheduler_type="linear"))
    with pytest.raises(UsageError, match="lr_scheduler_type"):
        TorchEngine(tiny_model(), config)


def test_nothing_to_train_and_nothing_supervised_are_refused() -> None:
    with pytest.raises(UsageError, match="nothing to train"):
        engine_for(tiny_model(), train_trunk=False)
    row = Rows([Document([1, 2, 3], [False] * 3)], 8, packing=True)
    with pytest.raises(UsageError, match="no supervised target"):
        engine_for(tiny_model()).forward_backward(row, NextTokenLoss(row))


def nan_loss(log_probs: Tensor, batch: Batch) -> tuple[Tensor, Mapping[str, Tensor]]:
    return log_probs.sum() * float("nan"), {}


def test_non_finite_loss_stops_or_drops_the_step() -> None:
    batches = [stack_rows(rows())]
    stopping = engine_for(attach(tiny_model(), mtp_config(), init="plain"))
    before = weights(stopping)
    with pytest.raises(NonFiniteError, match="step 1: loss is not finite"):
        stopping.forward_backward(batches, nan_loss)
    assert_same(before, weights(stopping))
    assert all(p.grad is None for p in stopping.model.parameters())

    dropping = engine_for(attach(tiny_model(), mtp_config(), init="plain"), on_nonfinite="skip")
    dropping.forward_backward(batches, nan_loss)
    assert dropping.step()["skipped"] == 1.0
    assert_same(before, weights(dropping))
    dropping.forward_backward(batches, NextTokenLoss(batches))
    assert dropping.step()["skipped"] == 0.0
    assert not torch.equal(weights(dropping)["model.norm.weight"], before["model.norm.weight"])


def test_non_finite_gradient_is_caught_before_the_update() -> None:
    batches = [stack_rows(rows())]
    engine = engine_for(attach(tiny_model(), mtp_config(), init="plain"))
    before = weights(engine)
    engine.forward_backward(batches, NextTokenLoss(batches))
    next(iter(engine.groups.mtp.values())).grad.fill_(float("inf"))  # type: ignore[union-attr]
    with pytest.raises(NonFiniteError, match="mtp_grad_norm"):
        engine.step()
    assert_same(before, weights(engine))


RESUME = """
import sys, torch
torch.set_num_threads(1)  # sums over threads round otherwise
sys.path.insert(0, {tests!r})
from test_torch_engine import *
engine = resumable({seed})
extra = engine.load(Path({checkpoint!r}))
assert extra == {{"epoch": 2}} and engine.global_step == 3
train(engine, 3, first=3)
torch.save({{"weights": weights(engine), "draw": torch.rand(3)}}, {out!r})
"""


def resumable(seed: int) -> TorchEngine:
    model = attach(tiny_model(seed=seed), mtp_config(detach_encoder=False), init="plain", seed=seed)
    optimizer = OptimizerConfig(lr=1e-2, lr_scheduler_type="cosine", warmup_steps=2, total_steps=6, weight_decay=0.1)
    return TorchEngine(model, TorchEngineConfig(optimizer=optimizer))


def test_resume_in_a_new_process_is_bit_identical(tmp_path: Path) -> None:
    straight = resumable(0)
    torch.manual_seed(5)
    train(straight, 3)
    straight.save(tmp_path / "checkpoint-3", {"epoch": 2})
    train(straight, 3, first=3)
    expected, draw = weights(straight), torch.rand(3)
    # The new process starts from other random weights and another generator state: all must come from the files.
    here, checkpoint, out = str(Path(__file__).parent), str(tmp_path / "checkpoint-3"), str(tmp_path / "out.pt")
    script = RESUME.format(tests=here, seed=1, checkpoint=checkpoint, out=out)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
    resumed = torch.load(tmp_path / "out.pt", weights_only=True)
    assert_same(expected, resumed["weights"])
    assert torch.equal(draw, resumed["draw"])


def test_a_resume_takes_the_rates_that_the_settings_say_now(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lower ones, say, after a loss that was not finite."""

    def made(lr: float) -> TorchEngine:
        optimizer = OptimizerConfig(lr=lr, mtp_lr=2 * lr, lr_scheduler_type="linear", warmup_steps=2, total_steps=10)
        return TorchEngine(attach(tiny_model(), mtp_config(), init="plain"), TorchEngineConfig(optimizer=optimizer))

    def rates(engine: TorchEngine) -> list[float]:
        return [group["lr"] for group in engine.optimizer.param_groups]

    straight = made(1e-2)
    train(straight, 3)
    straight.save(tmp_path / "checkpoint-3")
    for lr in (1e-2, 1e-4):
        resumed = made(lr)
        resumed.load(tmp_path / "checkpoint-3")
        told = [message for message in caplog.messages if "settings as they are now" in message]
        assert len(told) == (lr != 1e-2)
        for left in (7, 6):  # of the eight steps in which the rate falls to zero
            assert rates(resumed) == pytest.approx([lr * left / 8] * 2 + [2 * lr * left / 8] * 2, rel=1e-12)
            assert lr != 1e-2 or left != 7 or rates(resumed) == rates(straight)
            train(resumed, 1, first=3)


def test_a_checkpoint_is_also_a_hugging_face_directory(tmp_path: Path) -> None:
    engine = resumable(0)
    train(engine, 1)
    engine.save(tmp_path / "checkpoint-1")
    loaded = forerun.load(tmp_path / "checkpoint-1")
    assert_same(weights(engine), {name: tensor for name, tensor in TorchEngine(loaded).named_weights()})


def test_checkpoints_of_another_model_or_setting_are_refused(tmp_path: Path) -> None:
    engine = resumable(0)
    train(engine, 1)
    engine.save(tmp_path / "checkpoint-1")
    with pytest.raises(ForerunError, match="no place in the model"):
        engine_for(tiny_model()).load(tmp_path / "checkpoint-1")
    with pytest.raises(ForerunError, match="not being trained"):
        engine_for(attach(tiny_model(), mtp_config(), init="plain"), train_trunk=False).load(tmp_path / "checkpoint-1")
    rounding = engine_for(attach(tiny_model(), mtp_config(), init="plain").to(torch.bfloat16))
    before = weights(rounding)
    with pytest.raises(ForerunError, match=r"in torch\.float32, this run's model in torch\.bfloat16: resume with the"):
        rounding.load(tmp_path / "checkpoint-1")
    assert_same(weights(rounding), before)
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text("{")
    with pytest.raises(ForerunError, match="cannot be read"):
        resumable(0).load(tmp_path / "checkpoint-1")
    with pytest.raises(ForerunError, match=r"is not a training checkpoint: trainer_state\.json is missing"):
        resumable(0).load(tmp_path)


def test_an_interrupted_save_leaves_the_last_whole_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = resumable(0)
    train(engine, 1)
    engine.save(tmp_path / "checkpoint-1")
    kept = weights(engine)
    train(engine, 1, first=1)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("forerun.engines.torch_engine.write_state", full)
        with pytest.raises(ForerunError, match="free some space"):
            engine.save(tmp_path / "checkpoint-2")
    # What a kill leaves: a directory under an unfinished name.
    (tmp_path / ".checkpoint-9.unfinished").mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1"]
    latest = latest_checkpoint(tmp_path)
    assert latest is not None
    resumed = resumable(1)
    resumed.load(latest)
    assert_same(kept, weights(resumed))
    engine.save(tmp_path / "checkpoint-2")
    engine.save(tmp_path / "checkpoint-10")
    engine.save(tmp_path / "checkpoint-10")
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-2", "checkpoint-10"]
    prune_checkpoints(tmp_path, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-10"]


def test_evaluation_measures_agreement_and_leaves_no_gradient() -> None:
    engine = engine_for(attach(tiny_model(), mtp_config(), init="plain"))
    figures = engine.evaluate(micro_batches(rows(), 2))
    whole = engine.evaluate([stack_rows(rows())])
    assert figures.keys() == whole.keys()
    assert {"loss", "mtp/depth_1/trunk_top1", "mtp/depth_2/trunk_top1", "mtp/acceptance_length"} <= figures.keys()
    for name, value in whole.items():
        assert figures[name] == pytest.approx(value, rel=1e-5), name
    assert all(p.grad is None for p in engine.model.parameters())
