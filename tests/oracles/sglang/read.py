"""What SGLang's own code makes of our requests. Runs in SGLang's environment: `python read.py FOLDER`.

FOLDER/settings.json holds a weight payload, sampling settings and launch arguments. The answer is printed as JSON, the
tensors that it read lie in FOLDER/answer.safetensors.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.common import MultiprocessingSerializer

VOCAB = 61


def sampling(body: dict[str, Any]) -> dict[str, Any]:
    """The settings after SGLang's own checks, in which stop strings need a tokenizer."""
    read = SamplingParams(**body)
    read.verify(VOCAB)
    names = ("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    made = {name: getattr(read, name) for name in (*names, "ignore_eos", "logit_bias", "sampling_seed", "stop_strs")}
    return made | {"stop_token_ids": sorted(read.stop_token_ids or ())}


def arguments(given: list[str]) -> dict[str, Any]:
    """The arguments behind `-m sglang.launch_server`, parsed."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return {
        name: value for name, value in vars(parser.parse_args(given)).items() if isinstance(value, int | str | float)
    }


def main(folder: Path) -> None:
    settings = json.loads((folder / "settings.json").read_text())
    read = MultiprocessingSerializer.deserialize(settings["payload"])
    save_file({name: tensor.contiguous().clone() for name, tensor in read}, folder / "answer.safetensors")
    print(
        json.dumps(
            {
                "names": [name for name, _ in read],
                "sampling": [sampling(body) for body in settings["sampling"]],
                "arguments": [arguments(given) for given in settings["arguments"]],
            }
        )
    )


main(Path(sys.argv[1]))
