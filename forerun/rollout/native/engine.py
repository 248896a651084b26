"""The native rollout engine: continuous batching and lossless speculation in plain PyTorch, on a CPU or a GPU.

A step drafts for every running row, verifies all drafts in one forward of the trunk, and each row keeps its own number.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.errors import ForerunError, UsageError
from forerun.models.carrier import MTPCarrier
from forerun.mtp.config import AcceptanceRule
from forerun.rollout.native.model import ModelRunner
from forerun.rollout.native.products import Choice
from forerun.rollout.native.run import Run
from forerun.rollout.native.sampler import draw_uniforms
from forerun.rollout.native.scheduler import Running, check_requests
from forerun.rollout.protocol import Completion, NamedTensors, Request, SpeculationTotals
from forerun.rollout.sync import check_complete, digest
from forerun.speculative.drafter import check_draftable


class NativeEngine:
    """A `RolloutEngine` with its own copy of a model's weights.

    Attributes:
        num_speculative_tokens: drafts per step; may be set between calls of `generate`, 0 switches drafting off.
        weight_version: version of the last `update_weights`, 0 before.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        num_speculative_tokens: int = 0,
        acceptance: AcceptanceRule = "rejection",
        max_num_seqs: int = 32,
        max_model_len: int | None = None,
        prefill_chunk_size: int = 512,
        seed: int = 0,
    ) -> None:
        if max_num_seqs < 1 or prefill_chunk_size < 1:
            raise UsageError(
                f"max_num_seqs={max_num_seqs}, prefill_chunk_size={prefill_chunk_size}: both must be above 0"
            )
        context = int(runner.config.max_position_embeddings)
        if max_model_len is not None and not 1 < max_model_len <= context:
            raise UsageError(f"max_model_len={max_model_len} must lie between 2 and the model's context of {context}")
        self.runner = runner
        self.num_speculative_tokens = num_speculative_tokens
        self.acceptance: AcceptanceRule = acceptance
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len or context
        self.prefill_chunk_size = prefill_chunk_size
        self.weight_version = 0
        self._seeds = torch.Generator().manual_seed(seed)
        self._asleep = False
        self._lock = threading.Lock()
        self._aborted: set[str] = set()
        self._totals = SpeculationTotals()

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        *,
        num_speculative_tokens: int | None = None,
        acceptance: AcceptanceRule | None = None,
        draft_vocabulary: Tensor | None = None,
        max_num_seqs: int = 32,
        max_model_len: int | None = None,
        prefill_chunk_size: int = 512,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        products: Choice = "measure",
        seed: int = 0,
    ) -> NativeEngine:
        """Copy a model's weights into a new engine.

        Args:
            model: a Llama-like causal LM; one with an MTP block (`forerun.attach`, `forerun.load`) can draft.
            num_speculative_tokens: default is the model's `mtp_config`'s, 0 without a block.
            acceptance: rule for requests with a temperature; default is the model's `mtp_config`'s.
            draft_vocabulary: token ids to which drafts are restricted; drafting gets cheaper and stays lossless.
            max_num_seqs: requests that run at once.
            max_model_len: longest prompt + completion; default is the model's context.
            prefill_chunk_size: prompt tokens per forward.
            dtype: default is the model's.
            device: default is the model's.
            products: how products with few rows are computed on a CPU: "measure" times the spellings when a batch
                shape first occurs; a spelling's name forces it, for runs that must round alike.
            seed: for requests that bring none.

        Raises:
            UsageError: the model is of a kind that the engine does not run.
        """
        mtp = model.mtp_config if isinstance(model, MTPCarrier) else None
        if num_speculative_tokens is None:
            num_speculative_tokens = mtp.num_speculative_tokens if mtp is not None else 0
        if acceptance is None:
            acceptance = mtp.acceptance if mtp is not None else "rejection"
        runner = ModelRunner(
            model, dtype or model.dtype, torch.device(device or model.device), draft_vocabulary, products
        )
        return cls(
            runner,
            num_speculative_tokens=num_speculative_tokens,
            acceptance=acceptance,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            prefill_chunk_size=prefill_chunk_size,
            seed=seed,
        )

    @torch.inference_mode()
    def generate(
        self, requests: Sequence[Request], on_finish: Callable[[Completion], None] | None = None
    ) -> list[Completion]:
        """See `RolloutEngine.generate`. A stop token has to be named in the request: the engine knows no tokenizer.

        Raises:
            UsageError: a prompt is empty or too long; the rule `greedy` with a temperature; a block of several layers.
            ForerunError: the engine sleeps, or the model's logits are not finite.
        """
        if self._asleep:
            raise ForerunError("the rollout engine sleeps: call wake() before generate()")
        check_requests(requests, self.max_model_len, self.runner.vocab_size)
        depth = self._depth(requests)
        if not requests:
            return []
        run = Run(
            self.runner,
            [self._running(index, request, depth) for index, request in enumerate(requests)],
            rule=self.acceptance,
            depth=depth,
            max_rows=self.max_num_seqs,
            prefill_chunk_size=self.prefill_chunk_size,
            take_aborted=self._take_aborted,
        )
        with self._lock:
            self._aborted.clear()
        completions: dict[int, Completion] = {}
        for sequence in run.finished():
            completions[sequence.index] = completion = sequence.completion(self.weight_version)
            self._count(completion)
            if on_finish is not None:
                on_finish(completion)
        return [completions[i] for i in range(len(requests))]

    def abort(self, request_ids: Iterable[str]) -> None:
        """See `RolloutEngine.abort`."""
        with self._lock:
            self._aborted.update(request_ids)

    def _take_aborted(self) -> set[str]:
        with self._lock:
            taken, self._aborted = self._aborted, set()
        return taken

    def speculation_totals(self) -> SpeculationTotals:
        """See `RolloutEngine.speculation_totals`."""
        return copy.deepcopy(self._totals)

    def _count(self, completion: Completion) -> None:
        totals = self._totals
        totals.num_verify_steps += completion.spec_num_verify_steps or 0
        totals.num_draft_tokens += completion.spec_num_draft_tokens or 0
        totals.num_accepted_tokens += completion.spec_num_accepted_tokens or 0
        for depth, accepted in enumerate(completion.accepted_per_depth or []):
            if depth == len(totals.accepted_per_depth):
                totals.accepted_per_depth.append(0)
            totals.accepted_per_depth[depth] += accepted

    def _depth(self, requests: Sequence[Request]) -> int:
        depth = self.num_speculative_tokens
        if depth < 0:
            raise UsageError(f"num_speculative_tokens={depth} must not be negative (0 switches drafting off)")
        if self.runner.block is None or depth == 0:
            return 0
        check_draftable(self.runner.block)
        if self.acceptance == "greedy":
            for request in requests:
                if request.sampling.temperature > 0:
                    raise UsageError(
                        f"request {request.request_id!r} has temperature={request.sampling.temperature}, for which "
                        "acceptance=greedy is not lossless: use rejection or match"
                    )
        return depth

    def _running(self, index: int, request: Request, depth: int) -> Running:
        sampling = request.sampling
        seed = sampling.seed
        if seed is None:
            seed = int(torch.randint(2**62, (1,), generator=self._seeds))
        prompt = tuple(request.prompt_token_ids)
        limit = min(len(prompt) + sampling.max_tokens, self.max_model_len)
        # A step looks up to `depth` positions past the last one that a row may fill.
        uniforms = draw_uniforms(sampling, seed, limit - len(prompt) + depth + 1)
        return Running(request, index, prompt, limit, uniforms, drafted=[0] * depth, accepted=[0] * depth)

    @torch.no_grad()
    def update_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """See `RolloutEngine.update_weights`. Everything is checked before anything is copied.

        The names are gathered first, so a generator of temporaries is held as a whole; one that yields the trainer's
        live tensors (`models.carrier.named_weights`) costs nothing.

        Raises:
            ForerunError: a tensor is missing, unknown, sent twice, or of another shape; nothing was changed.
        """
        given = list(named_tensors)
        check_complete(self.runner.weights, given, self.runner.drafter_names)
        for name, tensor in given:
            self.runner.weights[name].copy_(tensor)
        self.runner.refresh()
        self.weight_version = version

    def drafter_digest(self) -> str:
        """`rollout.sync.digest` of the MTP block's weights in the engine's dtype, under their checkpoint names."""
        return digest((name, self.runner.weights[name]) for name in self.runner.drafter_names)

    def sleep(self) -> None:
        """Free the caches. Weights stay, and may be updated meanwhile."""
        self.runner.release()
        self._asleep = True

    def wake(self) -> None:
        """Be ready again; the caches are made when the next requests say how large."""
        self._asleep = False

    def close(self) -> None:
        """Free the caches."""
        self.sleep()
