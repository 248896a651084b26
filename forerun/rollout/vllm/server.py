"""A vLLM server, reached over HTTP on this machine, and how to start one.

Beside the OpenAI-compatible API it has to offer tokens in, tokens out (`--enable-scale-out`), calls to its workers (the
environment variable VLLM_SERVER_DEV_MODE=1), and `forerun_worker.ForerunWorker` in them (PYTHONPATH). Whoever reaches
its port can call all of these: it is for loopback only.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from forerun.errors import ForerunError, UsageError
from forerun.rollout import local_server
from forerun.rollout.child import ChildProcess
from forerun.rollout.client import Client, Refused
from forerun.rollout.loopback import HOST, free_port
from forerun.rollout.vllm.connection import Asked, Finished
from forerun.rollout.vllm.environment import vllm_environment

_GENERATE = "/inference/v1/generate"
_BAD_REQUEST = 400
_PREFIX = "generate-tokens-"  # what the server puts before a request's id
_CONNECTIONS = 256
_START_S = 1800.0  # large models take their time
_COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")


def server_arguments(arguments: Mapping[str, Any]) -> list[str]:
    """The command line of vLLM's server for arguments of its EngineArgs."""
    line = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if value is True or value is False:
            line.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            line += [f"--{option}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return line


def start_server(
    python: str | Path, arguments: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> tuple[str, ChildProcess]:
    """Start a server on a free port of loopback; returns its address and process once it answers.

    Args:
        arguments: of vLLM's EngineArgs.

    Raises:
        UsageError: the interpreter is missing or has no vLLM.
        ForerunError: vLLM does not start; the line holds its own last error.
    """
    port = free_port()
    url = f"http://{HOST}:{port}"
    line = ["--host", HOST, "--port", str(port), "--enable-scale-out", *server_arguments(arguments)]
    own = {"VLLM_SERVER_DEV_MODE": "1", **(environment or {})}
    # Not `vllm serve`: in repacked builds that command looks for a distribution named vllm and fails.
    module = "vllm.entrypoints.openai.api_server"
    return url, local_server.start_server("vLLM", python, module, line, url, vllm_environment() | own, _START_S)


class ServerConnection:
    """Talk to a running server.

    Args:
        base_url: as http://127.0.0.1:8000.
        process: the server's, if it is ours to end.

    Raises:
        UsageError: `base_url` is no address.
        ForerunError: nothing answers there.
    """

    def __init__(self, base_url: str, process: ChildProcess | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self.process = process
        self._client = Client("vLLM", self.base_url, process=process)
        self._name, self._run = uuid.uuid4().hex, 0
        self._left = 0  # requests of the `generate` that runs
        self._joining = threading.Lock()
        self._client.get("/health")

    def generate(self, requests: Sequence[Asked], on_finish: Callable[[Finished], None]) -> None:
        self._run += 1  # an abort that comes late must not meet a later request of the same name
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            self._pool = pool
            self._names: list[str] = []
            self._ended: queue.SimpleQueue[Finished | Exception] = queue.SimpleQueue()
            with self._joining:
                self._start(requests)
            try:
                while self._left:
                    answer = self._ended.get()
                    if isinstance(answer, Exception):
                        raise answer
                    on_finish(answer)
                    with self._joining:
                        self._left -= 1
            except BaseException:
                with self._joining:
                    self._left = 0
                pool.shutdown(wait=False, cancel_futures=True)
                with contextlib.suppress(ForerunError):  # the failure that led here says more
                    self.abort(self._names)
                raise

    def add(self, requests: Sequence[Asked]) -> bool:
        with self._joining:
            if not self._left:
                return False
            self._start(requests)
            return True

    def _start(self, requests: Sequence[Asked]) -> None:
        self._left += len(requests)
        self._names += [request["id"] for request in requests]
        for request in requests:
            self._pool.submit(self._complete, request, self._ended)

    def _complete(self, request: Asked, ended: queue.SimpleQueue[Finished | Exception]) -> None:
        body = {
            "request_id": self._server_id(request["id"]),
            "token_ids": request["token_ids"],
            "sampling_params": request["sampling_params"],
        }
        try:
            answer = self._client.post(_GENERATE, body)
            with self._client.reading(_GENERATE):
                ended.put(_finished(request["id"], answer))
        except Refused as error:
            refused = error.status == _BAD_REQUEST
            ended.put(UsageError(f"request {request['id']!r}: {error.reason}") if refused else error)
        except Exception as error:  # of whatever kind: the thread that waits has to hear of it
            ended.put(error)

    def _server_id(self, request_id: str) -> str:
        return f"{self._name}-{self._run}-{request_id}"

    def abort(self, ids: Iterable[str]) -> None:
        named = [_PREFIX + self._server_id(each) for each in ids]
        self._client.post("/inference/v1/abort_requests", {"request_ids": named})

    def worker(self, method: str, *arguments: Any) -> Any:
        path = "/collective_rpc"
        try:
            answer = self._client.post(path, {"method": method, "args": arguments})
        except Refused as error:
            raise ForerunError(
                f"the vLLM server at {self.base_url} cannot call {method} ({error.reason}): start it with "
                "VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls forerun_worker.ForerunWorker"
            ) from None
        with self._client.reading(path):
            results = answer["results"]
            failed = next((result["error"] for result in results if "error" in result), None)
            if failed is None:
                return results[0]["value"]
        raise ForerunError(f"vLLM: {failed}")

    def reset_prefix_cache(self) -> bool:
        path = "/reset_prefix_cache"
        answer = self._client.post(path)
        with self._client.reading(path):
            return bool(answer["success"])

    def counters(self) -> dict[str, Any]:
        text = str(self._client.get("/metrics"))
        found: dict[str, Any] = {name: 0.0 for name in _COUNTERS}
        per_position: dict[int, float] = {}
        for name, labels, value in re.findall(r"^vllm:spec_decode_num_(\w+)_total\{(.*)\} (\S+)$", text, re.MULTILINE):
            if name in found:
                found[name] += float(value)
            elif position := re.search(r'position="(\d+)"', labels):
                depth = int(position[1])
                per_position[depth] = per_position.get(depth, 0.0) + float(value)
        return found | {"accepted_tokens_per_pos": [per_position[depth] for depth in sorted(per_position)]}

    def sleep(self) -> None:
        self._client.post("/sleep?level=1")

    def wake(self, tags: list[str] | None = None) -> None:
        self._client.post("/wake_up?" + urlencode({"tags": tags or []}, doseq=True))

    def close(self) -> None:
        if self.process is not None:
            self.process.close()


def _finished(request_id: str, answer: Any) -> Finished:
    choice = answer["choices"][0]
    content = (choice["logprobs"] or {}).get("content") or []
    spec = (answer.get("metrics") or {}).get("speculative_decoding") or {}
    return Finished(
        id=request_id,
        token_ids=list(choice["token_ids"] or []),
        log_probs=[token["logprob"] for token in content],
        finish_reason=choice["finish_reason"],
        stop_reason=choice["stop_reason"],
        accepted=spec.get("per_step_accepted"),
        drafted=spec.get("per_step_drafted"),
    )
