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
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from forerun.errors import ForerunError, UsageError
from forerun.rollout.loopback import HOST, free_port, reason_of
from forerun.rollout.vllm.connection import Asked, Finished
from forerun.rollout.vllm.process import VLLMProcess

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
) -> tuple[str, VLLMProcess]:
    """Start a server on a free port of loopback; returns its address and process once it answers.

    Args:
        arguments: of vLLM's EngineArgs.

    Raises:
        UsageError: the interpreter is missing or has no vLLM.
        ForerunError: vLLM does not start; the line holds its own last error.
    """
    requests = _requests()
    port = free_port()
    line = ["--host", HOST, "--port", str(port), "--enable-scale-out", *server_arguments(arguments)]
    process = VLLMProcess(python, "forerun_server.py", line, dict(environment or {}) | {"VLLM_SERVER_DEV_MODE": "1"})
    url, deadline = f"http://{HOST}:{port}", time.monotonic() + _START_S
    try:
        session = requests.Session()
        session.trust_env = False  # no proxy lies between
        while time.monotonic() < deadline:
            if not process.running:
                error = process.last_error()
                if "No module named 'vllm" in error:
                    raise UsageError(f"{python} cannot import vllm: install vLLM in that environment")
                raise ForerunError(f"vLLM did not start: {error}")
            try:
                if session.get(f"{url}/health", timeout=5).ok:
                    return url, process
            except requests.RequestException:
                pass
            time.sleep(0.2)
        raise ForerunError(f"vLLM did not start within {_START_S:.0f} s: {process.last_error()}")
    except BaseException:
        process.close()
        raise


class ServerConnection:
    """Talk to a running server.

    Args:
        base_url: as http://127.0.0.1:8000.
        process: the server's, if it is ours to end.

    Raises:
        ForerunError: nothing answers there.
    """

    def __init__(self, base_url: str, process: VLLMProcess | None = None) -> None:
        self._requests = _requests()
        self.base_url = base_url.rstrip("/")
        self.process = process
        self._session = self._requests.Session()
        self._session.trust_env = False
        self._session.mount("http://", self._requests.adapters.HTTPAdapter(pool_maxsize=_CONNECTIONS))
        self._client, self._run = uuid.uuid4().hex, 0
        self._ask("get", "/health")

    def _ask(self, verb: str, path: str, body: Any = None, **query: Any) -> Any:
        try:
            answer = self._session.request(verb, self.base_url + path, json=body, params=query)
        except self._requests.RequestException as error:
            if self.process is not None and not self.process.running:
                raise ForerunError(f"the vLLM server has ended: {self.process.last_error()}") from None
            raise ForerunError(
                f"no vLLM server answers at {self.base_url} ({type(error).__name__}): start one, or give its address"
            ) from None
        if not answer.ok:
            raise _Answered(answer.status_code, reason_of(answer.text), path)
        return answer

    def generate(self, requests: Sequence[Asked], on_finish: Callable[[Finished], None]) -> None:
        self._run += 1  # an abort that comes late must not meet a later request of the same name
        ended: queue.SimpleQueue[Finished | Exception] = queue.SimpleQueue()
        with ThreadPoolExecutor(min(len(requests), _CONNECTIONS)) as pool:
            for request in requests:
                pool.submit(self._complete, request, ended)
            try:
                for _ in requests:
                    answer = ended.get()
                    if isinstance(answer, Exception):
                        raise answer
                    on_finish(answer)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                with contextlib.suppress(ForerunError):  # the failure that led here says more
                    self.abort(request["id"] for request in requests)
                raise

    def _complete(self, request: Asked, ended: queue.SimpleQueue[Finished | Exception]) -> None:
        body = {
            "request_id": self._name(request["id"]),
            "token_ids": request["token_ids"],
            "sampling_params": request["sampling_params"],
        }
        try:
            answer = self._ask("post", "/inference/v1/generate", body).json()
            choice = answer["choices"][0]
            content = (choice["logprobs"] or {}).get("content") or []
            spec = (answer.get("metrics") or {}).get("speculative_decoding") or {}
            ended.put(
                Finished(
                    id=request["id"],
                    token_ids=list(choice["token_ids"] or []),
                    log_probs=[token["logprob"] for token in content],
                    finish_reason=choice["finish_reason"],
                    stop_reason=choice["stop_reason"],
                    accepted=spec.get("per_step_accepted"),
                    drafted=spec.get("per_step_drafted"),
                )
            )
        except _Answered as error:
            refused = error.status == 400
            ended.put(UsageError(f"request {request['id']!r}: {error.why}") if refused else error)
        except Exception as error:  # of whatever kind: the thread that waits has to hear of it
            ended.put(error)

    def _name(self, request_id: str) -> str:
        return f"{self._client}-{self._run}-{request_id}"

    def abort(self, ids: Iterable[str]) -> None:
        named = [_PREFIX + self._name(each) for each in ids]
        self._ask("post", "/inference/v1/abort_requests", {"request_ids": named})

    def worker(self, method: str, *arguments: Any) -> Any:
        try:
            answer = self._ask("post", "/collective_rpc", {"method": method, "args": arguments})
        except _Answered as error:
            raise ForerunError(
                f"the vLLM server at {self.base_url} cannot call {method} ({error.why}): start it with "
                "VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls forerun_worker.ForerunWorker"
            ) from None
        results = answer.json()["results"]
        failed = next((result for result in results if "error" in result), None)
        if failed is not None:
            raise ForerunError(f"vLLM: {failed['error']}")
        return results[0]["value"]

    def reset_prefix_cache(self) -> bool:
        return self._ask("post", "/reset_prefix_cache").json()["success"]

    def counters(self) -> dict[str, Any]:
        text = self._ask("get", "/metrics").text
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
        self._ask("post", "/sleep", level=1)

    def wake(self, tags: list[str] | None = None) -> None:
        self._ask("post", "/wake_up", **({"tags": tags} if tags else {}))

    def close(self) -> None:
        self._session.close()
        if self.process is not None:
            self.process.close()


class _Answered(ForerunError):
    """The server answered with an error."""

    def __init__(self, status: int, why: str, path: str) -> None:
        super().__init__(f"the vLLM server answered {path} with {status}: {why}")
        self.status, self.why = status, why


def _requests() -> Any:
    try:
        import requests
    except ImportError:
        raise UsageError(
            'a vLLM server is reached with `requests`: install it with `pip install "forerun[vllm]"`'
        ) from None
    return requests
