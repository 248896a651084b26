"""Read a Hugging Face checkpoint directory: its configuration and its tensors by name, without loading the rest."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.checkpoint.files import locate, read_json_object, shown, where_from, why_not_safetensors
from forerun.errors import UsageError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SUFFIX = ".safetensors"
# How transformers names files of weights, one or several.
WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")

_PICKLES = "pickles, which can run code when they are opened: convert them to safetensors where you trust them"
ADAPTER = "adapter_config.json"
_OTHER_FORMATS = dict.fromkeys((".bin", ".pt", ".pth"), _PICKLES) | {
    ".gguf": "GGUF, which llama.cpp reads: give the safetensors checkpoint that it was made from",
}


@dataclass(frozen=True)
class TensorHeader:
    """What a shard's header says of a tensor: its shape, and its dtype by safetensors' name ("BF16", "F8_E4M3")."""

    shape: tuple[int, ...]
    dtype: str


class CheckpointReader:
    """A checkpoint directory in safetensors. Opening it reads JSON and, without an index, one header; never a tensor.

    Symbolic links are followed as `forerun.checkpoint.files` says.

    Attributes:
        path: the directory.
        config: config.json.
        index: model.safetensors.index.json, None where there is none.

    Raises:
        UsageError: on construction, if the directory is not a readable checkpoint; one line says what is wrong.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if os.path.isfile(self.path):
            raise UsageError(f"{shown(path)} is a file: give the checkpoint directory that it lies in")
        if not os.path.isdir(self.path):
            raise UsageError(f"{shown(path)} is not a directory: {where_from(path)}")
        if not os.path.lexists(self.path / CONFIG):
            if os.path.lexists(self.path / "model" / CONFIG):  # of a run's output directory
                raise UsageError(f"{self.path} has no {CONFIG}: give {self.path / 'model'}, which has one")
            raise UsageError(f"{self.path} has no {CONFIG}: it is no Hugging Face checkpoint directory{self._others()}")
        self.config = read_json_object(self.path, CONFIG)
        for section in (self.config, self.config.get("text_config")):
            if isinstance(section, dict) and not isinstance(section.get("model_type"), str | None):
                raise UsageError(f"{self.path / CONFIG} has a model_type that is no name: restore the file")
        self.index = read_json_object(self.path, INDEX) if os.path.lexists(self.path / INDEX) else None
        self._file_of = self._indexed_files() if self.index is not None else self._single_file()

    def _indexed_files(self) -> dict[str, str]:
        assert self.index is not None
        weight_map = self.index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UsageError(f"{self.path / INDEX} has no weight_map: download it again, or save the model again")
        for shard in {name if isinstance(name, str) else None for name in weight_map.values()}:
            if shard is None or not shard.endswith(SUFFIX):
                raise UsageError(
                    f"{self.path / INDEX} names '{shown(shard)}', which is no safetensors file: save the model as such"
                )
            locate(self.path, shard)
        return weight_map

    def _single_file(self) -> dict[str, str]:
        if not os.path.lexists(self.path / SINGLE):
            raise UsageError(
                f"{self.path} holds no {SINGLE} and no {INDEX}: only safetensors checkpoints are read{self._others()}"
            )
        return dict.fromkeys(self.headers(SINGLE), SINGLE)

    def _others(self) -> str:
        try:
            names = sorted(entry.name for entry in os.scandir(self.path))
        except OSError:
            return ""
        if ADAPTER in names:
            return (
                f" ({ADAPTER}: an adapter, to be merged into its model first, by peft's merge_and_unload for instance)"
            )
        for name in names:
            if meaning := _OTHER_FORMATS.get(Path(name).suffix):
                return f" ({shown(name)}: {meaning})"
        return ""

    @property
    def tensor_names(self) -> set[str]:
        """Every tensor that the index names; without an index, that the one file holds."""
        return set(self._file_of)

    @property
    def shards(self) -> list[str]:
        """The files that hold the tensors, in order of their names."""
        return sorted(set(self._file_of.values()))

    def file_of(self, name: str) -> str:
        """The file that should hold a tensor."""
        return self._file_of[name]

    def headers(self, shard: str) -> dict[str, TensorHeader]:
        """What a file of the directory holds, from its header alone.

        Raises:
            UsageError: it cannot be read.
        """
        # numpy's way of opening maps the file read-only; torch's asks for as much memory as the file is long.
        with self._open(shard, "numpy") as file:
            found = {}
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                view = file.get_slice(name)
                found[name] = TensorHeader(tuple(view.get_shape()), str(view.get_dtype()))
            return found

    def _open(self, shard: str, framework: str = "pt") -> Any:
        file = locate(self.path, shard)
        try:
            return safe_open(file, framework=framework)
        except (SafetensorError, OSError, RuntimeError) as error:  # the last is torch's where it cannot map the file
            raise UsageError(why_not_safetensors(file, error)) from None

    def tensor(self, name: str, shard: str | None = None) -> Tensor:
        """One tensor, as stored: from the file that the index names, or from `shard`.

        Raises:
            UsageError: the checkpoint has no such tensor, or the shard that should hold it does not.
        """
        if shard is None:
            if name not in self._file_of:
                raise UsageError(f"{self.path} has no tensor {shown(name)}: restore it, or correct {CONFIG}")
            shard = self._file_of[name]
        with self._open(shard) as file:
            try:
                return file.get_tensor(name)
            except SafetensorError as error:
                raise UsageError(
                    f"cannot read {shown(name)} from {self.path / shard}: {shown(error)}: copy the file again"
                ) from None
