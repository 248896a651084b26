"""Packing: every token once, in order, with what belongs to it; and the order of data."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.data.order import DataOrder, permutation
from forerun.data.packing import Document, best_fit, pack
from forerun.errors import ForerunError, UsageError

MAX_LENGTH = 12


@st.composite
def document_lists(draw):
    lengths = draw(st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=30))
    documents, token = [], 1000
    for length in lengths:
        ids = list(range(token, token + length))  # every token of the list is its own
        token += length
        mask = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        document = Document(ids, mask, {"value": [i / 8 for i in ids], "version": torch.tensor(ids) * 3})
        documents.append(document.compact() if draw(st.booleans()) else document)
    return documents


@settings(max_examples=60, deadline=None)
@given(document_lists(), st.integers(1, 5), st.sampled_from(["packed", "padded"]), st.sampled_from([1, 4, 8]))
def test_every_token_once_in_order_with_its_extras(documents, micro_batch_size, layout, multiple):
    batches = pack(documents, MAX_LENGTH, micro_batch_size, layout, pad_token_id=7, pad_to_multiple_of=multiple)
    seen: dict[int, list[int]] = {}
    for batch in batches:
        rows, length = batch.input_ids.shape
        assert rows <= micro_batch_size and length % multiple == 0
        assert length - multiple < int((batch.document_ids >= 0).sum(1).max())  # padded no further than needed
        for row in range(rows):
            previous = None
            for j in range(length):
                index, token = int(batch.document_ids[row, j]), int(batch.input_ids[row, j])
                position = int(batch.position_ids[row, j])
                assert position == (0 if index != previous else int(batch.position_ids[row, j - 1]) + 1)
                if index < 0:
                    assert token == 7 and not batch.loss_mask[row, j] and batch.extras["value"][row, j] == 0
                else:
                    assert previous != -1, "tokens after padding"
                    assert index == previous or index not in seen, "a document in two pieces"
                    seen.setdefault(index, []).append(token)
                    assert bool(batch.loss_mask[row, j]) == documents[index].loss_mask[position]
                    assert float(batch.extras["value"][row, j]) == token / 8
                    assert int(batch.extras["version"][row, j]) == token * 3
                previous = index
            if layout == "padded":
                assert len(set(batch.document_ids[row].tolist()) - {-1}) == 1
    assert seen == {i: list(d.token_ids) for i, d in enumerate(documents)}
    assert batches[0].extras["value"].dtype == torch.float32 and batches[0].extras["version"].dtype == torch.long


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=40))
def test_best_fit_equals_the_obvious_search(lengths):
    rows: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [r for r in rows if sum(lengths[j] for j in r) + lengths[i] <= 20]
        if fitting:
            fullest = max(sum(lengths[j] for j in r) for r in fitting)
            next(r for r in fitting if sum(lengths[j] for j in r) == fullest).append(i)
        else:
            rows.append([i])
    assert best_fit(lengths, 20) == rows


def test_a_compact_document_takes_five_bytes_a_token():
    ids, mask = list(range(100_000, 110_000)), [True, False] * 5000
    document = Document(ids, mask).compact()
    assert sys.getsizeof(document.token_ids) + sys.getsizeof(document.loss_mask) < 5.1 * len(ids)
    assert list(document.token_ids) == ids and list(document.loss_mask) == mask
    batch, same = pack([document], 10_000, 1)[0], pack([Document(ids, mask)], 10_000, 1)[0]
    assert batch.input_ids.equal(same.input_ids) and batch.loss_mask.equal(same.loss_mask)


def test_packing_saves_rows():
    documents = [Document([1] * n, [True] * n) for n in (6, 6, 4, 4, 2, 2)]
    (batch,) = pack(documents, 12, 8)
    assert batch.input_ids.shape == (2, 12) and (batch.document_ids >= 0).all()


def test_bad_documents():
    with pytest.raises(UsageError, match="document 1 has 13 tokens, more than max_length=12"):
        pack([Document([1], [True]), Document([1] * 13, [True] * 13)], 12, 1)
    with pytest.raises(UsageError, match="document 0 has no tokens"):
        pack([Document([], [])], 12, 1)
    with pytest.raises(ValueError, match="loss_mask has 1 entries for 2 tokens"):
        Document([1, 2], [True])
    with pytest.raises(ValueError, match="document 1 has extras"):
        pack([Document([1], [True], {"a": [1.0]}), Document([1], [True])], 12, 1)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(0, 5), st.integers(0, 60), st.integers(1, 25))
def test_order_resumes_where_it_stood(num_items, seed, before, count):
    order = DataOrder(num_items, seed)
    taken = order.take(before)
    resumed = DataOrder(num_items, seed=99)
    resumed.load_state_dict(order.state_dict())
    rest = order.take(count)
    assert resumed.take(count) == rest
    whole = taken + rest
    for epoch in range(len(whole) // num_items):
        assert whole[epoch * num_items : (epoch + 1) * num_items] == permutation(num_items, seed, epoch)


def test_orders_differ_by_epoch_and_seed():
    orders = [permutation(50, seed, epoch) for seed in range(3) for epoch in range(3)]
    assert all(sorted(o) == list(range(50)) for o in orders)
    assert len({tuple(o) for o in orders}) == 9
    assert DataOrder(4, shuffle=False).take(6) == [0, 1, 2, 3, 0, 1]


def test_order_refuses_what_it_cannot_read():
    with pytest.raises(UsageError, match="empty"):
        DataOrder(0)
    with pytest.raises(ForerunError, match="5 items, the checkpoint's had 4"):
        DataOrder(5).load_state_dict(DataOrder(4).state_dict())
