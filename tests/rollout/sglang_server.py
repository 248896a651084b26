"""A real HTTP server on the loopback interface that speaks SGLang's API and computes with our native engine.

It does what SGLang 0.5.23 does where a client can see it (docs/rollout_sglang.md says where that was read): target
and draft worker hold weights of their own and get an update only inside a session; log-probs are those after
temperature and biases and before the filters; min-p does nothing while it drafts; an id aborts every request that
begins with it; whoever generates from a prefix cache of older weights is told so. `fail` injects faults.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import pickle
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from forerun.models.carrier import MTPCarrier, mtp_weight_names, named_weights
from forerun.rollout.native.engine import NativeEngine
from forerun.rollout.protocol import Completion, Request, SamplingParams

Fault = Literal["500", "drop", "lost", "hang"]
_GATHER_S = 0.01
STANDS_AT = 20
_UNSEEDED = 42


class _TensorsOnly(pickle.Unpickler):
    """Reads what a pickle of tensors needs and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "torch._utils", "_rebuild_tensor_v2":
                return torch._utils._rebuild_tensor_v2
            case "torch.storage", "_load_from_bytes":
                return lambda data: torch.load(io.BytesIO(data), weights_only=True)
            case "collections", "OrderedDict":
                return OrderedDict
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")


def read_bucket(text: str) -> list[tuple[str, Tensor]]:
    return _TensorsOnly(io.BytesIO(base64.b64decode(text, validate=True))).load()


class _Refusal(Exception):
    """An answer with a status of 400 or more."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class _Waiting:
    rid: str
    body: dict[str, Any]
    done: threading.Event = field(default_factory=threading.Event)
    completion: Completion | None = None
    error: Exception | None = None


@dataclass
class SGLangServer:
    """The server's state; `serving` runs it.

    Args:
        model: a carrier; its weights become the server's.
        checkpoint: where its files lie.
        num_steps: depth of drafting, 0 for none.
        topk: only reported, the native engine drafts chains.
        deterministic: seeds are obeyed.
        tp_size: ranks; only the number of payloads depends on it.
        cpu_backup: weights survive a release.
        sessions: whether the version has begin_weight_update and weights_checker for the draft worker.
        statistics: the counts' names: of 0.5.23, older, only verify steps, or none at all.
        updates_drafter: a server that leaves the draft worker stale says False.
        end_tokens: the model's own, which end a text unless ignore_eos.
        tokenizer: for stop strings.
        together: requests that a batch waits for before it begins.
        awaited_aborts: how many running requests must be aborted before a batch goes on in which one has STANDS_AT
            tokens. With `together`, what is aborted when is no matter of time.
    """

    model: MTPCarrier
    checkpoint: Path
    num_steps: int = 2
    topk: int = 1
    deterministic: bool = True
    tp_size: int = 1
    cpu_backup: bool = False
    sessions: bool = True
    statistics: Literal["new", "old", "steps", "none"] = "new"
    updates_drafter: bool = True
    end_tokens: tuple[int, ...] = ()
    tokenizer: PreTrainedTokenizerBase | None = None
    together: int = 1
    awaited_aborts: int = 0

    def __post_init__(self) -> None:
        self.engine = NativeEngine(
            self.model, num_speculative_tokens=self.num_steps, products="linear", tokenizer=self.tokenizer
        )
        self.drafter_names = set(mtp_weight_names(self.model).values())
        self.weights = dict(named_weights(self.model))
        self.weight_version = "default"
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.faults: dict[str, list[Fault | None]] = {}
        self.session = self.paused = self.stale_cache = self.changed = False
        self.released: set[str] = set()
        self.group: Any = None
        self._queue: list[_Waiting] = []
        self._running: list[_Waiting] = []
        self._aborted: set[str] = set()
        self._lock = threading.Condition()
        self._closed = False
        threading.Thread(target=self._serve_batches, daemon=True).start()

    # Faults and what tests look at

    def fail(self, path: str, *faults: Fault | None) -> None:
        """The next calls of `path` fail so, in turn: refused, dropped undone, done and dropped, never answered. None is
        a call that goes well."""
        self.faults[path] = list(faults)

    def comes_to_rest(self) -> bool:
        """Whether nothing is running or waiting any more, now or soon."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._queue and not self._running, timeout=30)

    def hang(self) -> None:
        """Until the server closes."""
        with self._lock:
            self._lock.wait_for(lambda: self._closed)

    def paths(self) -> list[str]:
        return [path for path, _ in self.calls if path != "/abort_request"]

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    # Batches

    def _serve_batches(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._closed or (len(self._queue) >= self.together and not self.paused))
                if self._closed:
                    return
            time.sleep(_GATHER_S)
            with self._lock:
                self._running, self._queue = self._queue, []
                batch = list(self._running)
            try:
                self._run(batch)
            except Exception as error:
                for waiting in batch:
                    waiting.error = error
            with self._lock:
                self._running = []
                self._lock.notify_all()
            for waiting in batch:
                waiting.done.set()

    def _run(self, batch: list[_Waiting]) -> None:
        if self.stale_cache:
            raise _Refusal("the prefix cache holds keys of other weights", 500)
        if self.released:
            raise _Refusal(f"memory is released: {sorted(self.released)}", 500)
        if self.changed:
            self.engine.update_weights(self.weights.items(), 0)
            self.changed = False
        by_rid = {waiting.rid: waiting for waiting in batch}

        def finish(completion: Completion) -> None:
            by_rid[completion.request_id].completion = completion
            by_rid[completion.request_id].done.set()

        requests = [Request(w.rid, w.body["input_ids"], self._sampling(w.body["sampling_params"])) for w in batch]
        written: Counter[str] = Counter()

        def stand_still(rid: str, tokens: list[int]) -> None:
            written[rid] += len(tokens)
            if written[rid] >= STANDS_AT:
                with self._lock:
                    enough = self._lock.wait_for(lambda: len(self._aborted) >= self.awaited_aborts, timeout=60)
                assert enough, f"{self.awaited_aborts} aborts were awaited, {len(self._aborted)} came"

        self.engine.generate(requests, on_finish=finish, on_tokens=stand_still)

    def _sampling(self, s: dict[str, Any]) -> SamplingParams:
        if s.get("repetition_penalty", 1.0) != 1.0:
            raise _Refusal("the test server has no repetition penalty")
        stops = () if s["ignore_eos"] else (*s["stop_token_ids"], *self.end_tokens)
        seed = s.get("sampling_seed", _UNSEEDED) if self.deterministic else None
        return SamplingParams(
            max_tokens=s["max_new_tokens"],
            min_tokens=min(s["min_new_tokens"], s["max_new_tokens"]),
            temperature=s["temperature"],
            top_p=s["top_p"],
            top_k=0 if s["top_k"] == -1 else s["top_k"],
            min_p=0.0 if self.num_steps else s["min_p"],
            logit_bias={int(token): bias for token, bias in s.get("logit_bias", {}).items()},
            seed=None if seed is None else seed % 2**63,
            stop=tuple(s["stop"]),
            stop_token_ids=stops,
        )

    # Generation

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            if any(w.rid == body["rid"] for w in (*self._queue, *self._running)):
                raise _Refusal("duplicate rid")
            waiting = _Waiting(body["rid"], body)
            self._queue.append(waiting)
            self._lock.notify_all()
        waiting.done.wait()
        if waiting.error is not None:
            raise waiting.error
        if waiting.completion is None:  # aborted while it waited
            reason = {"type": "abort", "message": "Abort before prefill"}
            return {"text": "", "output_ids": [], "meta_info": {"id": waiting.rid, "finish_reason": reason}}
        return self._answer(body, waiting.completion)

    def _answer(self, body: dict[str, Any], completion: Completion) -> dict[str, Any]:
        tokens = completion.token_ids
        reason: dict[str, Any] = {"type": completion.finish_reason}
        if completion.finish_reason == "stop":
            reason["matched"] = completion.stop_reason
        elif completion.finish_reason == "length":
            reason["length"] = len(tokens)
        meta = {
            "id": completion.request_id,
            "finish_reason": reason,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(tokens),
            "weight_version": self.weight_version,
            "num_retractions": 0,
            **self._statistics(completion),
        }
        if self.sessions:
            meta["weight_versions"] = [{"version": self.weight_version, "start": 0, "end": len(tokens)}]
        if body.get("return_logprob"):
            meta |= self._log_probs(body, tokens)
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    @torch.no_grad()
    def _log_probs(self, body: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        """After temperature and biases, before the filters."""
        sampling, prompt = body["sampling_params"], body["input_ids"]
        logits = self.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        for token, bias in sampling.get("logit_bias", {}).items():
            logits[:, int(token)] += bias
        log_probs = (logits / (sampling["temperature"] or 1.0)).log_softmax(-1)
        own = log_probs.gather(-1, torch.tensor(tokens, dtype=torch.long)[:, None]).squeeze(-1).tolist()
        made: dict[str, Any] = {
            "output_token_logprobs": [[value, token, None] for value, token in zip(own, tokens, strict=True)]
        }
        if wanted := body.get("top_logprobs_num", 0):
            top = log_probs.topk(min(wanted, log_probs.shape[-1]), dim=-1)
            made["output_top_logprobs"] = [
                [[value, token, None] for value, token in zip(*row, strict=True)]
                for row in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            ]
        return made

    def _statistics(self, completion: Completion) -> dict[str, Any]:
        steps = completion.spec_num_verify_steps
        if not self.num_steps or self.statistics == "none" or not steps:
            return {}
        if self.statistics == "steps":
            return {"spec_verify_ct": steps}
        per_depth = [*(completion.accepted_per_depth or []), 0]
        reached = [steps, *per_depth]
        histogram = [reached[i] - reached[i + 1] for i in range(self.num_steps + 1)]
        accepted, drafted = completion.spec_num_accepted_tokens, steps * self.num_steps
        if self.statistics == "old":
            return {
                "spec_verify_ct": steps,
                "spec_accept_token_num": accepted,
                "spec_draft_token_num": drafted,
                "spec_accept_histogram": histogram,
            }
        return {
            "spec_verify_ct": steps,
            "spec_num_correct_drafts": accepted,
            "spec_num_proposed_drafts": drafted,
            "spec_correct_drafts_histogram": histogram,
        }

    def abort_request(self, body: dict[str, Any]) -> None:
        with self._lock:
            hit = [w for w in self._queue if w.rid.startswith(body["rid"])]
            self._queue = [w for w in self._queue if w not in hit]
            running = [w.rid for w in self._running if w.rid.startswith(body["rid"])]
        for waiting in hit:
            waiting.done.set()
        self.engine.abort(running)
        with self._lock:
            self._aborted.update(running)
            self._lock.notify_all()

    # Weights

    def _begin(self, _: dict[str, Any]) -> dict[str, Any]:
        if self.session:
            raise _Refusal("a weight-update session is already open")
        self.session = True
        return {"success": True, "message": "Success"}

    def _end(self, _: dict[str, Any]) -> dict[str, Any]:
        if not self.session:
            raise _Refusal("no weight-update session is open")
        self.session = False
        return {"success": True, "message": "Success"}

    def _from_tensor(self, body: dict[str, Any]) -> dict[str, Any]:
        payloads = body["serialized_named_tensors"]
        if len(payloads) != self.tp_size:
            raise _Refusal(f"{len(payloads)} payloads for {self.tp_size} ranks")
        return self._load(body, lambda: read_bucket(payloads[-1]), drafter=True)

    def _from_distributed(self, body: dict[str, Any]) -> dict[str, Any]:
        def receive() -> list[tuple[str, Tensor]]:
            received = []
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                self.group.broadcast([tensor]).wait()
                received.append((name, tensor))
            return received

        return self._load(body, receive, drafter=self.sessions)

    @torch.no_grad()
    def _load(
        self, body: dict[str, Any], receive: Callable[[], list[tuple[str, Tensor]]], drafter: bool
    ) -> dict[str, Any]:
        if self.sessions and not self.session:
            raise _Refusal("must run between begin_weight_update() and end_weight_update()")
        if self.released & {"weights"}:
            raise _Refusal("the weights' memory is released", 500)
        for name, tensor in receive():
            if name not in self.weights or self.weights[name].shape != tensor.shape:
                raise _Refusal(f"cannot load {name}", 500)
            if name not in self.drafter_names or (drafter and self.updates_drafter):
                self.weights[name].copy_(tensor)
            self.changed = self.stale_cache = True
        if body["flush_cache"]:
            self.stale_cache = False
        if body.get("weight_version") is not None:
            self.weight_version = body["weight_version"]
        return {"success": True, "message": "Success"}

    def _join_group(self, body: dict[str, Any]) -> dict[str, Any]:
        """The keys under which torch's own helper would meet the others, spelled out."""
        from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

        size, name = body["world_size"], body["group_name"]
        store = TCPStore(body["master_address"], body["master_port"], size, is_master=False)
        store = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        self.group = ProcessGroupGloo(store, body["rank_offset"], size)
        return {"success": True, "message": "Success"}

    def _leave_group(self, _: dict[str, Any]) -> dict[str, Any]:
        self.group = None
        return {"success": True, "message": "Success"}

    def _checksums(self, body: dict[str, Any]) -> dict[str, Any]:
        """Of the draft worker: its own tensors, and those that it shares with the target."""
        if body.get("selector") != "draft" or not self.num_steps:
            return {"success": True, "message": "Success."}
        names = {name for name in self.weights if name in self.drafter_names}
        names |= {name for name in self.weights if "embed_tokens" in name or "lm_head" in name}
        found = {f"draft.{n}": hashlib.sha256(self.weights[n].numpy().tobytes()).hexdigest()[:16] for n in names}
        return {"success": True, "message": "Success.", "ranks": [{"checksums": found}] * self.tp_size}

    # Memory

    @torch.no_grad()
    def _release(self, body: dict[str, Any]) -> None:
        with self._lock:
            if self._queue or self._running:
                raise _Refusal("should be called only when server is idle")
        self.released |= set(body["tags"])
        if "weights" in body["tags"] and not self.cpu_backup:
            for weight in self.weights.values():
                weight.fill_(float("nan"))
            self.changed = True

    def _resume(self, body: dict[str, Any]) -> None:
        for tag in body["tags"]:
            self.released.remove(tag)  # KeyError, as in SGLang, where it was not released

    # HTTP

    def info(self) -> dict[str, Any]:
        return {
            "version": "0.5.23",
            "model_path": str(self.checkpoint),
            "tp_size": self.tp_size,
            "dp_size": 1,
            "dtype": "auto",
            "speculative_algorithm": "EAGLE" if self.num_steps else None,
            "speculative_num_steps": self.num_steps or None,
            "speculative_eagle_topk": self.topk if self.num_steps else None,
            "speculative_num_draft_tokens": self.num_steps + 1 if self.num_steps else None,
            "enable_deterministic_inference": self.deterministic,
            "enable_memory_saver": True,
            "enable_weights_cpu_backup": self.cpu_backup,
            "skip_tokenizer_init": self.tokenizer is None,
        }

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        self.calls.append((path, body))
        match path:
            case "/health":
                return None
            case "/flush_cache":
                with self._lock:
                    if self._queue or self._running:
                        raise _Refusal("Flush cache failed.")
                self.stale_cache = False
                return None
            case "/server_info":
                return self.info()
            case "/v1/models":
                # What SGLang keeps back for drafts lies on top of what the native engine holds.
                length = self.engine.max_model_len + (self.num_steps + 1 if self.num_steps else 0)
                return {"data": [{"id": "tiny", "max_model_len": length}]}
            case "/pause_generation" | "/continue_generation":
                with self._lock:
                    self.paused = path == "/pause_generation"
                    self._lock.notify_all()
                return {"status": "ok"}
        calls: dict[str, Callable[[dict[str, Any]], Any]] = {
            "/generate": self.generate,
            "/abort_request": self.abort_request,
            "/update_weights_from_tensor": self._from_tensor,
            "/update_weights_from_distributed": self._from_distributed,
            "/init_weights_update_group": self._join_group,
            "/destroy_weights_update_group": self._leave_group,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
        }
        if self.sessions:
            calls |= {
                "/begin_weight_update": self._begin,
                "/end_weight_update": self._end,
                "/weights_checker": self._checksums,
            }
        if path not in calls:
            raise _Refusal("Not Found", 404)
        return calls[path](body)


@contextmanager
def serving(server: SGLangServer) -> Iterator[str]:
    """Run it; gives its base URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}"))

        def _answer(self, body: dict[str, Any]) -> None:
            pending = server.faults.get(self.path)
            fault = pending.pop(0) if pending else None
            if fault == "hang":
                server.hang()
            if fault == "lost":
                server.answer(self.path, body)
            if fault in ("drop", "lost", "hang"):
                self.connection.close()
                return
            try:
                if fault == "500":
                    raise _Refusal("Internal Server Error", 500)
                status, answer = 200, server.answer(self.path, body)
            except Exception as error:
                status = getattr(error, "status", 500)
                answer = {"error": {"message": f"{error}", "code": status}}
            data = b"" if answer is None else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Tests need no log."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 512  # connections that wait to be taken; the others are reset

    http = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=lambda: http.serve_forever(poll_interval=0.02), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        server.close()
        http.shutdown()
        http.server_close()
        thread.join()
