"""The directory that vLLM or SGLang starts on: the run's own checkpoint wherever its files are what a server reads.

A server gets the trainer's weights before it generates anything, so those that it starts on only need the right names
and shapes. The files at `model.path` have them, unless the block is a new one: then the model is written, a file at a
time, from the training engine or, where no rank has the model whole, from the CPU.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.checkpoint.dequantise import refuse_quantised
from forerun.checkpoint.files import linked, read_json_object
from forerun.checkpoint.links import link_checkpoint
from forerun.checkpoint.reader import CONFIG, CheckpointReader
from forerun.config import RLConfig
from forerun.engines.protocol import TrainingEngine
from forerun.engines.torch_engine import TorchEngine
from forerun.families import declared_depth, family_of, present_depth, text_section, trunk_layers
from forerun.models.carrier import MTPCarrier
from forerun.models.config_overrides import overridden_config
from forerun.models.saving import save_streamed, saved_tensors, stored_names
from forerun.models.serving import export
from forerun.rollout.served import ServedFiles
from forerun.trainers.setup import carries_mtp, load_model, model_without_weights


@contextmanager
def served_model(
    config: RLConfig, engine: TrainingEngine | None, tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[Path]:
    """A directory that a server of `config.rollout` can be started on, which is gone afterwards: it is read at the
    start only.

    Args:
        config: the run's.
        engine: the training engine; None, or one whose model lies in shards (and which all ranks would have to export),
            takes the model that `config` names.
        tokenizer: goes along.

    Raises:
        UsageError: not a checkpoint, or one that no server reads.
    """
    if isinstance(engine, TorchEngine) and engine.ranks.sharded:
        engine = None
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="forerun-rollout-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        path = folder / "model"
        if _link(config, engine, path):
            stack.enter_context(linked(path, Path(config.model.path)))
        if not path.exists() or not _fits(config, path):
            shutil.rmtree(path, ignore_errors=True)
            _write(config, engine, path)
        if tokenizer is not None:
            tokenizer.save_pretrained(path)
        reader = CheckpointReader(path)
        family = family_of(reader.config)
        # A block that `forerun.attach` made, which no server knows by its own name.
        if not family.model_types and present_depth(family, reader.config, reader.tensor_names):
            export(path, folder / "served")
            shutil.rmtree(path)
            path = folder / "served"
        yield path


def _write(config: RLConfig, engine: TrainingEngine | None, out: Path) -> None:
    """The model itself."""
    if engine is not None:
        engine.export(out)
    else:
        model = load_model(config.model, config.mtp, torch.device("cpu"), config.trainer.seed)
        save_streamed(model, out, saved_tensors(model))


def _fits(config: RLConfig, path: Path) -> bool:
    """Whether files hold no more than the trainer will send: some have tensors that no model reads, or layers that an
    override leaves out."""
    files = ServedFiles(path)
    return files.shapes.keys() <= stored_names(model_without_weights(config.model, config.mtp)) | files.copies.keys()


def _link(config: RLConfig, engine: TrainingEngine | None, out: Path) -> bool:
    """Whether the files at `model.path` do; they are linked to from `out` then."""
    if engine is not None and not (isinstance(engine, TorchEngine) and _is_that_of(config, engine.model)):
        return False
    if config.mtp.enable and not carries_mtp(config.model):
        return False
    source = CheckpointReader(config.model.path)
    refuse_quantised(source)
    family, names = family_of(source.config), source.tensor_names
    depth = present_depth(family, source.config, names)
    layers = trunk_layers(source.config)
    left_out = set() if config.mtp.enable else {name for name in names if family.owns(name, depth, layers)}
    link_checkpoint(source, out, _config(config, source, depth if config.mtp.enable else 0), left_out)
    if not config.mtp.enable and not config.model.trust_remote_code:
        _drop_code(out)
    return True


def _drop_code(directory: Path) -> None:
    """Of a trunk that transformers has code for, the checkpoint's own, which the run does not trust either."""
    written = read_json_object(directory, CONFIG)
    if written.pop("auto_map", None) is not None:
        (directory / CONFIG).write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for file in directory.glob("*.py"):
            file.unlink()


def _is_that_of(config: RLConfig, model: PreTrainedModel) -> bool:
    """Whether a model, which a caller may have brought, was loaded as the configuration says."""
    loaded = model.mtp_source if isinstance(model, MTPCarrier) else model.name_or_path
    if not loaded or isinstance(model, MTPCarrier) != config.mtp.enable:
        return False
    same = os.path.realpath(loaded) == os.path.realpath(config.model.path)
    return same and str(model.dtype) == f"torch.{config.model.dtype}"


def _config(config: RLConfig, source: CheckpointReader, depth: int) -> dict[str, Any]:
    """config.json of the model as the run has it: overridden, in its dtype, with a block of so many layers."""
    written = source.config
    if config.model.override_config:
        written = overridden_config(source, config.model.override_config, config.model.trust_remote_code)
    text: Any = text_section(written)
    sections = [written] if text is written else [written, text]
    for name in [key for key in ("dtype", "torch_dtype") if any(key in part for part in sections)] or ["dtype"]:
        _set(sections, name, config.model.dtype)
    family = family_of(written)
    if depth != (declared_depth(family, written) or 0):
        _set(sections, family.depth_key, depth)
    return written


def _set(sections: Sequence[dict[str, Any]], key: str, value: Any) -> None:
    """Wherever the key is; where it is in none, in the last one."""
    for section in [part for part in sections if key in part] or sections[-1:]:
        section[key] = value
