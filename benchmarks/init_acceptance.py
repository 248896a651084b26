"""How the ways to start a head compare after the same number of training tokens, as JSON lines.

    python benchmarks/init_acceptance.py [MODEL_DIR] [--tokens 0 10000 30000] [--lr 1e-3] [--starts carry plain ...]

The trunk (SmolLM2-135M-Instruct unless MODEL_DIR names another with its vocabulary, and without a block) is frozen and
runs once over the packaged text; every start then trains on the same rows in the same order with the same optimizer.
Figures are of the same held-out responses: the MTP loss, the share of positions where the head chooses as the trunk
does (`trunk_top1`), and the expected acceptance under rejection sampling at temperature 1. Starts:

    carry      attach's default: the trunk's own hidden passed on
    plain      attach(init="plain"): every matrix drawn
    copy_last  the trunk's last layer over the sum of both halves, with the trunk's final norm
    fit        attach(init="carry"), then the closed form on the first `--fit-tokens` of the training text: what it has
               read without a step is in `fit_tokens`
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from forerun import MTPConfig, attach, load
from forerun.data.batch import Batch
from forerun.data.gguf import smollm2
from forerun.demo import self_text
from forerun.engines.hidden_cache import HiddenCache
from forerun.engines.optimizer import OptimizerConfig
from forerun.engines.torch_engine import TorchEngine, TorchEngineConfig
from forerun.models.carrier import MTPCarrier
from forerun.models.trunk import base_model
from forerun.trainers.batching import Rows
from forerun.trainers.head_init import fit_new_head

ROW_LENGTH = 448
WARMUP_STEPS = 10  # Adam's first steps are as long as its last: without warm-up they undo any start


def rows_of(split: self_text.Split, tokens: int) -> list[Batch]:
    """Packed rows of the packaged responses, prompts included."""
    responses = self_text.take(self_text.packaged(), split, tokens)
    return Rows([response.document(prompt_too=True) for response in responses], ROW_LENGTH, packing=True)


def attached(model_dir: Path, start: str, loss: str) -> MTPCarrier:
    """The trunk with a head that starts as asked, up to a fit."""
    mtp = MTPConfig(
        enable=True, enable_train=True, detach_encoder=True, mtp_loss_scaling_factor=1.0, loss=loss  # type: ignore[arg-type]
    )  # fmt: skip
    model = attach(load(model_dir), mtp, init="plain" if start == "plain" else "carry")
    if start == "copy_last":
        layer, trunk = model.mtp.layer(1), base_model(model)
        layer.decoder.load_state_dict(trunk.layers[-1].state_dict())  # type: ignore[union-attr, index]
        layer.final_norm.load_state_dict(trunk.norm.state_dict())  # type: ignore[union-attr]
        with torch.no_grad():
            layer.proj.weight.copy_(torch.eye(layer.proj.out_features).repeat(1, 2))
    return model


def run(
    model: MTPCarrier,
    start: str,
    rows: Sequence[Batch],
    held_out: Sequence[Batch],
    cache: HiddenCache,
    marks: Sequence[int],
    args: argparse.Namespace,
) -> None:
    """Train one start and print a line at every mark."""
    optimizer = OptimizerConfig(
        lr=args.lr, betas=(0.9, 0.95), lr_scheduler_type="constant_with_warmup", warmup_steps=WARMUP_STEPS
    )
    engine = TorchEngine(model, TorchEngineConfig(optimizer=optimizer, train_trunk=False), hidden_cache=cache)
    if start == "fit":
        fit_new_head(engine, rows, args.fit_tokens)
    trained = 0
    remaining = iter(rows)
    for mark in marks:
        while trained < mark and (row := next(remaining, None)) is not None:
            engine.forward_backward([row], lambda log_probs, batch: (log_probs.sum(), {}))  # no main loss: frozen trunk
            engine.step()
            trained += int((row.document_ids >= 0).sum())
        figures = engine.evaluate(held_out)
        line = {
            "start": start,
            "lr": args.lr,
            "loss_kind": args.loss,
            "tokens": trained,
            "fit_tokens": args.fit_tokens if start == "fit" else 0,
            "loss": round(figures["mtp/depth_1/loss"], 4),
            "trunk_top1": round(figures["mtp/depth_1/trunk_top1"], 4),
            "expected_acceptance": round(figures["mtp/depth_1/expected_acceptance"], 4),
        }
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--tokens", type=int, nargs="+", default=[0, 10_000, 30_000])
    parser.add_argument("--starts", nargs="+", default=["carry", "plain", "copy_last", "fit"])
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--loss", default="ce", choices=["ce", "soft_ce", "tv"])
    parser.add_argument("--fit-tokens", type=int, default=10_000)
    parser.add_argument("--held-out-tokens", type=int, default=4_000)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model_dir = args.model or smollm2(report=print)
    # A row or two more than the last mark asks for, as rows end where documents do.
    rows = rows_of("train", max(*args.tokens, args.fit_tokens) + 4 * ROW_LENGTH)
    held_out = rows_of("held_out", args.held_out_tokens)
    cache = HiddenCache()
    for start in args.starts:
        run(attached(model_dir, start, args.loss), start, rows, held_out, cache, sorted(args.tokens), args)


if __name__ == "__main__":
    main()
