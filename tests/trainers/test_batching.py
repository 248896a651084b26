"""Rows that are made when they are asked for are those that packing makes."""

from __future__ import annotations

import weakref

import pytest

from forerun.data.batch import Batch
from forerun.data.packing import Document, pack
from forerun.errors import UsageError
from forerun.trainers.batching import Rows

DOCUMENTS = [Document(range(10 * n, 10 * n + n), [i % 2 for i in range(n)]).compact() for n in (5, 2, 9, 1, 4, 4)]


def equal(ours: Batch, theirs: Batch) -> bool:
    fields = ("input_ids", "position_ids", "document_ids", "loss_mask")
    return all(getattr(ours, name).equal(getattr(theirs, name)) for name in fields)


@pytest.mark.parametrize("packing", [True, False])
def test_rows_are_those_that_packing_makes(packing: bool) -> None:
    rows = Rows(DOCUMENTS, 10, packing)
    packed = pack(DOCUMENTS, 10, micro_batch_size=1, layout="packed" if packing else "padded")
    assert len(rows) == len(packed) and (len(packed) < len(DOCUMENTS)) == packing
    for found in (list(rows), rows[:], [rows[i] for i in range(len(rows))], rows[::-1][::-1]):
        assert all(equal(ours, theirs) for ours, theirs in zip(found, packed, strict=True))
    assert equal(rows[-1], packed[-1])
    with pytest.raises(IndexError):
        rows[len(packed)]


def test_no_row_is_kept() -> None:
    rows = Rows(DOCUMENTS, 10, packing=True)
    made = weakref.ref(rows[0])
    assert made() is None and equal(rows[0], rows[0])


def test_what_cannot_be_packed_is_said_at_once() -> None:
    with pytest.raises(UsageError, match="document 2 has 9 tokens, more than max_length=8"):
        Rows(DOCUMENTS, 8, packing=True)
