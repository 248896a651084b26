"""Documents that nothing but the attention mask tells apart."""

from __future__ import annotations

import torch

from forerun.mtp.shift import PADDING, depth_targets, document_ids


def test_padding_parts_documents_that_only_the_attention_mask_tells_apart() -> None:
    attention = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0]])
    documents = document_ids(attention_mask=attention)
    (row,) = documents.tolist()
    assert [d == PADDING for d in row] == [True, False, False, True, False, False, False, True]
    assert row[1] == row[2] and row[4] == row[5] == row[6] and row[1] != row[4]
    ids = torch.arange(8).unsqueeze(0)
    found = depth_targets(ids, documents, torch.ones(1, 8, dtype=torch.bool), depth=1)
    assert ids[found.valid].tolist() == [4] and found.labels[found.valid].tolist() == [6]
    # Three places ahead of the first document's end lies the second.
    assert not depth_targets(ids, documents, torch.ones(1, 8, dtype=torch.bool), depth=2).valid.any()


def test_positions_are_those_of_the_token_read() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    documents = document_ids(positions)
    mask = torch.ones_like(positions, dtype=torch.bool)
    for depth in (1, 2):
        found = depth_targets(torch.arange(7).unsqueeze(0), documents, mask, depth, position_ids=positions)
        assert found.position_ids is not None and found.valid.any()
        assert found.position_ids[found.valid].tolist() == (positions[found.valid] + depth).tolist()
