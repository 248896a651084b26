"""From what a user gives - a directory, or the name of a repository on the Hugging Face hub - to a directory."""

from __future__ import annotations

import re
from pathlib import Path

from forerun.errors import UsageError, one_line

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# A checkpoint without the other formats that its repository may hold.
_WANTED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py"]


def local_directory(path_or_hub_id: str | Path) -> Path:
    """The directory, downloaded if it is a hub repository ("organisation/name") that is not in the hub's cache yet.

    A name is taken for a path if it, or the directory that it would lie in, exists.

    Raises:
        UsageError: the hub has no such repository, or cannot be reached and it is not in the cache.
    """
    path = Path(path_or_hub_id)
    if path.exists() or path.parent.is_dir() or not _HUB_ID.fullmatch(str(path_or_hub_id)):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path_or_hub_id), allow_patterns=_WANTED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UsageError(
            f"{path_or_hub_id} is no directory here, and cannot be had from the hub ({one_line(error):.150}): "
            "give an existing path, or a hub repository that you have access to"
        ) from error
