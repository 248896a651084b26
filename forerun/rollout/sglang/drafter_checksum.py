"""Which weights the server's draft worker holds, as far as SGLang lets one see.

/get_weights_by_name reads the target alone. /weights_checker gives a checksum of each of the draft worker's tensors,
but under SGLang's fused names and by a hash of its own, which the trainer's digest cannot be compared with. It does
tell whether the drafter's tensors are the ones that were there before: two different sets of weights under one checksum
mean that the second never arrived.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from forerun.rollout.client import Client, Refused

# Shared with the target by pointer: they change with it, whether or not the drafter's own do.
_SHARED = ("embed_tokens", "word_embeddings", "lm_head", "shared_head.head")


class DrafterChecksums:
    """Remembers which checksum the draft worker had with which weights.

    Args:
        client: the server, just connected to.
        held: digest of the drafter as the server's checkpoint has it, in the server's dtype.
    """

    def __init__(self, client: Client, held: str) -> None:
        self._client = client
        self._known: dict[str, str] = {}
        self._sent: tuple[str | None, str] = (None, held)
        self.sent(held, held)

    def sent(self, held: str, trained: str) -> None:
        """After an update.

        Args:
            held: digest of the drafter's tensors under the checkpoint's names, in the server's dtype.
            trained: digest of the same ones as the trainer has them.
        """
        checksum = self._read()
        if checksum is not None:
            first = self._known.setdefault(checksum, held)
            self._sent = checksum, trained if first == held else first

    def digest(self) -> str | None:
        """What the trainer has, if the draft worker has it; something else, if not; None where it cannot be known."""
        checksum = self._read()
        if checksum is None:
            return None
        return self._sent[1] if checksum == self._sent[0] else self._known.get(checksum, checksum)

    def _read(self) -> str | None:
        try:
            answer = self._client.post("/weights_checker", {"action": "checksum", "selector": "draft"})
        except Refused:  # versions before the call, or before it knew the draft worker
            return None
        with self._client.reading("/weights_checker"):
            own = sorted(_own_tensors(answer))
        if not own:
            return None
        return hashlib.sha256("\n".join(own).encode()).hexdigest()


def _own_tensors(answer: Any) -> list[str]:
    """Rank, name and checksum of each tensor that is the draft worker's alone."""
    ranks = answer.get("ranks") if isinstance(answer, Mapping) else None
    return [
        f"{rank} {name} {checksum}"
        for rank, held in enumerate(ranks or ())
        for name, checksum in held["checksums"].items()
        if name.startswith("draft") and not any(part in name for part in _SHARED)
    ]
