"""A checkpoint's own files under another config.json: links to its weights, of which none is read."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from forerun.checkpoint.reader import CONFIG, INDEX, CheckpointReader
from forerun.checkpoint.writer import carry_over


def link_checkpoint(
    source: CheckpointReader, out: Path, config: Mapping[str, Any], left_out: Collection[str] = ()
) -> None:
    """Write a checkpoint of links to another one's weights, with copies of its tokenizer and the like beside them.

    Its links lead out of it: whoever reads it in this process does so within `files.linked`.

    Args:
        source: the other one.
        out: a directory that does not exist.
        config: config.json.
        left_out: tensors that it is not to have. A file that holds one is written anew without it, in memory meanwhile.

    Raises:
        UsageError: one of the source's other files is a link that leads elsewhere.
    """
    out.mkdir()
    shards = set()
    for shard in source.shards:
        names = source.headers(shard).keys() if left_out else set()
        if not names & set(left_out):
            os.symlink(os.path.realpath(source.path / shard), out / shard)
        elif kept := names - set(left_out):
            save_file({name: source.tensor(name, shard) for name in kept}, out / shard, {"format": "pt"})
        else:
            continue
        shards.add(shard)
    if source.index is not None:
        files = {name: source.file_of(name) for name in source.tensor_names - set(left_out)}
        index = source.index | {"weight_map": {name: file for name, file in files.items() if file in shards}}
        (out / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (out / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    carry_over(source.path, out, out)
