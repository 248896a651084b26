"""Train a model's MTP head with the unmodified Hugging Face Trainer.

    python examples/hf_trainer.py DATA.jsonl [--model PATH] [--out DIR] [--steps N]

DATA has a row per conversation (`messages`, or `prompt` and `response`). PATH has no MTP block yet; without --model
it is SmolLM2-135M-Instruct from the package index. The trunk trains on the data exactly as it would without MTP; the
head learns beside it (detach_encoder), and Trainer's own save writes both.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

import forerun
from forerun.data.examples import encode_examples, read_examples
from forerun.data.gguf import smollm2
from forerun.trainers.hf_callback import MTPCallback


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--model")
    parser.add_argument("--out", default="runs/hf_trainer")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    path = args.model or smollm2()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = forerun.attach(
        forerun.load(path, dtype=torch.float32),
        forerun.MTPConfig(enable=True, enable_train=True, detach_encoder=True),
    )
    rows = [
        {
            "input_ids": list(document.token_ids),
            "labels": [
                token if target else -100 for token, target in zip(document.token_ids, document.loss_mask, strict=True)
            ],
        }
        for document in encode_examples(tokenizer, read_examples(args.data), max_length=512, on_too_long="truncate")
    ]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=args.out,
            max_steps=args.steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=rows,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        callbacks=[MTPCallback()],
    )
    trainer.train()
    trainer.save_model(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"saved trunk and MTP head to {args.out}; forerun.load({args.out!r}) opens it")


if __name__ == "__main__":
    main()
