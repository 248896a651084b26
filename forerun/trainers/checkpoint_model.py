"""The model of a run's checkpoint as a Hugging Face directory, whatever number of ranks wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from forerun.checkpoint.files import read_json_object
from forerun.checkpoint.shards import new_directory
from forerun.config import ModelConfig
from forerun.config_file import RESOLVED_CONFIG, read_yaml
from forerun.engines.checkpoint_directory import STATE_FILE
from forerun.engines.ranks import RankGroup
from forerun.engines.state import SavedState
from forerun.errors import UsageError, one_line
from forerun.models.carrier import named_weights
from forerun.models.saving import save_streamed, saved_tensors
from forerun.mtp.config import MTPConfig
from forerun.trainers.setup import load_model, load_tokenizer


def is_run_checkpoint(directory: Path) -> bool:
    """Whether a training run wrote it, to go on from."""
    return (directory / STATE_FILE).is_file()


@torch.no_grad()
def export_checkpoint(directory: Path, out: Path) -> None:
    """Write the model, MTP block and tokenizer included, as the run would at its end.

    The run's config.yaml, beside the checkpoint, says which model it is; that is loaded, on the CPU, and gets the
    checkpoint's weights.

    Raises:
        UsageError: `out` is taken; the run's config.yaml or its model is not there; Megatron's engine wrote it.
        ForerunError: the checkpoint is damaged, or of another model.
    """
    out = new_directory(out)
    if "layout" in read_json_object(directory, STATE_FILE):
        raise UsageError(
            f"{directory} holds Megatron's parts of a model: resume the run with trainer.total_steps at this step, and "
            "it exports the model"
        )
    settings = directory.absolute().parent / RESOLVED_CONFIG
    if not settings.is_file():
        raise UsageError(f"{settings} is missing, which says what model the checkpoint is of: leave it in its run")
    model_config: ModelConfig = _section(settings, "model", ModelConfig)
    mtp: MTPConfig = _section(settings, "mtp", MTPConfig)
    saved = SavedState(directory, RankGroup())
    model = load_model(model_config, mtp, torch.device("cpu"))
    own = dict(named_weights(model))
    saved.check_weights(own)
    saved.read(own, {})
    save_streamed(model, out, saved_tensors(model))
    load_tokenizer(model_config).save_pretrained(out)


def _section(settings: Path, name: str, kind: type) -> Any:
    """One section of a run's config.yaml. The others may be of another machine: rollout's names an interpreter."""
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), read_yaml(settings).get(name) or {}))
    except (OmegaConfBaseException, ValueError) as error:
        raise UsageError(f"{settings} does not say what `{name}` was ({one_line(error):.200}): restore it") from None
