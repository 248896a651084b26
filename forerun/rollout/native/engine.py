"""The native rollout engine: continuous batching and lossless speculation in plain PyTorch, on a CPU or a GPU.

A step drafts for every running row, verifies all drafts in one forward of the trunk, and each row keeps its own number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from forerun.errors import ForerunError, UsageError
from forerun.models.carrier import MTPCarrier
from forerun.mtp.config import AcceptanceRule
from forerun.rollout.native.model import ModelRunner
from forerun.rollout.native.products import Choice
from forerun.rollout.native.sampler import Sampler, draw_uniforms
from forerun.rollout.native.scheduler import PromptEnd, Running, Scheduler, check_requests
from forerun.rollout.protocol import Completion, NamedTensors, Request
from forerun.rollout.sync import check_complete, digest
from forerun.speculative.drafter import Drafts

_CAPACITY_STEP = 64


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
        run = _Run(self, requests, depth)
        completions: dict[int, Completion] = {}
        for sequence in run.finished():
            completions[sequence.index] = completion = sequence.completion(self.weight_version)
            if on_finish is not None:
                on_finish(completion)
        return [completions[i] for i in range(len(requests))]

    def _depth(self, requests: Sequence[Request]) -> int:
        depth = self.num_speculative_tokens
        if depth < 0:
            raise UsageError(f"num_speculative_tokens={depth} must not be negative (0 switches drafting off)")
        if self.runner.block is None or depth == 0:
            return 0
        if self.runner.drafter is None:
            raise UsageError(
                f"drafting with an MTP block of num_layers={len(self.runner.block.layers)} is not supported: "
                "use num_layers=1 or repeat_layer=true, or roll out with num_speculative_tokens=0"
            )
        if self.acceptance == "greedy":
            for request in requests:
                if request.sampling.temperature > 0:
                    raise UsageError(
                        f"request {request.request_id!r} has temperature={request.sampling.temperature}, for which "
                        "acceptance=greedy is not lossless: use rejection or match"
                    )
        return depth

    def seed_of(self, request: Request) -> int:
        if request.sampling.seed is not None:
            return request.sampling.seed
        return int(torch.randint(2**62, (1,), generator=self._seeds))

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


class _Run:
    """One call of `generate`: the rows in flight, and the trunk's hiddens that the drafter has not seen yet."""

    def __init__(self, engine: NativeEngine, requests: Sequence[Request], depth: int) -> None:
        self.runner = engine.runner
        self.rule = engine.acceptance
        self.chunk = engine.prefill_chunk_size
        self.depth = depth
        sequences = []
        for index, request in enumerate(requests):
            prompt = tuple(request.prompt_token_ids)
            limit = min(len(prompt) + request.sampling.max_tokens, engine.max_model_len)
            uniforms = draw_uniforms(request.sampling, engine.seed_of(request), limit - len(prompt) + depth + 1)
            sequences.append(
                Running(request, index, prompt, limit, uniforms, drafted=[0] * depth, accepted=[0] * depth)
            )
        rows = min(engine.max_num_seqs, len(sequences))
        self.scheduler = Scheduler(sequences, rows)
        # Rows near their end are padded to the deepest row's drafts, so positions can pass the limit by `depth`.
        capacity = max(s.limit for s in sequences) + depth
        self.runner.allocate(rows, -(-capacity // _CAPACITY_STEP) * _CAPACITY_STEP)
        self.runner.tune(rows * (depth + 1), rows)
        # Pending for the drafter: hiddens [R, T, d], the token after each [R, T], how many are a row's own.
        self.hidden: Tensor | None = None
        self.following: Tensor | None = None
        self.pending: list[int] = []
        self.sampler: Sampler | None = None

    def finished(self) -> Iterator[Running]:
        """Run to the end; yields sequences as they finish."""
        while self.scheduler.unfinished:
            new_rows = self.scheduler.admit()
            if new_rows:
                self._prefill(new_rows)
                yield from self._retire()
            if self.scheduler.running:
                self._decode()
                yield from self._retire()

    def _make_sampler(self, rows: Sequence[Running]) -> Sampler:
        return Sampler(rows, self.rule, self.runner.draft_vocabulary, self.runner.device)

    # Prompts

    def _prefill(self, new_rows: list[int]) -> None:
        """Fill the cache for new rows, each prompt once, and sample their first tokens."""
        running = self.scheduler.running
        holders = {running[row].prompt: row for row in range(new_rows[0])}
        leaders, followers = [], []
        for row in new_rows:
            prompt = running[row].prompt
            if prompt in holders:
                followers.append((holders[prompt], row))
            else:
                holders[prompt] = row
                leaders.append(row)
        for pieces in self._pieces(leaders):
            self._prefill_pieces(pieces)
        assert self.runner.cache is not None
        for source, row in followers:
            self.runner.cache.copy_row(source, row, len(running[row].prompt))
            running[row].prompt_end = running[source].prompt_end

        new = [running[row] for row in new_rows]
        ends = [s.prompt_end for s in new if s.prompt_end is not None]
        logits = torch.stack([end.logits for end in ends])[:, None]
        sampler = self._make_sampler(new)
        none = Drafts(torch.empty(len(new), 0, dtype=torch.long, device=self.runner.device), None)
        judged = sampler.judge(logits, none, [0] * len(new), None if sampler.greedy else sampler.uniforms(0))
        for s, tokens, log_probs, raw in zip(
            new, judged.token_lists, judged.log_probs, judged.raw_log_probs, strict=True
        ):
            s.append(tokens, log_probs, raw)
        self.sampler = None
        if self.depth:
            self._add_pending(torch.stack([end.hidden for end in ends])[:, None], judged.tokens)

    def _pieces(self, rows: list[int]) -> Iterator[list[tuple[int, int, int]]]:
        """Cut the prompts into forwards of at most `chunk` tokens: lists of (row, start, count)."""
        pieces: list[tuple[int, int, int]] = []
        room = self.chunk
        for row in rows:
            start, length = 0, len(self.scheduler.running[row].prompt)
            while start < length:
                count = min(room, length - start)
                pieces.append((row, start, count))
                start += count
                room -= count
                if room == 0:
                    yield pieces
                    pieces, room = [], self.chunk
        if pieces:
            yield pieces

    def _prefill_pieces(self, pieces: list[tuple[int, int, int]]) -> None:
        running = self.scheduler.running
        tokens: list[int] = []
        following: list[int] = []
        for row, start, count in pieces:
            prompt = running[row].prompt
            tokens.extend(prompt[start : start + count])
            after = prompt[start + 1 : start + count + 1]
            following.extend(after if len(after) == count else (*after, 0))
        device = self.runner.device
        hidden_states = self.runner.prefill(
            torch.tensor([tokens], device=device),
            torch.tensor([following], device=device) if self.depth else None,
            pieces,
        )[0]
        at = 0
        for row, start, count in pieces:
            at += count
            if start + count == len(running[row].prompt):
                last = hidden_states[at - 1].clone()
                running[row].prompt_end = PromptEnd(last, self._logits(last[None])[0])

    def _add_pending(self, hidden: Tensor, following: Tensor) -> None:
        """Append rows [N, 1, d], [N, 1] to what the drafter has yet to see."""
        if self.hidden is None or self.following is None or not self.pending:
            self.hidden, self.following, self.pending = hidden, following, [1] * len(hidden)
            return
        width = self.hidden.shape[1] - 1
        self.hidden = torch.cat([self.hidden, torch.nn.functional.pad(hidden, (0, 0, 0, width))])
        self.following = torch.cat([self.following, torch.nn.functional.pad(following, (0, width))])
        self.pending += [1] * len(hidden)

    # Steps

    def _logits(self, hidden_states: Tensor) -> Tensor:
        logits = self.runner.head(hidden_states)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _decode(self) -> None:
        running = self.scheduler.running
        if self.sampler is None:
            self.sampler = self._make_sampler(running)
        sampler = self.sampler
        device = self.runner.device
        lengths = [s.length for s in running]
        counts = [min(self.depth, s.limit - s.length - 1) for s in running]
        depth = max(counts)
        uniforms = None if sampler.greedy else sampler.uniforms(depth)
        ends = torch.tensor(lengths, device=device)
        last = torch.tensor([[s.token_ids[-1]] for s in running], device=device)
        drafts = Drafts(last[:, :0], None)
        if depth:
            drafts = self._draft(ends, max(lengths), depth, sampler, uniforms)
        positions = ends[:, None] - 1 + torch.arange(depth + 1, device=device)
        hidden_states = self.runner.decode(
            torch.cat([last, drafts.tokens], dim=1),
            positions,
            live=max(lengths) + depth,
            uniform=min(lengths) == max(lengths),
        )
        judged = sampler.judge(self._logits(hidden_states), drafts, counts, uniforms)
        for row, s in enumerate(running):
            accepted = judged.accepted[row]
            emitted = slice(accepted + 1)
            taken = s.append(
                judged.token_lists[row][emitted], judged.log_probs[row][emitted], judged.raw_log_probs[row][emitted]
            )
            if counts[row]:
                # Drafts behind a token that ended the text were not needed: neither drafted nor accepted.
                s.count(counts[row] if taken > accepted else taken, min(accepted, taken))
        if self.depth:
            self.hidden, self.following = hidden_states, judged.tokens
            self.pending = [accepted + 1 for accepted in judged.accepted]

    def _draft(self, ends: Tensor, longest: int, depth: int, sampler: Sampler, uniforms: Tensor | None) -> Drafts:
        assert self.runner.drafter is not None and self.hidden is not None and self.following is not None
        width = max(self.pending)
        counts = torch.tensor(self.pending, device=self.runner.device)
        return self.runner.drafter.draft(
            self.hidden[:, :width],
            self.following[:, :width],
            positions=ends - 1 - counts,
            counts=counts,
            live=longest - 1,
            depth=depth,
            choose=partial(sampler.choose_draft, uniforms),
        )

    def _retire(self) -> Iterator[Running]:
        """Take finished sequences out and close the gaps that they leave."""
        order = {id(s): row for row, s in enumerate(self.scheduler.running)}
        finished, moves = self.scheduler.retire()
        if finished:
            assert self.runner.cache is not None
            for source, target in moves:
                self.runner.cache.copy_row(source, target, self.scheduler.running[target].length)
            self.sampler = None
            if self.depth and self.hidden is not None and self.following is not None:
                kept = [order[id(s)] for s in self.scheduler.running]
                self.hidden, self.following = self.hidden[kept], self.following[kept]
                self.pending = [self.pending[row] for row in kept]
        yield from finished
