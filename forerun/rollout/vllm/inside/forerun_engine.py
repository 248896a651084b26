"""Runs in vLLM's environment: one vLLM engine and the calls that forerun_offline.py takes for it."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from typing import Any

# One process: the engine's core and its worker live here.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine.llm_engine import LLMEngine

_COUNTERS = "vllm:spec_decode_num_"


class Offline:
    """The engine and its calls.

    Args:
        arguments: of vLLM's EngineArgs. `enable_sleep_mode` holds where the platform has it.
        send: takes an answer.
        inbox: calls; read between two steps of the engine, too.
    """

    def __init__(
        self, arguments: dict[str, Any], send: Callable[[dict[str, Any]], None], inbox: queue.Queue[dict[str, Any]]
    ) -> None:
        if not current_platform.is_sleep_mode_available():
            arguments["enable_sleep_mode"] = False
        self.send, self.inbox = send, inbox
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.latest: dict[str, Any] = {}  # what each running request has written

    def serve(self) -> None:
        while True:
            call = self.inbox.get()
            method = getattr(self, f"call_{call['call']}")
            if (answer := method(*call["arguments"])) is not None:
                self.send({**answer, "number": call.get("number")})

    def close(self) -> None:
        """End the workers, which frees their shared memory."""
        self.engine.engine_core.shutdown()

    def call_worker(self, method: str, *arguments: Any) -> dict[str, Any]:
        answers = self.engine.collective_rpc(method, args=arguments)
        return next((answer for answer in answers if "error" in answer), answers[0])

    def call_reset_prefix_cache(self) -> dict[str, Any]:
        return {"value": self.engine.reset_prefix_cache()}

    def call_sleep(self) -> dict[str, Any]:
        return {"value": self.engine.sleep(level=1)}

    def call_wake(self, tags: list[str] | None) -> dict[str, Any]:
        return {"value": self.engine.wake_up(tags)}

    def call_counters(self) -> dict[str, Any]:
        found = [metric for metric in self.engine.get_metrics() if metric.name.startswith(_COUNTERS)]
        return {
            "value": {
                metric.name.removeprefix(_COUNTERS): list(metric.values) if hasattr(metric, "values") else metric.value
                for metric in found
            }
        }

    def call_abort(self, ids: list[str]) -> None:
        self._abort(ids)

    def call_generate(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        answer = self._start(requests)
        while self.latest:
            for output in self.engine.step():
                if output.request_id in self.latest:
                    self.latest[output.request_id] = output.outputs[0]
                    if output.finished:
                        self._finish(output.request_id, output.outputs[0].finish_reason)
            while not self.inbox.empty():
                call = self.inbox.get()
                if call["call"] == "add":
                    self.send(self._start(*call["arguments"]))
                else:
                    assert call["call"] == "abort", call
                    self._abort(*call["arguments"])
        return answer

    call_add = call_generate  # it came when everything before it had ended

    def _start(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Let these run; the answer that says so, or that one is refused and none runs."""
        for request in requests:
            try:
                params = SamplingParams(**request["sampling_params"])
                self.engine.add_request(request["id"], {"prompt_token_ids": request["token_ids"]}, params)
            except ValueError as error:
                self.engine.abort_request([other["id"] for other in requests])
                return {"refused": f"request {request['id']!r}: {' '.join(str(error).split())}"}
        self.latest |= {request["id"]: None for request in requests}
        return {"value": None}

    def _abort(self, ids: list[str]) -> None:
        self.engine.abort_request(ids)
        for request_id in ids:
            if request_id in self.latest:
                self._finish(request_id, "abort")

    def _finish(self, request_id: str, reason: str) -> None:
        output = self.latest.pop(request_id)
        token_ids = [] if output is None else list(output.token_ids)
        log_probs = [] if output is None else output.logprobs
        metrics = getattr(output, "spec_decode_metrics", None)
        self.send(
            {
                "finished": {
                    "id": request_id,
                    "token_ids": token_ids,
                    "log_probs": [each[token].logprob for token, each in zip(token_ids, log_probs, strict=True)],
                    "finish_reason": reason,
                    "stop_reason": getattr(output, "stop_reason", None),
                    "accepted": None if metrics is None else metrics.per_step_accepted,
                    "drafted": None if metrics is None else metrics.per_step_drafted,
                }
            }
        )
