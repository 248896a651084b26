"""The rollout engine on vLLM: one class, whether vLLM runs in a child process or behind HTTP."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError

from forerun.errors import ForerunError, UsageError
from forerun.families import text_section
from forerun.models.weight_stream import WeightStream
from forerun.rollout.protocol import Completion, NamedTensors, Request, SpeculationTotals
from forerun.rollout.requests import check_requests
from forerun.rollout.vllm.buckets import shared_directory, write_buckets
from forerun.rollout.vllm.completion import Judged, completion, judged
from forerun.rollout.vllm.connection import Asked, Connection, Finished
from forerun.rollout.vllm.launch import LaunchSettings, engine_arguments
from forerun.rollout.vllm.offline import OfflineConnection
from forerun.rollout.vllm.sampling import check_sampling, vllm_sampling
from forerun.rollout.vllm.server import ServerConnection, start_server
from forerun.rollout.vllm.weights import ServedWeights

BUCKET_BYTES = 256 << 20


class VLLMEngine:
    """A `RolloutEngine` that is vLLM: `launch` one, `serve` one behind HTTP, or `connect` to one that runs.

    Attributes:
        weight_version: version of the last whole `update_weights`, 0 before.
        max_model_len: vLLM's longest prompt + completion.
    """

    def __init__(self, connection: Connection, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._connection = connection
        facts = connection.worker("forerun_describe")
        if facts["logprobs_mode"] != "processed_logprobs":
            raise UsageError(
                f"vLLM reports {facts['logprobs_mode']}: start it with --logprobs-mode processed_logprobs, which are "
                "those of the tokens as they were sampled"
            )
        self._served = ServedWeights(facts["model"])
        dtype: torch.dtype = getattr(torch, facts["dtype"])
        self.dtype: torch.dtype | None = dtype
        self._vocab_size = int(text_section(self._served.config)["vocab_size"])
        self._dtypes = self._served.sent_in(dtype, facts["wider_parameters"])
        self._depth: int = facts["num_speculative_tokens"]
        self._reports_drafts = self._depth == 0 or facts["spec_metrics"] == "detailed"
        self._has_tokenizer: bool = facts["has_tokenizer"]
        self._can_sleep: bool = facts["can_sleep"]
        self.max_model_len: int = facts["max_model_len"]
        self.weight_version: int = facts["weight_version"]
        self._whole: bool = facts["whole"]
        self._biased = False
        self._bucket_bytes = bucket_bytes
        self._beyond = [0] * self._depth
        self._asleep = False
        self._warned: set[str] = set()
        self._asked: list[Request] = []
        self._running: dict[str, int] = {}  # id -> its place among those
        self._busy = threading.Lock()
        self._joining = threading.Lock()

    @classmethod
    def launch(cls, model_dir: str | Path, settings: LaunchSettings, bucket_bytes: int = BUCKET_BYTES) -> VLLMEngine:
        """Start vLLM in a child process, which ends with this one.

        Args:
            model_dir: a checkpoint that vLLM drafts with, see docs/serving.md.
            settings: see `LaunchSettings`.
            bucket_bytes: of a weight update, what is in memory at a time besides the two models.

        Raises:
            UsageError: the checkpoint cannot be served so, or the interpreter has no vLLM.
            ForerunError: vLLM does not start.
        """
        arguments = engine_arguments(model_dir, settings)
        return cls._owning(OfflineConnection(settings.python, arguments, settings.environment), bucket_bytes)

    @classmethod
    def serve(cls, model_dir: str | Path, settings: LaunchSettings, bucket_bytes: int = BUCKET_BYTES) -> VLLMEngine:
        """As `launch`, but vLLM's own server on a port of loopback; `base_url` says where."""
        url, process = start_server(settings.python, engine_arguments(model_dir, settings), settings.environment)
        return cls._owning(ServerConnection(url, process), bucket_bytes)

    @classmethod
    def connect(cls, base_url: str, bucket_bytes: int = BUCKET_BYTES) -> VLLMEngine:
        """Use a server of this machine that runs; `close` leaves it running. docs/rollout_vllm.md has its command.

        Raises:
            UsageError: it is not set up for this.
            ForerunError: nothing answers.
        """
        return cls._owning(ServerConnection(base_url), bucket_bytes)

    @classmethod
    def _owning(cls, connection: Connection, bucket_bytes: int) -> VLLMEngine:
        try:
            return cls(connection, bucket_bytes)
        except BaseException:
            connection.close()
            raise

    @property
    def base_url(self) -> str | None:
        """The server's address; None for a child process."""
        return getattr(self._connection, "base_url", None)

    @property
    def num_speculative_tokens(self) -> int:
        """Tokens per draft. vLLM cannot change it while it runs."""
        return self._depth

    @num_speculative_tokens.setter
    def num_speculative_tokens(self, value: int) -> None:
        if value != self._depth:
            raise UsageError(
                f"vLLM was started with num_speculative_tokens={self._depth} and cannot change it: start another one "
                f"with {value}"
            )

    def generate(
        self, requests: Sequence[Request], on_finish: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        """See `RolloutEngine.generate`.

        Raises:
            UsageError: a prompt or a sampling setting that cannot be run.
            ForerunError: vLLM has ended, sleeps, or has half of an update.
        """
        if self._asleep:
            raise ForerunError("the rollout engine sleeps: call wake() before generate()")
        self._refuse_mixed_weights()
        self._check(requests)
        if not requests:
            return []
        if not self._busy.acquire(blocking=False):
            raise ForerunError("the vLLM engine is generating already: one call at a time")
        try:
            with self._joining:
                self._asked = list(requests)
                self._running = {request.request_id: place for place, request in enumerate(requests)}
            completions: dict[int, Completion] = {}

            def finish(finished: Finished) -> None:
                with self._joining:
                    place = self._running.pop(finished["id"])
                completions[place] = made = self._completion(self._asked[place], finished)
                if on_finish is not None:
                    on_finish(made)

            self._connection.generate([self._in_vllms_terms(request) for request in requests], finish)
            return [completions[place] for place in range(len(self._asked))]
        finally:
            with self._joining:
                self._asked, self._running = [], {}
            self._busy.release()

    def add(self, requests: Sequence[Request]) -> None:
        """See `RolloutEngine.add`. What vLLM alone finds unusable, `generate` raises when all others have ended."""
        self._check(requests)
        with self._joining:
            for request in requests:
                if request.request_id in self._running:
                    raise UsageError(f"a request with the id {request.request_id!r} is running: ids must differ")
            # Noted before one of them can end.
            first = len(self._asked)
            self._asked += requests
            self._running.update({request.request_id: place for place, request in enumerate(requests, start=first)})
            if not self._connection.add([self._in_vllms_terms(request) for request in requests]):
                del self._asked[first:]
                for request in requests:
                    del self._running[request.request_id]
                raise ForerunError("the vLLM engine is not generating: give these requests to generate()")

    def _check(self, requests: Sequence[Request]) -> None:
        check_requests(requests, self.max_model_len, self._vocab_size)
        for request in requests:
            check_sampling(request, speculative=self._depth > 0, has_tokenizer=self._has_tokenizer)

    def _in_vllms_terms(self, request: Request) -> Asked:
        return {
            "id": request.request_id,
            "token_ids": list(request.prompt_token_ids),
            "sampling_params": vllm_sampling(request, self.max_model_len),
        }

    def _completion(self, request: Request, finished: Finished) -> Completion:
        counts: Judged | None = None
        # What vLLM ends early (an abort, or a stop string, which it finds outside its core) has no counts.
        known = finished["drafted"] is not None or finished["finish_reason"] == "length"
        if self._reports_drafts and (known or self._depth == 0):
            counts = judged(finished, self._depth)
            self._beyond = [a + b for a, b in zip(self._beyond, counts.beyond, strict=True)]
        return completion(request, finished, self.weight_version, self._depth, counts)

    def abort(self, request_ids: Iterable[str]) -> None:
        """See `RolloutEngine.abort`."""
        if ids := [each for each in request_ids if each in self._running]:
            self._connection.abort(ids)

    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """See `RolloutEngine.update_weights`: trunk and drafter, in buckets through this machine's shared memory.

        Names and shapes are checked as a whole before anything is sent. Should it fail after that, `weight_version`
        stays and nothing is generated until an update arrives whole. Of a `WeightStream` one bucket is in host memory
        at a time, the tensor that is being made, and the embedding and LM head if the drafter has copies of its own.

        Raises:
            ForerunError: a tensor is missing, unknown, sent twice, or of another shape, and nothing was changed; or
                the update broke off.
        """
        if not self._busy.acquire(blocking=False):
            raise ForerunError("the vLLM engine is generating: update its weights between calls")
        try:
            plan = self._served.plan(WeightStream.of(named_tensors), self._dtypes, drafts=self._depth > 0)
            if self._asleep and self._can_sleep:
                self._connection.wake(["weights"])
            self._whole = False
            try:
                self._connection.worker("forerun_start_update")
                with shared_directory() as directory:
                    for drafters, tensors in groupby(plan.tensors, lambda named: self._served.is_drafter(named[0])):
                        for path in write_buckets(tensors, Path(directory), self._bucket_bytes):
                            part = "drafter" if drafters else "trunk"
                            self._connection.worker("forerun_load_bucket", part, str(path))
                self._connection.worker("forerun_finish_update", version)
            except (ForerunError, OSError, SafetensorError) as error:
                self._abandon_update()
                line = " ".join(str(error).split())
                raise ForerunError(f"weight update {version} broke off, send it again: {line}") from error
            except BaseException:  # interrupted
                self._abandon_update()
                raise
            self._whole, self._biased = True, plan.biased
            self.weight_version = version
            if not self._connection.reset_prefix_cache():
                self._whole = False
                raise ForerunError("vLLM did not reset its prefix cache, as others generate: send the update again")
        finally:
            self._busy.release()

    def _abandon_update(self) -> None:
        with contextlib.suppress(ForerunError):  # the failure that led here says more
            self._connection.worker("forerun_abandon_update")

    def _refuse_mixed_weights(self) -> None:
        if not self._whole:
            raise ForerunError("vLLM holds half of a weight update: call update_weights again before generate")

    def drafter_digest(self) -> str | None:
        """`rollout.sync.digest` of what vLLM's drafter holds, in vLLM's dtype, under the trainer's names.

        None where vLLM does not draft, or holds the weights in a form that cannot be read back, which a warning says
        once. Biases that the served checkpoint has as zeros count only if the last update sent them.
        """
        if self._depth == 0:
            return None
        answer = self._connection.worker("forerun_drafter_digest", self._served.drafter_layout(self._biased))
        if answer["unreadable"]:
            self._warn_once(f"the drafter cannot be compared with the trainer's: {answer['unreadable']}")
        return answer["digest"]

    def speculation_totals(self) -> SpeculationTotals:
        """vLLM's own counters since it started, less accepted drafts that came behind a text's end."""
        if self._depth == 0:
            return SpeculationTotals()
        counters = self._connection.counters()
        per_depth = [int(count) for count in counters["accepted_tokens_per_pos"]]
        per_depth = [count - beyond for count, beyond in zip(per_depth, self._beyond, strict=True)]
        return SpeculationTotals(int(counters["drafts"]), int(counters["draft_tokens"]), sum(per_depth), per_depth)

    def sleep(self) -> None:
        """vLLM's sleep mode (level 1: the weights wait in the host's memory) where it was started with it.

        Elsewhere, as always on a CPU, the prefix cache is forgotten and a warning says that no memory was freed.
        """
        if self._asleep:
            return
        if self._can_sleep:
            self._connection.sleep()
        else:
            self._connection.reset_prefix_cache()
            self._warn_once("this vLLM has no sleep mode: its memory stays in use while it sleeps")
        self._asleep = True

    def wake(self) -> None:
        """Be ready again, with the weights and the drafter as they were or as `update_weights` left them."""
        if self._asleep and self._can_sleep:
            self._connection.wake()
        self._asleep = False

    def _warn_once(self, line: str) -> None:
        """Of what holds at every step."""
        if line not in self._warned:
            self._warned.add(line)
            warnings.warn(line, stacklevel=3)

    def close(self) -> None:
        """End vLLM, unless it is a server that ran before."""
        self._connection.close()

    def __enter__(self) -> VLLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
