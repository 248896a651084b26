"""`forerun.mtp.shift` against megatron-core's roll_tensor: rows, packed rows, and zig-zag shards over two ranks.

Megatron shifts labels once before the model and rolls ids, labels and loss mask once more per depth, each time zeroing
what the roll vacates; so its mask after k rolls is forerun's `valid` at depth k, and its ids and labels are forerun's
wherever that mask is set. Its count of a depth's tokens is the sum of that mask over what the process holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.mtp.context_parallel import ZigZagShard
from forerun.mtp.shift import depth_counts, depth_targets, document_ids_from_cu_seqlens
from tests.oracles.exchange import ask
from tests.oracles.megatron_layout import rows_for_megatron

pytestmark = pytest.mark.oracle
DEPTHS = 3


@dataclass(frozen=True)
class Case:
    """Rows of random tokens; `lengths` are those of the documents of one packed row, with padding after each."""

    rows: int = 1
    length: int = 0
    lengths: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    padded_boundaries: bool = False  # give Megatron the padded boundaries alone, and the padding by the mask
    supervised: float = 0.7  # share of the tokens that count
    context_parallel: int = 1

    @property
    def cu_seqlens(self) -> list[int]:
        return [0, *torch.tensor(self.lengths).cumsum(0).tolist()]

    @property
    def cu_seqlens_padded(self) -> list[int]:
        return [0, *(torch.tensor(self.lengths) + torch.tensor(self.padding)).cumsum(0).tolist()]

    def documents(self) -> Tensor:
        if not self.lengths:
            return torch.zeros(self.rows, self.length, dtype=torch.long)
        padded = self.cu_seqlens_padded if self.padding else self.cu_seqlens
        return document_ids_from_cu_seqlens(torch.tensor(self.cu_seqlens), padded[-1], torch.tensor(padded))

    def shards(self) -> list[Tensor]:
        """Places that each context-parallel rank holds: chunks r and 2n-1-r of every document."""
        places = []
        for rank in range(self.context_parallel):
            chosen = []
            for start, length in zip(self.cu_seqlens, self.lengths or (self.length,), strict=False):
                chunks = torch.arange(start, start + length).chunk(2 * self.context_parallel)
                chosen += [chunks[rank], chunks[2 * self.context_parallel - 1 - rank]]
            places.append(torch.cat(chosen))
        return places

    def tensors(self) -> dict[str, Tensor]:
        """Tokens, all different, and what the user wants learned."""
        documents = self.documents()
        generator = torch.Generator().manual_seed(documents.numel())
        ids = 1 + torch.randperm(documents.numel(), generator=generator).view_as(documents)
        return {"input_ids": ids, "loss_mask": torch.rand(ids.shape, generator=generator) < self.supervised}

    def for_megatron(self) -> dict[str, Tensor]:
        starts = (self.cu_seqlens_padded if self.padding else self.cu_seqlens)[: len(self.lengths)]
        documents = [(start, start + length) for start, length in zip(starts, self.lengths, strict=True)]
        return rows_for_megatron(**self.tensors(), documents=documents or [(0, self.length)])


CASES = {
    "one_row": Case(rows=1, length=9),
    "three_rows": Case(rows=3, length=8),
    "shorter_than_the_depths": Case(rows=2, length=2),
    "packed": Case(lengths=(5, 1, 2, 9, 3)),
    "one_document_packed": Case(lengths=(7,)),
    # Padding 2 after the first document and 3 after the last.
    "padded": Case(lengths=(3, 5, 6), padding=(2, 0, 3), supervised=1.0),
    "padded_boundaries": Case(lengths=(3, 5, 6), padding=(2, 0, 3), padded_boundaries=True),
    "zig_zag": Case(rows=2, length=16, context_parallel=2),
    "zig_zag_chunks_of_one": Case(rows=2, length=4, context_parallel=2),
    "zig_zag_packed": Case(lengths=(8, 4, 20), context_parallel=2),
}

SHARDS = [name for name, case in CASES.items() if case.context_parallel == 2]
# "padded" is where Megatron differs; it has a test of its own.
ROWS = [name for name in CASES if name not in (*SHARDS, "padded")]


@pytest.fixture(scope="module")
def rolled(megatron_env: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Megatron's answer to all cases: `case/field/depth`, and `case/field/depth/rank` for shards."""
    settings: dict[str, dict[str, object]] = {}
    given: dict[str, Tensor] = {}
    for name, case in CASES.items():
        settings[name] = {"depths": DEPTHS, "context_parallel": case.context_parallel}
        if case.padded_boundaries:
            settings[name]["cu_seqlens"] = case.cu_seqlens_padded
        elif case.lengths:
            settings[name]["cu_seqlens"] = case.cu_seqlens
            settings[name]["cu_seqlens_padded"] = case.padding and case.cu_seqlens_padded
        for field, tensor in case.for_megatron().items():
            if case.context_parallel == 1:
                given[f"{name}/{field}"] = tensor
            else:
                given |= {f"{name}/{field}/{r}": tensor[:, places] for r, places in enumerate(case.shards())}
    return ask(megatron_env, "megatron/rolls.py", tmp_path_factory.mktemp("rolls"), settings, given)


@pytest.mark.parametrize("name", ROWS)
def test_rows_and_packed_rows(rolled: dict[str, Tensor], name: str) -> None:
    case = CASES[name]
    own, documents = case.tensors(), case.documents()
    for depth in range(1, DEPTHS + 1):
        targets = depth_targets(own["input_ids"], documents, own["loss_mask"], depth)
        assert targets.valid.equal(rolled[f"{name}/loss_mask/{depth}"].bool())
        assert targets.input_ids[targets.valid].equal(rolled[f"{name}/input_ids/{depth}"][targets.valid])
        assert targets.labels[targets.valid].equal(rolled[f"{name}/labels/{depth}"][targets.valid])
        assert depth_counts(documents, own["loss_mask"], depth)[-1] == rolled[f"{name}/num_tokens/{depth}"]


@pytest.mark.parametrize("name", SHARDS)
def test_megatrons_shards_hold_what_the_whole_row_has_there(rolled: dict[str, Tensor], name: str) -> None:
    """The shift of the whole row, cut into shards, against Megatron's exchange between ranks."""
    case = CASES[name]
    own, documents = case.tensors(), case.documents()
    for depth in range(1, DEPTHS + 1):
        targets = depth_targets(own["input_ids"], documents, own["loss_mask"], depth)
        for rank, places in enumerate(case.shards()):
            valid = targets.valid[:, places]
            assert valid.equal(rolled[f"{name}/loss_mask/{depth}/{rank}"].bool())
            for field in ("input_ids", "labels"):
                expected = getattr(targets, field)[:, places]
                assert expected[valid].equal(rolled[f"{name}/{field}/{depth}/{rank}"][valid]), (field, depth, rank)
        # Per-rank counts: only their sum is the number that forerun divides by.
        counts = [int(rolled[f"{name}/num_tokens/{depth}/{rank}"]) for rank in range(2)]
        assert sum(counts) == depth_counts(documents, own["loss_mask"], depth)[-1]


def _own_shards(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {}
    for name in SHARDS:
        case = CASES[name]
        shard = ZigZagShard(case.lengths or (case.length,))
        own, documents = case.tensors(), case.documents()
        for depth in range(1, DEPTHS + 1):
            targets = depth_targets(
                shard.take(own["input_ids"]),
                shard.take(documents),
                shard.take(own["loss_mask"]),
                depth,
                look_ahead=shard.look_ahead,
            )
            fields = {"input_ids": targets.input_ids, "labels": targets.labels, "valid": targets.valid}
            found |= {f"{name}/{field}/{depth}/{rank}": tensor.contiguous() for field, tensor in fields.items()}
    save_file(found, Path(folder) / f"{rank}.safetensors")
    dist.destroy_process_group()


def test_our_shards_equal_megatrons(rolled: dict[str, Tensor], tmp_path: Path) -> None:
    """Both exchange boundary tokens over gloo, each in its own way, and hold the same."""
    mp.start_processes(_own_shards, (str(tmp_path),), nprocs=2, start_method="forkserver")
    own = load_file(tmp_path / "0.safetensors") | load_file(tmp_path / "1.safetensors")
    assert len(own) == 3 * DEPTHS * 2 * len(SHARDS)
    for name, valid in own.items():
        case, field, depth, rank = name.split("/")
        if field != "valid":
            continue
        assert valid.equal(rolled[f"{case}/loss_mask/{depth}/{rank}"].bool()), name
        for field in ("input_ids", "labels"):
            place = f"{case}/{field}/{depth}/{rank}"
            assert own[place][valid].equal(rolled[place][valid]), place


def test_what_vacated_places_hold(rolled: dict[str, Tensor]) -> None:
    """Megatron zeroes them, so they read token 0; forerun promises nothing there but that they are not valid."""
    ids = rolled["packed/input_ids/1"]
    last = torch.tensor(CASES["packed"].cu_seqlens[1:]) - 1
    assert (ids[0, last] == 0).all()
    own = CASES["packed"].tensors()
    assert not depth_targets(own["input_ids"], CASES["packed"].documents(), own["loss_mask"], 1).valid[0, last].any()


def reference_targets(case: Case, depth: int) -> dict[int, tuple[int, int]]:
    """Place -> (token read, token predicted), from each document by itself."""
    own = case.tensors()
    found = {}
    for start, length in zip(case.cu_seqlens_padded, case.lengths, strict=False):
        for i in range(start, start + length - depth - 1):
            if own["loss_mask"][0, i + depth + 1]:
                found[i] = (int(own["input_ids"][0, i + depth]), int(own["input_ids"][0, i + depth + 1]))
    return found


@pytest.mark.parametrize("depth", [1, 2])
def test_padding_inside_a_packed_row_is_where_we_differ(rolled: dict[str, Tensor], depth: int) -> None:
    """megatron-core 0.16.1 rolls between cu_seqlens_q and never looks at cu_seqlens_q_padded.

    With padding after documents those boundaries lie inside later documents, where targets get lost, and what stands
    past the last one is not rolled at all: it keeps a target that is `depth` tokens too near. forerun's targets are
    those of each document taken by itself; Megatron's are too once the padded boundaries are given as cu_seqlens_q (the
    case "padded_boundaries" above).
    """
    case = CASES["padded"]
    expected = reference_targets(case, depth)
    own = case.tensors()
    ours = depth_targets(own["input_ids"], case.documents(), own["loss_mask"], depth)
    assert as_targets(ours.valid, ours.input_ids, ours.labels) == expected

    theirs = as_targets(*(rolled[f"padded/{field}/{depth}"] for field in ("loss_mask", "input_ids", "labels")))
    inside, end = case.cu_seqlens[2] - depth, case.cu_seqlens[-1]
    assert inside in expected and inside not in theirs
    unrolled = as_targets(*(case.for_megatron()[field] for field in ("loss_mask", "input_ids", "labels")))
    assert {i: t for i, t in theirs.items() if i >= end} == {i: t for i, t in unrolled.items() if i >= end} != {}


def as_targets(valid: Tensor, read: Tensor, predicted: Tensor) -> dict[int, tuple[int, int]]:
    """Place -> (token read, token predicted) of a row [1, S], where `valid` is set."""
    return {i: (int(read[0, i]), int(predicted[0, i])) for i in valid[0].nonzero()[:, 0].tolist()}
