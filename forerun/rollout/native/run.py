"""One call of `generate`, step by step: admit, prefill a chunk, draft, verify, retire."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from forerun.mtp.config import AcceptanceRule
from forerun.rollout.native.hiddens import PendingHiddens
from forerun.rollout.native.memory import grown
from forerun.rollout.native.model import ModelRunner
from forerun.rollout.native.prefill import Prefill, logits_of
from forerun.rollout.native.sampler import Judged, Sampler, draw_uniforms
from forerun.rollout.native.scheduler import Scheduler
from forerun.rollout.native.sequence import Running
from forerun.rollout.protocol import SpeculationTotals
from forerun.speculative.depth_control import DepthControl
from forerun.speculative.drafter import Drafts


class Run:
    """The rows in flight.

    Args:
        runner: the model.
        rule: acceptance rule.
        control: chooses the drafts per row and step.
        max_depth: most of them; 0 for no drafting at all.
        max_rows: sequences that run at once.
        max_tokens: positions that the cache may have, all rows together.
        overhead: what a row takes besides, in positions.
        prefill_chunk_size: prompt tokens per step.
        totals: counts what is drafted.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        rule: AcceptanceRule,
        control: DepthControl,
        max_depth: int,
        max_rows: int,
        max_tokens: int,
        overhead: int,
        prefill_chunk_size: int,
        totals: SpeculationTotals,
    ) -> None:
        self.runner = runner
        self.rule = rule
        self.control = control
        self.max_depth = max_depth
        self.totals = totals
        # Rows near their end are padded to the deepest row's drafts, so positions can pass the limit by `max_depth`.
        self.scheduler = Scheduler(max_rows, max_tokens, max_depth, overhead)
        self.prefill = Prefill(runner, self.scheduler, prefill_chunk_size, drafts=max_depth > 0)
        self.pending = PendingHiddens(runner, prefill_chunk_size) if max_depth else None
        self.sampler: Sampler | None = None
        self.drafting = max_depth > 0  # as of the last step: whether prompts had better be fed to the drafter at once
        self._asked: deque[Running | str] = deque()  # one to add or the id of one to abort, in the order of the calls
        self.runner.tune()

    def add(self, sequences: Iterable[Running]) -> None:
        """Let these wait from the next step on, behind those that wait already. For any thread."""
        self._asked.extend(sequences)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these at the next step. For any thread."""
        self._asked.extend(request_ids)

    def step(self, weight_version: int) -> list[Running]:
        """One step of every row; returns the sequences that finished."""
        finished: list[Running] = []
        if self._asked:
            for asked in [self._asked.popleft() for _ in range(len(self._asked))]:
                if isinstance(asked, Running):
                    self.scheduler.waiting.append(asked)
                else:
                    finished += self.scheduler.abort({asked})
            finished += self._retire()
        self._admit()
        if self.scheduler.prefilling:
            self._prefill(weight_version)
            finished += self._retire()
        if self.scheduler.decoding:
            self._decode(weight_version)
            finished += self._retire()
        return finished

    def _admit(self) -> None:
        first = len(self.scheduler.prefilling)
        self.scheduler.admit()
        for s in self.scheduler.prefilling[first:]:
            # A step looks up to `max_depth` positions past the last one that a row may fill.
            count = s.limit - len(s.prompt) + self.max_depth + 1
            s.uniforms = draw_uniforms(s.request.sampling, s.seed, count)

    def _reserve(self, needed: int) -> None:
        """Have room for `needed` positions in every row."""
        scheduler, cache = self.scheduler, self.runner.cache
        if cache is not None and cache.rows >= scheduler.rows and cache.capacity >= needed:
            return
        size = (0, 0) if cache is None else (cache.rows, cache.capacity)
        wanted = grown(
            size,
            scheduler.rows,
            needed,
            scheduler.longest,
            scheduler.expected_rows,
            scheduler.max_tokens,
            scheduler.overhead,
        )
        if any(s.prefilled for s in (*scheduler.decoding, *scheduler.prefilling)):
            self.runner.resize(*wanted)
        else:
            self.runner.allocate(*wanted)

    def _make_sampler(self, rows: Sequence[Running]) -> Sampler:
        runner = self.runner
        return Sampler(rows, self.rule, runner.vocab_size, runner.draft_vocabulary, runner.device)

    def _prefill(self, weight_version: int) -> None:
        """Take prompts a chunk further, and sample the first tokens of those that are whole."""
        before = list(self.scheduler.decoding)
        pieces = self.prefill.plan(weight_version)
        self._reserve(max((piece.start + piece.length for piece in pieces), default=0))
        new = self.prefill.step(pieces, self.drafting, weight_version)
        ends = [s.prompt_end for s in new if s.prompt_end is not None]
        if not ends:
            return
        sampler = self._make_sampler(new)
        none = Drafts(torch.empty(len(new), 0, dtype=torch.long, device=self.runner.device), None)
        logits = torch.stack([end.logits for end in ends])[:, None]
        judged = sampler.judge(logits, none, [0] * len(new), None if sampler.greedy else sampler.uniforms(0))
        self._append(new, judged, [0] * len(new), weight_version)
        self.sampler = None
        if self.pending is not None:
            self.pending.join(before, torch.stack([end.hidden for end in ends])[:, None], judged.tokens)

    def _decode(self, weight_version: int) -> None:
        running = self.scheduler.decoding
        wanted = min(self.control.depth(len(running)), self.max_depth) if self.max_depth else 0
        counts = [min(wanted, s.limit - s.length - 1) for s in running]
        depth = max(counts)
        longest = max(s.length for s in running)
        self._reserve(longest + depth)
        self.drafting = wanted > 0
        if self.pending is not None:
            if depth:
                self.pending.feed(running)
            else:
                self.pending.put_off(running)

        started = time.perf_counter()
        if self.sampler is None:
            self.sampler = self._make_sampler(running)
        sampler = self.sampler
        device = self.runner.device
        lengths = [s.length for s in running]
        uniforms = None if sampler.greedy else sampler.uniforms(depth)
        ends, asked = torch.tensor([lengths, counts], device=device)  # before there is work to wait for
        last = torch.tensor([[s.token_ids[-1]] for s in running], device=device)
        drafts = Drafts(last[:, :0], None)
        if depth:
            drafts = self._draft(ends, longest, depth, sampler, uniforms)
        positions = ends[:, None] - 1 + torch.arange(depth + 1, device=device)
        hidden_states = self.runner.decode(
            torch.cat([last, drafts.tokens], dim=1),
            positions,
            live=longest + depth,
            uniform=min(lengths) == longest,
        )
        judged = sampler.judge(logits_of(self.runner, hidden_states), drafts, asked, uniforms)
        kept = [accepted + 1 for accepted in judged.accepted]
        self.runner.commit(kept)
        drafted, accepted = self._append(running, judged, counts, weight_version)
        if self.pending is not None:
            self.pending.hidden, self.pending.following, self.pending.counts = hidden_states, judged.tokens, kept
        self.control.observe(len(running), depth, time.perf_counter() - started, drafted, accepted)

    def _draft(self, ends: Tensor, longest: int, depth: int, sampler: Sampler, uniforms: Tensor | None) -> Drafts:
        assert self.runner.drafter is not None and self.pending is not None
        width = max(self.pending.counts)
        counts = torch.tensor(self.pending.counts, device=self.runner.device)
        return self.runner.drafter.draft(
            self.pending.hidden[:, :width],
            self.pending.following[:, :width],
            positions=ends - 1 - counts,
            counts=counts,
            live=longest - 1,
            depth=depth,
            choose=partial(sampler.choose_draft, uniforms),
        )

    def _append(
        self, running: Sequence[Running], judged: Judged, counts: Sequence[int], weight_version: int
    ) -> tuple[list[int], list[int]]:
        """Give every row its tokens. Returns the drafts judged at each depth over all rows, and those accepted."""
        drafted, accepted = [0] * max(counts), [0] * max(counts)
        for row, (s, count) in enumerate(zip(running, counts, strict=True)):
            kept = judged.accepted[row]
            emitted = slice(kept + 1)
            taken = s.append(
                judged.token_lists[row][emitted],
                judged.log_probs[row][emitted],
                judged.raw_log_probs[row][emitted],
                weight_version,
                kept,
            )
            if count:
                # Drafts behind a token that ended the text were not needed: neither drafted nor accepted.
                needed = count if taken > kept else taken
                s.count(needed, min(kept, taken))
                self.totals.num_verify_steps += 1
                for depth in range(needed):
                    drafted[depth] += 1
                    accepted[depth] += depth < kept
        self.totals.num_draft_tokens += sum(drafted)
        self.totals.num_accepted_tokens += sum(accepted)
        per_depth = self.totals.accepted_per_depth
        per_depth.extend([0] * (len(accepted) - len(per_depth)))
        for depth, number in enumerate(accepted):
            per_depth[depth] += number
        return drafted, accepted

    def _retire(self) -> list[Running]:
        """Take finished sequences out and close the gaps that they leave."""
        if all(s.finish_reason is None for s in (*self.scheduler.decoding, *self.scheduler.prefilling)):
            return []
        running = list(self.scheduler.decoding)
        retired = self.scheduler.retire()
        for move in retired.moves:
            self.runner.copy_row(*move)
        if len(retired.kept) < len(running):
            self.sampler = None
            if self.pending is not None:
                self.pending.keep(running, retired.kept)
        return retired.finished
