"""Runs in vLLM's environment: one engine, driven over the socket whose descriptor is the first argument.

A message is a line of JSON. The first is {"engine": arguments}; the answer, once the engine is up, {"value": null}.
Then come calls {"call": name, "arguments": [...], "number": n} with one answer each, {"value": ..., "number": n} or
{"error": one line, "number": n}, except for these, which have no number:

- {"call": "generate", "arguments": [requests]} is answered when all have ended; before that, each one that ends is sent
  as {"finished": ...}. A request that vLLM refuses is answered with {"refused": one line}, and none is run.
- {"call": "add", "arguments": [requests]} is answered at once while requests run, and they run too; when none do (any
  more), it is as "generate".
- {"call": "abort", "arguments": [ids]} has no answer: the requests end as "abort".

On SIGTERM the engine is shut down. When the socket closes, this process and all that it started end at once.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import sys
import threading
from typing import Any


def main(descriptor: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    connection = socket.socket(fileno=descriptor)
    lines = connection.makefile("r", encoding="utf-8")
    inbox: queue.Queue[dict[str, Any]] = queue.Queue()

    def send(answer: dict[str, Any]) -> None:
        connection.sendall((json.dumps(answer) + "\n").encode())

    def read() -> None:
        for line in lines:
            inbox.put(json.loads(line))
        os.killpg(os.getpgid(0), signal.SIGKILL)  # whoever started us is gone; this process leads its group

    threading.Thread(target=read, daemon=True).start()
    from forerun_engine import Offline  # takes seconds, during which the other end may go

    offline = Offline(inbox.get()["engine"], send, inbox)
    send({"value": None})
    try:
        offline.serve()
    except SystemExit:
        offline.close()
        os._exit(0)  # without taking the interpreter apart, which takes a second or two


if __name__ == "__main__":
    main(int(sys.argv[1]))
