"""Requests that come, wait, share, pause, end early and are aborted: no text changes, and nothing is lost."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch

from forerun.errors import ForerunError, UsageError
from forerun.models.carrier import MTPCarrier, named_weights
from forerun.rollout.native.memory import grown
from forerun.rollout.native.model import ModelRunner
from forerun.rollout.native.run import Run
from forerun.rollout.protocol import Completion, Request, SamplingParams
from forerun.speculative.depth_control import AdaptiveDepth
from tests.rollout import tiny
from tests.rollout.reference import SETTINGS, written
from tests.rollout.tiny import engine_of


@pytest.fixture(scope="module")
def model() -> MTPCarrier:
    return tiny.carrier()


def greedy(prompts: Sequence[list[int]], lengths: Sequence[int]) -> list[Request]:
    return [
        Request(f"r{n}", prompt, SamplingParams(max_tokens=length, temperature=0))
        for n, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]


class Schedule:
    """Depths in turn; remembers what it was told."""

    def __init__(self, depths: Sequence[int]) -> None:
        self._depths = list(depths)
        self.asked = 0
        self.told: list[tuple[int, int, list[int], list[int]]] = []

    def depth(self, rows: int) -> int:
        self.asked += 1
        return self._depths[(self.asked - 1) % len(self._depths)]

    def observe(self, rows: int, depth: int, seconds: float, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        assert seconds > 0
        self.told.append((rows, depth, list(drafted), list(accepted)))


Drafted = dict[tuple[str, int], list[int]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Drafted:
    """Drafts by request and length of its text."""
    seen: Drafted = {}
    draft = Run._draft

    def record(self: Run, *args: object) -> object:
        drafts = draft(self, *args)  # type: ignore[arg-type]
        for s, tokens in zip(self.scheduler.decoding, drafts.tokens.tolist(), strict=True):
            seen[s.request.request_id, s.length] = tokens
        return drafts

    monkeypatch.setattr(Run, "_draft", record)
    return seen


# Depth


def compare(drafted: Drafted, others: Drafted) -> int:
    """Drafts after the same text agree as deep as both go; returns how many were compared."""
    common = drafted.keys() & others.keys()
    for key in common:
        pairs = list(zip(drafted[key], others[key], strict=False))
        assert all(ours == theirs for ours, theirs in pairs), key
    return len(common)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("chunk", [3, 512])
def test_drafts_after_a_pause_are_those_without_one(recorded: Drafted, chunk: int, layers: int) -> None:
    """Rows come, end and move during the pauses; prompts are cut so that a pause may fall into one."""
    model = tiny.carrier(layers=layers)
    rows = tiny.prompts(9)
    wanted = greedy(rows, [17, 4, 30, 9, 21, 1, 12, 25, 6])
    engine = engine_of(model, num_speculative_tokens=3, max_num_seqs=4, prefill_chunk_size=chunk)
    texts = [c.token_ids for c in engine.generate(wanted)]
    never_paused = dict(recorded)
    assert never_paused
    for depths in ([0, 0, 0, 3], [2, 0], [0] * 11 + [1, 3, 2], [3, 3, 0, 0, 0, 0, 1]):
        recorded.clear()
        engine.depth_control = control = Schedule(depths)
        completions = engine.generate(wanted)
        assert [c.token_ids for c in completions] == texts
        assert compare(recorded, never_paused) > 3
        assert control.asked == len(control.told)
        assert {depth for _, depth, _, _ in control.told} >= {0, max(depths)}


def test_a_prompt_copied_during_a_pause_is_fed_afterwards(recorded: Drafted, model: MTPCarrier) -> None:
    prompt = [5, 9, 2, 44, 17]
    # The third comes when the second has ended, the fourth when the first has: both in the pause.
    wanted = greedy([[1, 2], [3], prompt, prompt], [5, 2, 25, 20])
    engine = engine_of(model, num_speculative_tokens=3, max_num_seqs=2)
    engine.generate(wanted)
    never_paused = dict(recorded)
    recorded.clear()
    engine.depth_control = Schedule([*[0] * 9, *[3] * 99])
    engine.generate(wanted)
    assert {name for name, _ in recorded} == {"r2", "r3"}
    assert compare(recorded, never_paused) > 3


def test_drafts_do_not_depend_on_how_many_follow(recorded: Drafted, model: MTPCarrier) -> None:
    wanted = greedy(tiny.prompts(5), [20] * 5)
    engine = engine_of(model, num_speculative_tokens=1)
    engine.generate(wanted)
    single = dict(recorded)
    for engine.num_speculative_tokens in (2, 4):
        recorded.clear()
        engine.generate(wanted)
        assert compare(recorded, single) > 20


def test_a_paused_drafter_costs_nothing(monkeypatch: pytest.MonkeyPatch, model: MTPCarrier) -> None:
    """Plain steps and prompts that come meanwhile run no MTP layer."""
    engine = engine_of(model, num_speculative_tokens=2, max_num_seqs=2)
    engine.depth_control = Schedule([0])
    calls: list[int] = []
    assert engine.runner.block is not None
    step = engine.runner.block.step
    monkeypatch.setattr(engine.runner.block, "step", lambda *a, **kw: (calls.append(1), step(*a, **kw))[1])
    completions = engine.generate(greedy(tiny.prompts(5), [5, 9, 4, 7, 8]))
    assert len(calls) <= 1  # the first prompts, before the control was asked
    assert all(c.drafted_per_depth == [0, 0] and c.spec_num_verify_steps == 0 for c in completions)


def test_counts_of_steps_completions_and_totals_agree(model: MTPCarrier) -> None:
    control = Schedule([3, 0, 1, 2])
    engine = engine_of(model, num_speculative_tokens=3, depth_control=control, acceptance="match")
    drafted, accepted, verified = [0] * 3, [0] * 3, 0
    for seed in range(2):
        stop = tuple(range(0, tiny.VOCAB, 11))
        for c in engine.generate(tiny.requests(tiny.prompts(6), max_tokens=15, seed=seed, stop_token_ids=stop)):
            drafted = [a + b for a, b in zip(drafted, c.drafted_per_depth or [], strict=True)]
            accepted = [a + b for a, b in zip(accepted, c.accepted_per_depth or [], strict=True)]
            verified += c.spec_num_verify_steps or 0
    totals = engine.speculation_totals()
    assert (totals.num_draft_tokens, totals.num_accepted_tokens) == (sum(drafted), sum(accepted))
    assert (totals.num_verify_steps, totals.accepted_per_depth) == (verified, accepted)
    told = [0] * 3
    for _, depth, judged, kept in control.told:
        assert len(judged) == len(kept) == depth
        told = [a + b for a, b in zip(told, [*judged, 0, 0, 0], strict=False)]
    assert told == drafted and sum(accepted) > 0
    totals.accepted_per_depth[0] = 10**6  # the caller's own
    assert engine.speculation_totals().accepted_per_depth == accepted


def test_auto_depth_learns_across_calls_and_changes_no_text(model: MTPCarrier) -> None:
    rows = tiny.prompts(4)
    wanted = greedy(rows, [30] * 4)
    engine = engine_of(model, num_speculative_tokens=3, depth_control="auto")
    for _ in range(2):
        completions = engine.generate(wanted)
        assert [c.token_ids for c in completions] == [tiny.generated(model, row, 30) for row in rows]
    assert isinstance(engine._adaptive, AdaptiveDepth)
    first = engine._adaptive
    engine.generate(wanted)
    assert engine._adaptive is first
    engine.num_speculative_tokens = 1
    engine.generate(wanted)
    assert engine._adaptive.max_depth == 1


# Prompts


def test_a_long_prompt_does_not_hold_up_the_rows_that_run(model: MTPCarrier) -> None:
    prompts = [[3, 4], [n % tiny.VOCAB for n in range(40)]]
    log: list[str] = []
    for k in (0, 2):
        engine = engine_of(model, prefill_chunk_size=5, num_speculative_tokens=k)
        completions = engine.generate(
            greedy(prompts, [30, 5]), on_tokens=lambda name, tokens: log.extend([name] * len(tokens))
        )
        expected = [tiny.generated(model, prompts[0], 30), tiny.generated(model, prompts[1], 5)]
        assert [c.token_ids for c in completions] == expected
        # The first chunk holds the short prompt and 3 tokens of the long one, whose other 37 take 8 steps more.
        assert log.index("r1") >= 9
        assert log.count("r0") == 30 and log.count("r1") == 5
        log.clear()


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of every prefill forward."""
    counts: list[int] = []
    prefill = ModelRunner.prefill

    def count(self: ModelRunner, tokens: torch.Tensor, *args: object) -> object:
        counts.append(tokens.shape[1])
        return prefill(self, tokens, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "prefill", count)
    return counts


@pytest.mark.parametrize("depths", [[2], [0], [0, 0, 2]])
def test_samples_of_one_prompt_prefill_it_once(model: MTPCarrier, prefilled: list[int], depths: list[int]) -> None:
    """Also those that are admitted later, while one that holds it still runs."""
    prompt = [5, 9, 2, 44, 17]
    lengths = [12, 3, 12, 4, 9, 12]
    engine = engine_of(model, max_num_seqs=2, num_speculative_tokens=2, depth_control=Schedule(depths))
    prefilled.clear()
    whole = tiny.generated(model, prompt, 12)
    completions = engine.generate(greedy([prompt] * 6, lengths))
    assert [c.token_ids for c in completions] == [whole[:length] for length in lengths]
    assert sum(prefilled) == len(prompt)
    assert max(prefilled) <= engine.prefill_chunk_size


def test_a_chunk_holds_no_more_than_its_size(model: MTPCarrier, prefilled: list[int]) -> None:
    engine = engine_of(model, prefill_chunk_size=7, max_num_seqs=4)
    rows = tiny.prompts(9)
    prefilled.clear()
    engine.generate(greedy(rows, [6] * 9))
    assert max(prefilled) == 7


# Memory


def test_the_cache_grows_on_demand_within_its_bound(monkeypatch: pytest.MonkeyPatch, model: MTPCarrier) -> None:
    sizes: list[tuple[int, int]] = []
    for name in ("allocate", "resize"):
        make = getattr(ModelRunner, name)

        def noted(self: ModelRunner, rows: int, capacity: int, make: Callable[..., None] = make) -> None:
            sizes.append((rows, capacity))
            make(self, rows, capacity)

        monkeypatch.setattr(ModelRunner, name, noted)
    monkeypatch.setattr("forerun.rollout.native.memory._ROUND", 4)
    rows = tiny.prompts(8)
    lengths = [70, 5, 5, 30, 5, 40, 5, 8]
    engine = engine_of(model, num_speculative_tokens=2, max_num_seqs=6)
    plain = [c.token_ids for c in engine.generate(greedy(rows, lengths))]
    engine = engine_of(model, num_speculative_tokens=2, max_num_seqs=6)
    bound = 200
    engine.kv_cache_memory_bytes = bound * engine.runner.bytes_per_token
    sizes.clear()
    most = 0

    def watch(name: str, tokens: list[int]) -> None:
        nonlocal most
        if name == "r0" and engine._call is not None:
            most = max(most, engine._call.run.scheduler.rows)

    completions = engine.generate(greedy(rows, lengths), on_tokens=watch)
    assert [c.token_ids for c in completions] == plain
    assert plain[0] == tiny.generated(model, rows[0], 70)
    assert all(held * capacity <= bound for held, capacity in sizes)
    assert len(sizes) > 2  # it grew
    assert most == 2  # the first needs more than 70 positions, and so every row beside it
    long = [Request("long", [1] * 10, SamplingParams(max_tokens=80))]
    engine.kv_cache_memory_bytes = 60 * engine.runner.bytes_per_token
    finished: list[Completion] = []
    with pytest.raises(UsageError, match="'long' can grow to 90 tokens, and the key-value cache holds 58"):
        engine.generate([*greedy([[1]], [4]), *long], on_finish=finished.append)
    assert not finished


def test_sizes_of_the_cache() -> None:
    rng = random.Random(0)
    for _ in range(300):
        rows, longest = rng.randint(1, 9), rng.randint(2, 900)
        max_rows = rows + rng.randint(0, 4)
        overhead = rng.choice([0, 100])
        bound = rows * (longest + overhead) + rng.randint(0, 3000)
        size = (rng.randint(0, 9), rng.randint(0, 900))
        needed = rng.randint(1, longest)
        if size[0] >= rows and size[1] >= needed:
            continue
        made = grown(size, rows, needed, longest, max_rows, bound, overhead)
        assert made[0] >= rows and made[1] >= needed
        assert made[0] * (made[1] + overhead) <= bound


# Ends


def test_abort_from_on_finish_and_from_another_thread(model: MTPCarrier) -> None:
    rows = tiny.prompts(7)
    wanted = greedy(rows, [4, 40, 40, 40, 40, 40, 6])
    engine = engine_of(model, num_speculative_tokens=2, max_num_seqs=3)
    whole = [tiny.generated(model, row, r.sampling.max_tokens) for row, r in zip(rows, wanted, strict=True)]
    seen: list[str] = []

    def on_finish(completion: Completion) -> None:
        seen.append(completion.request_id)
        if completion.request_id == "r0":  # r1, r2 run, the others wait
            other = threading.Thread(target=engine.abort, args=(["r1", "r4", "r0", "nobody"],))
            other.start()
            other.join()
        if completion.request_id == "r1":
            engine.abort(["r5"])

    completions = engine.generate(wanted, on_finish)
    assert sorted(seen) == [r.request_id for r in wanted]
    reasons = {c.request_id: c.finish_reason for c in completions}
    assert {name for name, reason in reasons.items() if reason == "abort"} == {"r1", "r4", "r5"}
    for completion, text in zip(completions, whole, strict=True):
        count = len(completion.token_ids)
        assert completion.token_ids == text[:count]
        assert len(completion.log_probs) == len(completion.weight_versions) == count
        if completion.finish_reason == "length":
            assert completion.token_ids == text
    assert 0 < len(completions[1].token_ids) < 40 and completions[4].token_ids == []
    engine.abort(["r1"])  # of no running request: passed over
    assert [c.token_ids for c in engine.generate(wanted)] == whole


def test_an_error_in_on_finish_leaves_a_usable_engine(model: MTPCarrier) -> None:
    wanted = greedy(tiny.prompts(5), [3, 9, 12, 4, 8])
    engine = engine_of(model, num_speculative_tokens=2, max_num_seqs=3)
    expected = [c.token_ids for c in engine.generate(wanted)]

    def failing(completion: Completion) -> None:
        raise RuntimeError("the caller's")

    with pytest.raises(RuntimeError, match="the caller's"):
        engine.generate(wanted, failing)
    engine.sleep()
    engine.wake()
    assert [c.token_ids for c in engine.generate(wanted)] == expected


def test_what_may_not_happen_during_generate_is_refused(model: MTPCarrier) -> None:
    engine = engine_of(model)
    refused: list[str] = []

    def on_finish(completion: Completion) -> None:
        for call in (lambda: engine.generate(greedy([[1]], [2])), engine.sleep, engine.close):
            with pytest.raises(ForerunError, match="is generating") as error:
                call()
            refused.append(str(error.value))

    engine.generate(greedy([[1, 2]], [3]), on_finish)
    assert len(refused) == 3
    assert len(engine.generate(greedy([[1, 2]], [3]))) == 1


def test_a_weight_update_between_steps_shows_in_the_versions(model: MTPCarrier) -> None:
    """Tokens carry the version that sampled them, and a prompt that older weights computed is not shared."""
    other = tiny.carrier()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    prompt = [5, 6, 7]
    assert tiny.generated(other, prompt, 5)[0] != tiny.generated(model, prompt, 5)[0]
    engine = engine_of(model, num_speculative_tokens=1, max_num_seqs=2)

    def on_finish(completion: Completion) -> None:
        if completion.request_id == "r0":
            engine.update_weights(named_weights(other), 7)

    first, second, third = engine.generate(greedy([prompt] * 3, [4, 20, 5]), on_finish)
    assert first.weight_versions == [0] * 4
    switch = second.weight_versions.index(7)
    assert second.weight_versions == [0] * switch + [7] * (20 - switch) and 3 < switch < 8
    assert second.token_ids[:switch] == tiny.generated(model, prompt, switch)
    assert third.weight_versions == [7] * 5
    assert third.token_ids == tiny.generated(other, prompt, 5)


# Everything at once


@pytest.mark.parametrize("case", range(8))
def test_any_mix_of_requests_settings_depths_and_aborts(model: MTPCarrier, case: int) -> None:
    rng = random.Random(case)
    pool = [[rng.randrange(tiny.VOCAB) for _ in range(rng.choice([1, 2, 5, 11, 23]))] for _ in range(4)]
    wanted = []
    for n in range(rng.randint(3, 10)):
        own = rng.choice(list(SETTINGS.values()))
        sampling = {"max_tokens": rng.randint(1, 18), "temperature": rng.choice([0.0, 0.0, 1.0]), "seed": n, **own}
        sampling["min_tokens"] = min(sampling.get("min_tokens", 0), sampling["max_tokens"])  # type: ignore[type-var, call-overload]
        wanted.append(Request(f"r{n}", rng.choice(pool), SamplingParams(**sampling)))  # type: ignore[arg-type]
    engine = engine_of(
        model,
        acceptance="match",
        num_speculative_tokens=3,
        max_num_seqs=rng.randint(1, 5),
        prefill_chunk_size=rng.choice([1, 4, 9, 512]),
        depth_control=Schedule([rng.randint(0, 3) for _ in range(9)]),
        draft_vocabulary=rng.choice([None, torch.arange(0, tiny.VOCAB, 2)]),
    )
    engine.kv_cache_memory_bytes = rng.choice([45, 100, 1000]) * engine.runner.bytes_per_token
    doomed = {name: rng.randint(1, 9) for name in rng.sample([r.request_id for r in wanted], rng.randint(0, 2))}
    heard: dict[str, list[int]] = {r.request_id: [] for r in wanted}

    def on_tokens(name: str, tokens: list[int]) -> None:
        heard[name] += tokens
        engine.abort(other for other, after in doomed.items() if len(heard[name]) >= after)

    completions = engine.generate(wanted, on_tokens=on_tokens)
    assert [c.request_id for c in completions] == [r.request_id for r in wanted]
    for request, completion in zip(wanted, completions, strict=True):
        expected = written(model, request)
        count = len(completion.token_ids)
        assert completion.token_ids == heard[request.request_id] == expected.token_ids[:count]
        assert completion.log_probs == pytest.approx(expected.log_probs[:count], abs=3e-5)
        assert count == len(expected.token_ids) or completion.finish_reason == "abort"
        assert completion.finish_reason != "abort" or request.request_id in doomed


def test_of_calls_from_several_threads_one_runs(model: MTPCarrier) -> None:
    """The others are told so at once, wherever the first one is; what it writes does not change."""
    engine = engine_of(model, num_speculative_tokens=2)
    wanted = greedy([[1, 2, 3], [4, 5], [6]], [24, 24, 24])
    whole = [completion.token_ids for completion in engine.generate(wanted)]
    begin, threads = Run.__init__, 4
    together = threading.Barrier(threads)
    texts: list[list[list[int]]] = []
    refused: list[str] = []

    def call() -> None:
        together.wait()
        try:
            texts.append([completion.token_ids for completion in engine.generate(wanted)])
        except ForerunError as error:
            refused.append(str(error))

    def slowly(self: Run, *args: object, **settings: object) -> None:
        time.sleep(0.05)  # so that all are in generate before one has begun
        begin(self, *args, **settings)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "__init__", slowly)
        callers = [threading.Thread(target=call) for _ in range(threads)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert texts and all(text == whole for text in texts)
    assert len(texts) + len(refused) == threads and all("is generating" in words for words in refused)
    assert [completion.token_ids for completion in engine.generate(wanted)] == whole
