"""A process of test_hf_ranks.py: Hugging Face's Trainer on its share of every batch. Writes the weights it ends with.

torchrun --nproc-per-node=N -m tests.trainers.hf_ranks OUT PER_DEVICE_BATCH FAMILY
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist
from safetensors.torch import save_file
from transformers import Trainer, TrainingArguments

from forerun import MTPConfig, attach
from forerun.trainers.hf_callback import MTPCallback
from tests.families.tiny import tiny_trunk
from tests.trainers.test_any_trainer import ARGUMENTS, collate, rows


def run(out: Path, batch: int, family: str) -> None:
    """Train four steps; the data and the seed are the same whatever the number of ranks."""
    mtp = MTPConfig(enable=True, enable_train=True)
    model = attach(tiny_trunk(family), mtp, init="plain", seed=1)
    settings = ARGUMENTS | {"max_steps": 4, "per_device_train_batch_size": batch, "optim": "sgd"}
    settings |= {"ddp_find_unused_parameters": True}  # an expert may get no token
    data = [{name: [min(i, 60) for i in ids] for name, ids in row.items()} for row in rows()]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(out), **settings),
        train_dataset=data,
        data_collator=collate,
        callbacks=[MTPCallback(max_grad_norm=0)],
    )
    trainer.train()
    if dist.is_initialized():  # and now as if nobody had said how many ranks there are
        trainer.remove_callback(MTPCallback)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.mtp_loss_scale = None
        trainer.train()
        model.load_state_dict(weights)
    rank = dist.get_rank() if dist.is_initialized() else 0
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, out / f"{rank}.safetensors")


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    if dist.is_initialized():
        os._exit(0)  # gloo's threads may abort the interpreter on its way out
