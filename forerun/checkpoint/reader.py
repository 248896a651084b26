"""Read a Hugging Face checkpoint directory: its configuration and its tensors by name, without loading the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import UsageError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointReader:
    """A checkpoint directory in safetensors.

    Raises:
        UsageError: on construction, if the directory is not a readable checkpoint; one line says what is wrong.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise UsageError(f"{path} is not a directory: give a Hugging Face checkpoint directory")
        self.config = self._json(CONFIG)
        self._file_of = self._tensor_files()

    def _json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UsageError(f"{self.path} has no {name}: it is no Hugging Face checkpoint directory") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise UsageError(f"cannot read {file}: {error}") from None
        if not isinstance(content, dict):
            raise UsageError(f"{file} does not hold a JSON object")
        return content

    def _tensor_files(self) -> dict[str, str]:
        if (self.path / INDEX).exists():
            weight_map = self._json(INDEX).get("weight_map")
            if not isinstance(weight_map, dict):
                raise UsageError(f"{self.path / INDEX} has no weight_map")
            for shard in set(weight_map.values()):
                if not isinstance(shard, str) or Path(shard).name != shard:
                    raise UsageError(f"{self.path / INDEX} names {shard!r}, which is no file of the directory")
                if not (self.path / shard).is_file():
                    raise UsageError(f"{self.path} lacks {shard}, which its index names: copy the missing shard")
            return weight_map
        if not (self.path / SINGLE).is_file():
            raise UsageError(f"{self.path} holds no {SINGLE} and no {INDEX}: only safetensors checkpoints are read")
        with self._open(SINGLE) as file:
            return dict.fromkeys(file.keys(), SINGLE)

    def _open(self, name: str) -> Any:
        try:
            return safe_open(self.path / name, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UsageError(f"cannot read {self.path / name}: {error}") from None

    @property
    def tensor_names(self) -> set[str]:
        return set(self._file_of)

    def tensor(self, name: str) -> Tensor:
        """One tensor, as stored.

        Raises:
            UsageError: the checkpoint has no such tensor, or the shard that should hold it does not.
        """
        if name not in self._file_of:
            raise UsageError(f"{self.path} has no tensor {name}")
        with self._open(self._file_of[name]) as file:
            try:
                return file.get_tensor(name)
            except SafetensorError as error:
                raise UsageError(f"cannot read {name} from {self.path / self._file_of[name]}: {error}") from None
