"""One call of `generate`, step by step: admit and prefill, draft, verify, retire."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.mtp.config import AcceptanceRule
from forerun.rollout.native.model import ModelRunner
from forerun.rollout.native.sampler import Sampler
from forerun.rollout.native.scheduler import PromptEnd, Running, Scheduler
from forerun.speculative.drafter import Drafts

_CAPACITY_STEP = 64


class Run:
    """The rows in flight, and the trunk's hiddens that the drafter has not seen yet.

    Args:
        runner: the model.
        sequences: what to run, in the order of admission.
        rule: acceptance rule.
        depth: drafts per row and step, 0 for none.
        max_rows: sequences that run at once.
        prefill_chunk_size: prompt tokens per forward.
        take_aborted: hands over the ids of the requests that were aborted since it was last called.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sequences: Sequence[Running],
        *,
        rule: AcceptanceRule,
        depth: int,
        max_rows: int,
        prefill_chunk_size: int,
        take_aborted: Callable[[], set[str]],
    ) -> None:
        self.runner = runner
        self.rule = rule
        self.take_aborted = take_aborted
        self.chunk = prefill_chunk_size
        self.depth = depth
        rows = min(max_rows, len(sequences))
        self.scheduler = Scheduler(sequences, rows)
        # Rows near their end are padded to the deepest row's drafts, so positions can pass the limit by `depth`.
        capacity = max(s.limit for s in sequences) + depth
        capacity = -(-capacity // _CAPACITY_STEP) * _CAPACITY_STEP
        cache = self.runner.cache
        if cache is None or cache.rows < rows or cache.capacity < capacity:
            self.runner.release()
            self.runner.allocate(rows, capacity)
        self.runner.tune()
        # Pending for the drafter: hiddens [R, T, d], the token after each [R, T], how many are a row's own.
        self.hidden: Tensor | None = None
        self.following: Tensor | None = None
        self.pending: list[int] = []
        self.sampler: Sampler | None = None

    def finished(self) -> Iterator[Running]:
        """Run to the end; yields sequences as they finish."""
        while self.scheduler.unfinished:
            yield from self._abort()
            new_rows = self.scheduler.admit()
            if new_rows:
                self._prefill(new_rows)
                yield from self._retire()
            if self.scheduler.running:
                self._decode()
                yield from self._retire()

    def _abort(self) -> Iterator[Running]:
        wanted = self.take_aborted()
        if wanted:
            yield from self.scheduler.abort(wanted)
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
        for source, row in followers:
            self.runner.copy_row(source, row, len(running[row].prompt))
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
        self.hidden = torch.cat([self.hidden, F.pad(hidden, (0, 0, 0, width))])
        self.following = torch.cat([self.following, F.pad(following, (0, width))])
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
        self.runner.commit([accepted + 1 for accepted in judged.accepted])
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
            for source, target in moves:
                self.runner.copy_row(source, target, self.scheduler.running[target].length)
            self.sampler = None
            if self.depth and self.hidden is not None and self.following is not None:
                kept = [order[id(s)] for s in self.scheduler.running]
                self.hidden, self.following = self.hidden[kept], self.following[kept]
                self.pending = [self.pending[row] for row in kept]
        yield from finished
