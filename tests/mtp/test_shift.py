"""Shifts against loops over documents. Every token id is its own position, so a set of targets tells all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.mtp.shift import depth_counts, depth_targets, document_ids, document_ids_from_cu_seqlens


def expected(documents: list[list[int]], masks: list[list[bool]], depth: int, rule: str) -> set[tuple[int, int, int]]:
    """(position, token read, token predicted) for documents given as lists of token ids (= positions)."""
    found = set()
    for tokens, mask in zip(documents, masks, strict=True):
        for i in range(len(tokens)):
            if i + depth + 1 >= len(tokens) or not mask[i + depth + 1]:
                continue
            if rule == "span" and not all(mask[i + 1 : i + depth + 1]):
                continue
            found.add((tokens[i], tokens[i + depth], tokens[i + depth + 1]))
    return found


def observed(ids: torch.Tensor, documents: torch.Tensor, mask: torch.Tensor, depth: int, rule: str) -> set:
    targets = depth_targets(ids, documents, mask, depth, rule)
    return {
        (int(ids[row, i]), int(targets.input_ids[row, i]), int(targets.labels[row, i]))
        for row, i in targets.valid.nonzero().tolist()
    }


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[int], list[int], list[bool]]:
    """Document lengths, padding after each, and a mask over all tokens of one row."""
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=5))
    padding = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    mask = draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    return lengths, padding, mask


@given(rows(), st.integers(1, 3), st.sampled_from(["target", "span"]), st.booleans())
def test_targets_equal_a_loop_over_documents(row, depth, rule, left) -> None:
    lengths, padding, mask = row
    position, attention, positions, full_mask, documents, masks = 0, [], [], [], [], []
    flags = iter(mask)
    for length, pad in zip(lengths, padding, strict=True):
        own = [next(flags) for _ in range(length)]
        blocks = [("token", length), ("pad", pad)]
        for kind, n in reversed(blocks) if left else blocks:
            if kind == "token":
                documents.append(list(range(position, position + n)))
                masks.append(own)
                full_mask += own
                positions += list(range(n))
            else:
                full_mask += [True] * n  # a mask that forgets about padding must not matter
                positions += [1] * n
            attention += [int(kind == "token")] * n
            position += n
    ids = torch.arange(position).unsqueeze(0)
    found = document_ids(torch.tensor([positions]), torch.tensor([attention]))
    loss_mask = torch.tensor([full_mask])
    assert observed(ids, found, loss_mask, depth, rule) == expected(documents, masks, depth, rule)
    assert depth_counts(found, loss_mask, depth, rule)[-1] == len(expected(documents, masks, depth, rule))


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), min_size=1, max_size=5), st.integers(0, 4))
def test_cu_seqlens_with_and_without_padding(documents: list[tuple[int, int]], tail: int) -> None:
    lengths = torch.tensor([0] + [n for n, _ in documents])
    padded = torch.tensor([0] + [n + p for n, p in documents])
    expected_ids = [d for d, (n, p) in enumerate(documents) for d in [d] * n + [-1] * p] + [-1] * tail
    found = document_ids_from_cu_seqlens(lengths.cumsum(0), len(expected_ids), padded.cumsum(0))
    assert found.tolist() == [expected_ids]
    touching = [d for d, (n, _) in enumerate(documents) for d in [d] * n] + [-1] * tail
    assert document_ids_from_cu_seqlens(lengths.cumsum(0), len(touching)).tolist() == [touching]


def test_cu_seqlens_longer_than_the_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="past the row"):
        document_ids_from_cu_seqlens(torch.tensor([0, 9]), 8)


@pytest.mark.parametrize("attention", [[[1, 1, 1, 0, 0]], [[0, 0, 1, 1, 1]]])
def test_padded_rows_from_the_attention_mask_alone(attention: list[list[int]]) -> None:
    mask = torch.tensor(attention)
    documents = document_ids(attention_mask=mask)
    assert (documents == -1).equal(mask == 0)
    targets = depth_targets(torch.arange(5).unsqueeze(0), documents, torch.ones_like(mask).bool(), 1)
    assert targets.valid.sum() == 1


def test_vacated_positions_are_invalid_even_where_token_zero_is_real() -> None:
    ids = torch.zeros(1, 6, dtype=torch.long)
    targets = depth_targets(ids, torch.zeros(1, 6, dtype=torch.long), torch.ones(1, 6, dtype=torch.bool), 2)
    assert targets.valid.tolist() == [[True, True, True, False, False, False]]


def test_labels_may_differ_from_the_tokens_read() -> None:
    ids = torch.arange(5).unsqueeze(0)
    targets = depth_targets(ids, torch.zeros_like(ids), torch.ones_like(ids).bool(), 1, labels=ids + 10)
    assert targets.input_ids[0, 0] == 1
    assert targets.labels[0, 0] == 12


def test_position_ids_go_with_the_token_read() -> None:
    ids = torch.arange(10, 16).unsqueeze(0)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    targets = depth_targets(ids, documents, torch.ones_like(ids).bool(), 1, position_ids=positions)
    assert targets.position_ids is not None
    assert targets.position_ids[targets.valid].tolist() == [1, 1]
    assert targets.input_ids[targets.valid].tolist() == [11, 14]
    assert targets.labels[targets.valid].tolist() == [12, 15]


def test_a_row_shorter_than_the_depth_has_no_valid_position() -> None:
    ids = torch.arange(2).unsqueeze(0)
    assert not depth_targets(ids, torch.zeros_like(ids), torch.ones_like(ids).bool(), 9).valid.any()


def test_rows_without_tokens_have_no_documents() -> None:
    empty = torch.zeros(2, 0, dtype=torch.long)
    assert document_ids(empty, empty).shape == (2, 0)
    assert document_ids(torch.zeros(0, 3, dtype=torch.long)).shape == (0, 3)
