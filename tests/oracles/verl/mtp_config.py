"""What verl makes of an MtpConfig, as JSON. Runs in verl's environment: `python mtp_config.py WITH_MTP WITHOUT_MTP`.

The arguments are checkpoint directories, of which config.json is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import sys
import warnings
from types import SimpleNamespace

warnings.simplefilter("ignore")

import torch  # noqa: E402
from verl.models.mcore import mtp_patch  # noqa: E402
from verl.utils.megatron_utils import check_mtp_config  # noqa: E402
from verl.workers.config import HFModelConfig, MtpConfig  # noqa: E402


def model_config(path: str, **mtp: object) -> HFModelConfig:
    return HFModelConfig(path=path, load_tokenizer=False, mtp=MtpConfig(**mtp))


def fields() -> list[list[object]]:
    # _target_ is hydra's, not a setting.
    return [[f.name, f.type.__name__, f.default] for f in dataclasses.fields(MtpConfig) if f.name != "_target_"]


def declared_depth(path: str, **mtp: object) -> int:
    """`num_nextn_predict_layers` as verl's engines and workers see it."""
    return model_config(path, **mtp).hf_config.num_nextn_predict_layers


def checked(path: str, **mtp: object) -> dict[str, object]:
    """What `check_mtp_config` writes into Megatron's transformer configuration, or the error it raises."""
    engine = SimpleNamespace(override_transformer_config={})
    try:
        check_mtp_config(model_config(path, **mtp), engine)
    except ValueError as error:
        return {"error": str(error)}
    return engine.override_transformer_config


def isolation() -> dict[str, bool]:
    """Which gradients survive the function that `detach_encoder` puts into each of Megatron's MTP layers.

    Two layers in a row, as `MultiTokenPredictionBlock.forward` runs them: the first one's hidden is a `chunk` of the
    trunk's, so a view, and a layer's output is none; the function detaches views alone. What a layer does with its
    inputs is here a product with its own weight.
    """
    embedding = torch.nn.Embedding(7, 4)
    blocks = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    trunk = torch.randn(3, 1, 4, requires_grad=True)
    (hidden,) = torch.chunk(trunk, 1, dim=0)
    ids, positions = torch.tensor([[1, 2, 3]]), torch.arange(3)[None]

    def embed(input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return embedding(input_ids).transpose(0, 1)

    for block in blocks:
        ids, positions, embedded, hidden = mtp_patch._patched_get_embeddings_for_detach(
            SimpleNamespace(), ids, positions, embed, hidden
        )
        hidden = (hidden + embedded) * block
    hidden.sum().backward()  # the second depth's loss alone
    reached = {"trunk": trunk, "embedding": embedding.weight, "block_1": blocks[0], "block_2": blocks[1]}
    return {name: x.grad is not None for name, x in reached.items()}


def main(with_mtp: str, without_mtp: str) -> dict[str, object]:
    return {
        "fields": fields(),
        "depth": {enable: declared_depth(with_mtp, enable=enable == "enabled") for enable in ("enabled", "disabled")},
        "checked": {
            "enabled": checked(with_mtp, enable=True, mtp_loss_scaling_factor=0.25),
            "disabled": checked(with_mtp, enable=False),
            "enabled without a block": checked(without_mtp, enable=True),
        },
        "train or rollout without enable": dataclasses.asdict(MtpConfig(enable_train=True, enable_rollout=True)),
        "isolation": isolation(),
        "head detached": "Detach output-layer params so MTP loss does not update lm_head"
        in inspect.getsource(mtp_patch),
    }


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):  # verl and transformers print as they like
        answer = main(*sys.argv[1:])
    print(json.dumps(answer))
