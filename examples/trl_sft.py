"""Train a model's MTP head with TRL's unmodified SFTTrainer.

    pip install -c constraints.txt -e ".[trl]"
    python examples/trl_sft.py DATA.jsonl [--model PATH] [--out DIR] [--steps N]

DATA is what TRL reads: a row per conversation with `messages`, or with `prompt` and `completion`. PATH has no MTP
block yet; without --model it is SmolLM2-135M-Instruct from the package index. TRL computes its loss in a forward of
its own; the MTP loss is grafted into the trunk's hidden states, so it is trained all the same.
"""

from __future__ import annotations

import argparse

import torch
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

import forerun
from forerun.data.gguf import smollm2
from forerun.trainers.hf_callback import MTPCallback


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--model")
    parser.add_argument("--out", default="runs/trl_sft")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    path = args.model or smollm2()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = forerun.attach(
        forerun.load(path, dtype=torch.float32),
        forerun.MTPConfig(enable=True, enable_train=True, detach_encoder=True),
    )
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=args.out,
            max_steps=args.steps,
            max_length=512,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=False,
        ),
        train_dataset=load_dataset("json", data_files=args.data, split="train"),
        processing_class=tokenizer,
        callbacks=[MTPCallback()],
    )
    trainer.train()
    trainer.save_model(args.out)
    print(f"saved trunk and MTP head to {args.out}; forerun.load({args.out!r}) opens it")


if __name__ == "__main__":
    main()
