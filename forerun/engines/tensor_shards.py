"""Named tensors of several ranks in one directory of safetensors files: each writes its part and reads what it needs.

By torch.distributed.checkpoint with its Hugging Face storage: a rank's files hold its shards and, in their headers,
where these lie in the whole tensors, so any number of ranks can read them; a plain safetensors file reads as whole
tensors. torch's own storage would have an index that is unpickled. Nothing here is.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from forerun.engines.ranks import RankGroup
from forerun.errors import ForerunError, one_line

FILE_BYTES = 1 << 30


def write_tensors(
    directory: Path, tensors: Mapping[str, Tensor], ranks: RankGroup, file_bytes: int = FILE_BYTES
) -> None:
    """Write this rank's shards of `tensors` into `directory`, flushed to the disk. Every rank calls it.

    Args:
        directory: an existing one, the same for all ranks.
        tensors: the same names on every rank. A DTensor's shard is written by its rank, or by one of those that have
            the same; a plain tensor, which every rank holds alike, by one of them.
        ranks: who writes.
        file_bytes: a file's size, up to a tensor. So much is serialised at once in host memory.

    Raises:
        OSError: of whichever rank could not write; every rank raises it.
    """
    _no_warning_of_one_process()
    writer = HuggingFaceStorageWriter(str(directory), _files(tensors, ranks.size * file_bytes), save_distributed=True)
    writer.per_thread_copy_ahead = 0  # otherwise a thread would open a context on the first CUDA device
    try:
        checkpoint.save(
            dict(tensors),
            storage_writer=writer,
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=ranks.group,
            no_dist=ranks.group is None,
        )
    except CheckpointException as error:
        raise _cause(error) from error


class SavedTensors:
    """The tensors in a directory's safetensors files, of however many ranks. Every rank makes one.

    Attributes:
        index: every tensor's name, with a meta tensor of its whole shape and its dtype.

    Raises:
        ForerunError: a file cannot be read.
    """

    def __init__(self, directory: Path, ranks: RankGroup) -> None:
        self._directory = directory
        self._ranks = ranks
        self._metadata = ranks.on_first(lambda: _headers(directory))
        self.index = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill `tensors` in place, of any layout over ranks. Every rank calls it with the same names of the index.

        Raises:
            ForerunError: a shape is another, or a file cannot be read, on any rank.
        """
        _no_warning_of_one_process()
        try:
            checkpoint.load(
                dict(tensors),
                storage_reader=_KnownHeaders(self._directory, self._metadata),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self._ranks.group,
                no_dist=self._ranks.group is None,
            )
        except CheckpointException as error:
            raise ForerunError(f"{self._directory} cannot be read ({one_line(_cause(error))})") from error


class _KnownHeaders(HuggingFaceStorageReader):
    """With the headers that one rank has read for all, who would each open every file otherwise."""

    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(str(directory))
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        return self._metadata


def _headers(directory: Path) -> Metadata:
    try:
        return HuggingFaceStorageReader(str(directory)).read_metadata()
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        # The last four: what stands in a header is not what torch writes there.
        raise ForerunError(
            f"{directory} cannot be read ({one_line(error)}): resume from an older checkpoint"
        ) from error


def _files(tensors: Mapping[str, Tensor], file_bytes: int) -> dict[str, int]:
    """Name -> number of the file, from 1."""
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if filled and filled + size > file_bytes:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += size
    return numbers


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong on the first rank where something did."""
    return error.failures[min(error.failures)][0]


def _no_warning_of_one_process() -> None:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
