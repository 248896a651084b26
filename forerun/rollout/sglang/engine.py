"""The SGLang engine: a `RolloutEngine` in front of a server, attached to or launched.

What SGLang 0.5.23 does was read in its source; docs/rollout_sglang.md says what of this ran where.
"""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal

import torch

from forerun.errors import ForerunError, UsageError
from forerun.families import text_section
from forerun.models.weight_stream import WeightStream
from forerun.mtp.config import MTPConfig
from forerun.rollout.child import ChildProcess
from forerun.rollout.client import Client, Refused
from forerun.rollout.protocol import Completion, NamedTensors, Request, SpeculationTotals
from forerun.rollout.requests import check_requests
from forerun.rollout.sglang.completion import add_to_totals
from forerun.rollout.sglang.drafter_checksum import DrafterChecksums
from forerun.rollout.sglang.launch import LaunchSettings, launch
from forerun.rollout.sglang.run import Run
from forerun.rollout.sglang.sampling import why_not
from forerun.rollout.sglang.server import end_tokens, read_facts
from forerun.rollout.sglang.transport import Backend, Broadcast, InRequest, Transport
from forerun.rollout.sglang.update import BrokeOff, send_update
from forerun.rollout.sglang.weights import ServedWeights
from forerun.rollout.sync import Digest, digesting

Way = Literal["request", "nccl", "gloo"]
BUCKET_BYTES = 256 * 2**20
_IDLE_S = 30.0
_HALF = "holds half of an update"
_POLL_S = 0.02


class SGLangEngine:
    """A `RolloutEngine` in front of a running server.

    Args:
        base_url: http://HOST:PORT.
        checkpoint: the directory that the server serves; default is what the server itself names.
        transport: how weights travel: "request" (inside HTTP requests), or by broadcast over "nccl" or "gloo".
        bucket_bytes: most bytes of weights on their way at once.
        release_weights: `sleep` gives back the weights' memory, too. Unless the server was launched with
            --enable-weights-cpu-backup, an update must follow before it can generate again.
        max_connections: requests that are with the server at once.
        seed: where seeds are obeyed, for requests that bring none.
        timeout_s: seconds without an answer after which a call fails.
        process: the server's, if it is ours; ended with the engine.

    Attributes:
        facts: the server's settings.
        weight_version: version of the last `update_weights`, 0 before.

    Raises:
        UsageError: the server serves in a way that cannot be used, or its checkpoint cannot be read.
        ForerunError: no server answers.
    """

    def __init__(
        self,
        base_url: str,
        *,
        checkpoint: str | Path | None = None,
        transport: Way = "request",
        bucket_bytes: int = BUCKET_BYTES,
        release_weights: bool = False,
        max_connections: int = 256,
        seed: int = 0,
        timeout_s: float = 3600.0,
        process: ChildProcess | None = None,
    ) -> None:
        if bucket_bytes < 1 or max_connections < 1:
            raise UsageError(f"bucket_bytes={bucket_bytes}, max_connections={max_connections}: both must be above 0")
        self.client = Client("SGLang", base_url, timeout_s, process)
        self.facts = read_facts(self.client)
        path = Path(checkpoint if checkpoint is not None else self.facts.model_path)
        if checkpoint is None and not path.is_dir():
            raise UsageError(
                f"the SGLang server serves {str(path)!r}, which is no directory here: name its copy with checkpoint="
            )
        self.served = ServedWeights(path, self.facts.dtype)
        self.vocab_size = int(text_section(self.served.config)["vocab_size"])
        self.ends = end_tokens(path)
        self.weight_version = 0
        self.dtype: torch.dtype | None = None
        self._way: Way = transport
        self._transport: Transport | None = None
        self._bucket_bytes = bucket_bytes
        self._release_weights = release_weights
        self._max_connections = max_connections
        self._seeds = random.Random(seed)
        self._process = process
        self._run: Run | None = None
        self._busy = threading.Lock()
        self._asleep = False
        self._unusable: str | None = None
        self._released_weights = False
        self._totals: SpeculationTotals | None = SpeculationTotals()
        self._checksums: DrafterChecksums | None = None
        if self.facts.drafts:
            if self.served.drafter_digest is None:
                raise UsageError(
                    f"{path} holds no MTP block, and the SGLang server drafts with one: name its checkpoint"
                )
            self._checksums = DrafterChecksums(self.client, self.served.drafter_digest)

    @classmethod
    def launch(
        cls,
        settings: LaunchSettings,
        mtp: MTPConfig | None = None,
        *,
        transport: Way = "request",
        bucket_bytes: int = BUCKET_BYTES,
        release_weights: bool = False,
        max_connections: int = 256,
        seed: int = 0,
    ) -> SGLangEngine:
        """Start a server on the loopback interface and put an engine in front of it; `close` ends both.

        Args:
            settings: what to start.
            mtp: drafting, which is off without it and without `mtp.enable_rollout`.

        Raises:
            UsageError: settings that SGLang would not take, or not heed.
            ForerunError: the server did not come up.
        """
        base_url, process = launch(settings, mtp)
        try:
            return cls(
                base_url,
                checkpoint=settings.model_dir,
                transport=transport,
                bucket_bytes=bucket_bytes,
                release_weights=release_weights,
                max_connections=max_connections,
                seed=seed,
                process=process,
            )
        except BaseException:
            process.close()
            raise

    @property
    def num_speculative_tokens(self) -> int:
        """Depth of drafting: the server's, which it cannot change while it runs."""
        return self.facts.num_steps

    @num_speculative_tokens.setter
    def num_speculative_tokens(self, value: int) -> None:
        if value != self.facts.num_steps:
            raise UsageError(
                f"num_speculative_tokens={value}: a running SGLang server drafts as it was launched "
                f"({self.facts.num_steps}); launch another"
            )

    def generate(
        self, requests: Sequence[Request], on_finish: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        """See `RolloutEngine.generate`.

        Raises:
            UsageError: also where SGLang lacks a sampling setting, or would pass over it.
            ForerunError: the engine sleeps, lacks a whole set of weights, or the server failed.
        """
        self._check_usable()
        self._check(requests)
        if not self._busy.acquire(blocking=False):
            raise ForerunError("the SGLang engine is generating or being updated already: wait for that to end")
        completions: dict[int, Completion] = {}
        try:
            seeds = [self._seed(request) for request in requests]
            run = Run(self.client, self.facts, requests, seeds, self.weight_version, self._max_connections)
            self._run = run
            with closing(run.finished()) as finished:
                for index, completion in finished:
                    completions[index] = completion
                    if self._totals is not None and not add_to_totals(self._totals, completion):
                        self._totals = None
                    if on_finish is not None:
                        on_finish(completion)
        finally:
            self._run = None
            self._busy.release()
        return [completions[i] for i in range(len(run.requests))]

    def add(self, requests: Sequence[Request]) -> None:
        """See `RolloutEngine.add`."""
        self._check(requests)
        run = self._run
        if run is None or not run.add(requests, [self._seed(request) for request in requests]):
            raise ForerunError("the SGLang engine is not generating: give these requests to generate()")

    def _check(self, requests: Sequence[Request]) -> None:
        check_requests(requests, self.facts.context_length, self.vocab_size)
        for request in requests:
            if (reason := why_not(request.sampling, self.facts, self.ends)) is not None:
                raise UsageError(f"request {request.request_id!r} asks for {reason}")

    def _seed(self, request: Request) -> int | None:
        """Where seeds are obeyed, SGLang gives all requests without one the same."""
        if not self.facts.deterministic:
            return None
        return self._seeds.getrandbits(62) if request.sampling.seed is None else request.sampling.seed

    def _check_usable(self) -> None:
        if self._asleep:
            raise ForerunError("the rollout engine sleeps: call wake() before generate()")
        if self._unusable is not None:
            raise ForerunError(f"the SGLang server {self._unusable}: call update_weights() with the whole model")

    def abort(self, request_ids: Iterable[str]) -> None:
        """See `RolloutEngine.abort`."""
        if (run := self._run) is not None:
            run.abort(request_ids)

    @torch.no_grad()
    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """See `RolloutEngine.update_weights`. Names and shapes are checked before the first bucket; of a `WeightStream`
        one bucket is held at a time.

        SGLang cannot go back once a bucket is loaded: after a failure on the way it stays paused, and the engine
        refuses to generate until a whole update has arrived.

        Raises:
            ForerunError: a tensor is missing, unknown or of another shape, so that nothing was sent; or the server
                failed on the way.
        """
        given, trained, held = WeightStream.of(named_tensors), Digest(), Digest()
        if self._checksums is not None:
            given = digesting(given, [name for name, _ in given.described if self.served.is_drafter(name)], trained)
        stored = self.served.as_stored(given)
        if self._checksums is not None:
            stored = digesting(stored, self.served.drafter_names, held)
        if not self._busy.acquire(blocking=False):
            raise ForerunError("the SGLang engine is generating or being updated already: wait for that to end")
        try:
            if self._released_weights:
                self.client.post("/resume_memory_occupation", {"tags": ["weights"]})
                self._released_weights = False
            if self._transport is None:
                self._transport = self._open_transport()
            before, self._unusable = self._unusable, _HALF  # whatever ends this call
            try:
                send_update(
                    self.client,
                    self._transport,
                    stored,
                    version,
                    drafts=self.facts.drafts,
                    bucket_bytes=self._bucket_bytes,
                )
            except BrokeOff as error:
                raise ForerunError(
                    f"weight update {version} broke off, and the SGLang server stays paused until a whole one: {error}"
                ) from None
            except ForerunError:
                self._unusable = before  # nothing was sent
                raise
            self._unusable = None
            self.weight_version = version
            if self._checksums is not None:
                self._checksums.sent(held.hexdigest(), trained.hexdigest())
        finally:
            self._busy.release()

    def _open_transport(self) -> Transport:
        if self._way == "request":
            return InRequest(self.client, self.facts.tp_size)
        backend: Backend = self._way
        return Broadcast(self.client, self.facts.tp_size, backend)

    def drafter_digest(self) -> str | None:
        """The trainer's digest while the draft worker has the weights that `update_weights` sent, another one if it
        has not, None where SGLang's version cannot tell (or does not draft). See `drafter_checksum`.
        """
        return None if self._checksums is None else self._checksums.digest()

    def speculation_totals(self) -> SpeculationTotals | None:
        """Sums over the completions; None from the first one on that came without its counts."""
        return copy.deepcopy(self._totals)

    def sleep(self) -> None:
        """Have the server give back its caches' memory, and its weights' with `release_weights`.

        Raises:
            UsageError: it was launched without --enable-memory-saver.
        """
        if self._asleep:
            return
        if not self.facts.memory_saver:
            raise UsageError("the SGLang server cannot give memory back: launch it with --enable-memory-saver")
        self._wait_until_idle()
        tags = ["kv_cache", "weights"] if self._release_weights else ["kv_cache"]
        self.client.post("/release_memory_occupation", {"tags": tags})
        self._asleep = True
        self._released_weights = self._release_weights
        if self._release_weights and not self.facts.keeps_weights:
            self._unusable = "gave its weights back while it slept"

    def _wait_until_idle(self) -> None:
        """SGLang's scheduler dies of a release while a request runs, and may still be at the step after the last one's
        end. It refuses to flush its cache for as long, which does no harm.
        """
        deadline = time.monotonic() + _IDLE_S
        while True:
            try:
                self.client.post("/flush_cache", timeout_s=_IDLE_S)
                return
            except Refused as error:
                if time.monotonic() > deadline:
                    raise ForerunError(f"the SGLang server does not come to rest: {error}") from None
            time.sleep(_POLL_S)

    def wake(self) -> None:
        """Have the server take its memory again."""
        if not self._asleep:
            return
        tags = ["weights", "kv_cache"] if self._released_weights else ["kv_cache"]
        self.client.post("/resume_memory_occupation", {"tags": tags})
        self._asleep = self._released_weights = False

    def close(self) -> None:
        """Leave the process group, and end the server if the engine launched it."""
        try:
            if self._transport is not None:
                self._transport.close()
        finally:
            self._transport = None
            if self._process is not None:
                self._process.close()
