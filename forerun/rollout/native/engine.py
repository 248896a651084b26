"""The native rollout engine: continuous batching and lossless speculation in plain PyTorch, on a CPU or a GPU.

A step drafts for every running row, verifies all drafts in one forward of the trunk, and each row keeps its own number.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.errors import ForerunError, UsageError
from forerun.models.carrier import MTPCarrier
from forerun.models.weight_stream import WeightStream
from forerun.mtp.config import AcceptanceRule
from forerun.rollout.native.fitting import fit_runner
from forerun.rollout.native.memory import default_cache_bytes
from forerun.rollout.native.products import Choice
from forerun.rollout.native.requests import check_memory, check_stop_strings
from forerun.rollout.native.run import Run
from forerun.rollout.native.sequence import Running
from forerun.rollout.native.weight_update import WeightUpdate
from forerun.rollout.protocol import Completion, NamedTensors, Request, SpeculationTotals
from forerun.rollout.requests import check_requests
from forerun.rollout.stopping import StopStrings
from forerun.rollout.sync import check_complete, digest
from forerun.speculative.depth_control import AdaptiveDepth, DepthControl, FixedDepth

OnTokens = Callable[[str, list[int]], None]


@dataclass
class _Call:
    """A call of `generate` that runs.

    Attributes:
        count: requests so far.
        unfinished: ids of those that have not ended.
        prompt_keys: a number for each prompt.
    """

    run: Run
    count: int = 0
    unfinished: set[str] = field(default_factory=set)
    prompt_keys: dict[tuple[int, ...], int] = field(default_factory=dict)

    def add(self, sequences: Sequence[Running]) -> None:
        self.count += len(sequences)
        self.unfinished.update(sequence.request.request_id for sequence in sequences)
        self.run.add(sequences)


class NativeEngine:
    """A `RolloutEngine` with its own copy of a model's weights.

    Args:
        model: a causal LM of a kind that the engine runs; one with an MTP block (`forerun.attach`, `forerun.load`) can
            draft. Not kept.
        tokenizer: the model's; requests with stop strings need it.
        num_speculative_tokens: default is the model's `mtp_config`'s, 0 without a block.
        depth_control: chooses, step by step, how many tokens up to num_speculative_tokens are drafted: None drafts as
            many as that, "auto" learns on line what is fastest (`speculative.depth_control`).
        acceptance: rule for requests with a temperature; default is the model's `mtp_config`'s.
        draft_vocabulary: token ids to which drafts are restricted; drafting gets cheaper and stays lossless.
        max_num_seqs: requests that run at once.
        max_model_len: longest prompt + completion; default is the model's context.
        prefill_chunk_size: prompt tokens per step.
        kv_cache_memory_bytes: what the cache may grow to. Requests wait until they fit. Default is half of the memory
            that is free when `generate` is called.
        dtype: default is the model's.
        device: default is the model's.
        products: how products are computed on a CPU: "measure" times the spellings of `native.products`, some seconds
            in a process; a spelling's name forces it, for runs that must round alike. Where `packed` wins, as it mostly
            does, the weights are held twice.
        seed: for requests that bring none.

    Attributes:
        num_speculative_tokens: most drafts per row and step; may be set between calls of `generate`, 0 switches
            drafting off.
        weight_version: version of the last `update_weights`, 0 before.

    Raises:
        UsageError: a setting that cannot be, or a model of a kind that the engine does not run.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        num_speculative_tokens: int | None = None,
        depth_control: DepthControl | Literal["auto"] | None = None,
        acceptance: AcceptanceRule | None = None,
        draft_vocabulary: Tensor | None = None,
        max_num_seqs: int = 32,
        max_model_len: int | None = None,
        prefill_chunk_size: int = 512,
        kv_cache_memory_bytes: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        products: Choice = "measure",
        seed: int = 0,
    ) -> None:
        mtp = model.mtp_config if isinstance(model, MTPCarrier) else None
        if num_speculative_tokens is None:
            num_speculative_tokens = mtp.num_speculative_tokens if mtp is not None else 0
        if acceptance is None:
            acceptance = mtp.acceptance if mtp is not None else "rejection"
        if max_num_seqs < 1 or prefill_chunk_size < 1:
            raise UsageError(
                f"max_num_seqs={max_num_seqs}, prefill_chunk_size={prefill_chunk_size}: both must be above 0"
            )
        if acceptance not in get_args(AcceptanceRule):
            raise UsageError(f"acceptance={acceptance!r} must be one of {', '.join(get_args(AcceptanceRule))}")
        if isinstance(depth_control, str) and depth_control != "auto":
            raise UsageError(f"depth_control={depth_control!r} must be None, 'auto' or a DepthControl")
        self.runner = fit_runner(
            model, dtype or model.dtype, torch.device(device or model.device), draft_vocabulary, products
        )
        context = getattr(self.runner.config, "max_position_embeddings", None) or max_model_len
        if context is None:
            raise UsageError("the model's config.json has no max_position_embeddings: add it, or give max_model_len")
        if max_model_len is not None and not 1 < max_model_len <= context:
            raise UsageError(f"max_model_len={max_model_len} must lie between 2 and the model's context of {context}")
        self.dtype: torch.dtype | None = self.runner.dtype
        self.tokenizer = tokenizer
        self.num_speculative_tokens = num_speculative_tokens
        self.depth_control = depth_control
        self.acceptance: AcceptanceRule = acceptance
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len or context
        self.prefill_chunk_size = prefill_chunk_size
        self.kv_cache_memory_bytes = kv_cache_memory_bytes
        self.weight_version = 0
        self._seeds = torch.Generator().manual_seed(seed)
        self._asleep = False
        self._adaptive: AdaptiveDepth | None = None
        self._totals = SpeculationTotals()
        self._call: _Call | None = None
        self._joining = threading.Lock()  # no request joins a call that ends at this moment
        self._stepping = threading.RLock()  # held during a step, and by what may not happen during one
        self._update: WeightUpdate | None = None  # one that has not arrived whole

    @torch.inference_mode()
    def generate(
        self,
        requests: Sequence[Request],
        on_finish: Callable[[Completion], None] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`. A stop token has to be named in the request: the engine adds none.

        Args:
            requests: what to complete.
            on_finish: called with each completion as it ends. It may call `abort` and `update_weights`.
            on_tokens: called after each step with a request's id and its new tokens, before `on_finish`.

        Raises:
            UsageError: a prompt is empty or too long, or a request can outgrow the cache; stop strings without a
                tokenizer; the rule `greedy` with a temperature.
            ForerunError: the engine sleeps or is generating, or the model's logits are not finite.
        """
        call: _Call | None = None
        try:
            with self._joining:  # or two threads would both begin
                call = self._begin(requests)
            return [] if call is None else self._complete(call, on_finish, on_tokens)
        finally:
            if self._call is call:  # and not another thread's, which began as this one ended
                self._call = None

    def _begin(self, requests: Sequence[Request]) -> _Call | None:
        """The call that is the engine's from now on; None if there is nothing to do."""
        self._refuse_part()
        if self._asleep:
            raise ForerunError("the rollout engine sleeps: call wake() before generate()")
        if self._call is not None:
            raise ForerunError("the rollout engine is generating: give it all requests in one call, or wait")
        depth = self._depth(requests)
        overhead, max_tokens = self._cache_bounds()
        limits = self._check(requests, depth, overhead, max_tokens)
        if not requests:
            return None
        run = Run(
            self.runner,
            rule=self.acceptance,
            control=self._control(depth),
            max_depth=depth,
            max_rows=self.max_num_seqs,
            max_tokens=max_tokens,
            overhead=overhead,
            prefill_chunk_size=self.prefill_chunk_size,
            totals=self._totals,
        )
        call = _Call(run)
        call.add(self._sequences(requests, limits, call))
        self._call = call
        return call

    def add(self, requests: Sequence[Request]) -> None:
        """See `RolloutEngine.add`. They are admitted after those that wait already."""
        with self._joining:
            call = self._call
            if call is None:
                raise ForerunError("the rollout engine is not generating: give these requests to generate()")
            run = call.run
            self._depth(requests, run.max_depth)
            for request in requests:
                if request.request_id in call.unfinished:
                    raise UsageError(f"a request with the id {request.request_id!r} is running: ids must differ")
            limits = self._check(requests, run.max_depth, run.scheduler.overhead, run.scheduler.max_tokens)
            call.add(self._sequences(requests, limits, call))

    def _refuse_part(self) -> None:
        if self._update is not None:
            raise ForerunError("the rollout engine holds a part of a weight update: send the update whole")

    def _check(self, requests: Sequence[Request], depth: int, overhead: int, max_tokens: int) -> list[int]:
        """The length, prompt included, that each may come to have; refuses what cannot be run."""
        check_requests(requests, self.max_model_len, self.runner.vocab_size)
        check_stop_strings(requests, self.tokenizer is not None)
        limits = [min(len(r.prompt_token_ids) + r.sampling.max_tokens, self.max_model_len) for r in requests]
        check_memory(requests, limits, depth + overhead, max_tokens)
        return limits

    def _complete(
        self, call: _Call, on_finish: Callable[[Completion], None] | None, on_tokens: OnTokens | None
    ) -> list[Completion]:
        run = call.run
        completions: dict[int, Completion] = {}
        told: dict[int, int] = {}
        while True:
            with self._joining:
                if not call.unfinished:
                    self._call = None
                    break
            with self._stepping:
                self._refuse_part()
                finished = run.step(self.weight_version)
            if on_tokens is not None:
                for sequence in (*run.scheduler.decoding, *finished):
                    before = told.get(sequence.index, 0)
                    if new := sequence.token_ids[before:]:
                        told[sequence.index] = before + len(new)
                        on_tokens(sequence.request.request_id, new)
            call.unfinished.difference_update(sequence.request.request_id for sequence in finished)
            for sequence in finished:
                completions[sequence.index] = completion = sequence.completion()
                if on_finish is not None:
                    on_finish(completion)
        return [completions[i] for i in range(call.count)]

    def _depth(self, requests: Sequence[Request], depth: int | None = None) -> int:
        """Most drafts per step of a call with these requests; a call that runs has its `depth`."""
        if depth is None:
            depth = self.num_speculative_tokens
        if depth < 0:
            raise UsageError(f"num_speculative_tokens={depth} must not be negative (0 switches drafting off)")
        if self.runner.drafter is None or depth == 0:
            return 0
        if self.acceptance == "greedy":
            for request in requests:
                if request.sampling.temperature > 0:
                    raise UsageError(
                        f"request {request.request_id!r} has temperature={request.sampling.temperature}, for which "
                        "acceptance=greedy is not lossless: use rejection or match"
                    )
        return depth

    def _control(self, depth: int) -> DepthControl:
        if self.depth_control is None:
            return FixedDepth(depth)
        if self.depth_control != "auto":
            return self.depth_control
        if self._adaptive is None or self._adaptive.max_depth != depth:
            self._adaptive = AdaptiveDepth(depth)
        return self._adaptive

    def _cache_bounds(self) -> tuple[int, int]:
        """In positions: what a row takes besides its positions, and what the cache may have in all."""
        per_token = max(self.runner.bytes_per_token, 1)
        overhead = -(-self.runner.bytes_per_row // per_token)
        if self.kv_cache_memory_bytes is not None:
            return overhead, self.kv_cache_memory_bytes // per_token
        cache = self.runner.cache
        held = 0 if cache is None else cache.rows * (cache.capacity + overhead)
        return overhead, held + default_cache_bytes(self.runner.device) // per_token

    def _sequences(self, requests: Sequence[Request], limits: Sequence[int], call: _Call) -> list[Running]:
        depth, keys = call.run.max_depth, call.prompt_keys
        sequences = []
        for index, (request, limit) in enumerate(zip(requests, limits, strict=True), start=call.count):
            sampling = request.sampling
            seed = sampling.seed
            if seed is None:
                seed = int(torch.randint(2**62, (1,), generator=self._seeds))
            prompt = tuple(request.prompt_token_ids)
            sequence = Running(request, index, prompt, limit, seed, prompt_key=keys.setdefault(prompt, len(keys)))
            sequence.drafted, sequence.accepted = [0] * depth, [0] * depth
            if sampling.stop:
                assert self.tokenizer is not None
                sequence.stop_strings = StopStrings(sampling.stop, self.tokenizer, sampling.min_tokens)
            sequences.append(sequence)
        return sequences

    def abort(self, request_ids: Iterable[str]) -> None:
        """See `RolloutEngine.abort`. They end after the step that is running."""
        call = self._call
        if call is not None:
            call.run.abort(request_ids)

    def speculation_totals(self) -> SpeculationTotals:
        """See `RolloutEngine.speculation_totals`."""
        return copy.deepcopy(self._totals)

    @torch.no_grad()
    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """See `RolloutEngine.update_weights`. All names and shapes are checked before anything is copied; then each
        weight goes to its place, and of a `WeightStream` none is held.

        While `generate` runs, in `on_finish` or in another thread, it takes place between two steps: tokens that follow
        carry the new version, and see keys and values that older weights computed.

        Raises:
            ForerunError: a tensor is missing, unknown, sent twice, or of another shape; nothing was changed.
            Exception: one could not be made. The engine holds a part of the update, and generates after a whole one.
        """
        given = WeightStream.of(named_tensors)
        check_complete(self.runner.weights, given.described, self.runner.drafter_names)
        update = WeightUpdate(self.runner.weights)
        with self._stepping:
            try:
                update.add(given)
                update.check()
            except BaseException:
                self._update = update
                raise
            self.runner.refresh()
            self.weight_version = version
            self._update = None

    def begin_update(self) -> WeightUpdate:
        """A weight update in parts, for weights that come from afar: unlike with `update_weights`, those that arrived
        have replaced the old ones when a later one fails. The engine generates again after `end_update`, or a whole
        `update_weights`.

        Raises:
            ForerunError: the engine is generating.
        """
        if self._call is not None:
            raise ForerunError("the rollout engine is generating: a weight update in parts waits until that has ended")
        self._update = WeightUpdate(self.runner.weights)
        return self._update

    def end_update(self, version: int) -> None:
        """Every weight has arrived: go on with them.

        Raises:
            ForerunError: one has not, or no update was begun.
        """
        if self._update is None:
            raise ForerunError("no weight update was begun")
        self._update.check()
        with self._stepping:
            self.runner.refresh()
            self.weight_version = version
            self._update = None

    def drafter_digest(self) -> str:
        """`rollout.sync.digest` of the MTP block's weights in the engine's dtype, under their checkpoint names."""
        return digest((name, self.runner.weights[name]) for name in self.runner.drafter_names)

    def sleep(self) -> None:
        """Free the caches. Weights stay, and may be updated meanwhile.

        Raises:
            ForerunError: the engine is generating.
        """
        with self._joining:
            if self._call is not None:
                raise ForerunError("the rollout engine is generating: abort its requests before sleep()")
            self.runner.release()
            self._asleep = True

    def wake(self) -> None:
        """Be ready again; the caches are made when the next requests say how large."""
        self._asleep = False

    def close(self) -> None:
        """Free the caches, which is all that outlives a call of `generate` besides the weights."""
        self.sleep()
