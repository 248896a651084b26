"""What engines in front of a server of this machine share: a free port, and what an error answer says."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping

HOST = "127.0.0.1"
_LONGEST_REASON = 500


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens at right now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def reason_of(text: str) -> str:
    """What an error answer says; it may be {"error": {"message": ...}}, {"message": ...} or plain text."""
    try:
        answer = json.loads(text)
    except ValueError:
        answer = text
    for key in ("error", "message", "detail"):
        if isinstance(answer, Mapping) and key in answer:
            answer = answer[key]
    return " ".join(str(answer).split())[:_LONGEST_REASON] or "no reason given"
