"""Rows of a file as SFT examples, and the documents that they become."""

import json

import pytest

from forerun.data.chat import encode_conversation, encode_text
from forerun.data.examples import encode_examples, read_examples
from forerun.errors import UsageError
from tests.data.test_chat import CONVERSATION


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_examples_in_every_column_layout_are_one(tmp_path, tokenizer):
    rows = [
        {"messages": CONVERSATION[1:3]},
        {"prompt": "two and three?", "response": "five"},
        {"prompt": CONVERSATION[1:2], "completion": CONVERSATION[2:3]},
    ]
    documents = encode_examples(tokenizer, read_examples(write(tmp_path / "a.jsonl", rows)), max_length=64)
    assert len(documents) == 3 and documents[0] == documents[1] == documents[2]


def test_text_is_an_example_beside_conversations(tmp_path, tokenizer):
    rows = [{"text": "the sum"}, {"text": "of both", "prompt": "two?", "response": "five"}]
    documents = encode_examples(tokenizer, read_examples(write(tmp_path / "a.jsonl", rows)), max_length=64)
    turns = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "five"}]
    expected = [encode_text(tokenizer, "the sum"), encode_conversation(tokenizer, turns)]
    assert documents == [document.compact() for document in expected]
    path = write(tmp_path / "b.jsonl", [{"text": ""}, {"text": ["a"]}, {"text": "\ud800"}])
    said = r"3 of 3 .* line 1: column 'text' must be a string .*, not ''; line 2: .* not \['a'\]; line 3: .*half a sur"
    with pytest.raises(UsageError, match=said):
        read_examples(path)


def test_rows_that_are_alike_are_told_once(tmp_path):
    """Where no row is usable, leaving bad ones out is no way out."""
    path = write(tmp_path / "a.jsonl", [{"words": "a"}] * 3 + ["{"] + [{"words": "b"}])
    said = "line 1 and 3 like it: needs 'messages', or 'prompt' and 'response', or 'text', but has 'words'; line 4: not"
    with pytest.raises(UsageError, match=f"5 of 5 rows cannot be used: {said}") as refused:
        read_examples(path)
    assert "on_bad_row" not in str(refused.value)


def test_a_message_keeps_all_that_it_says_or_is_refused(tmp_path):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    path = write(tmp_path / "a.jsonl", [{"messages": [*CONVERSATION[:3], call]}])
    with pytest.raises(UsageError, match="column 'messages': 'tool_calls' of a message is not read: write it into"):
        read_examples(path)
    path = write(tmp_path / "b.jsonl", [{"messages": [CONVERSATION[1], CONVERSATION[2] | {"tool_calls": None}]}])
    assert read_examples(path)[0].content == CONVERSATION[1:3]


def test_bad_examples_are_named(tmp_path, tokenizer):
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "a"}, "{", {"messages": CONVERSATION[:2]}]
    path = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(UsageError, match=r"a\.jsonl: 3 of 4 rows .*: line 2: needs 'messages', or 'prompt' and 'resp"):
        read_examples(path)
    reports: list[str] = []
    assert len(read_examples(path, "skip", reports.append)) == 1
    assert len(reports) == 1 and "\n" not in reports[0]
    assert all(told in reports[0] for told in ("3 of 4 rows", "line 2: needs", "line 3: not JSON", "line 4: no assis"))


def test_examples_that_are_too_long(tmp_path, tokenizer):
    rows = [
        {"prompt": "a", "response": "b"},
        {"prompt": "a", "response": "b " * 70},
        {"prompt": "a " * 50, "response": "b"},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    examples = read_examples(path)
    first, last = (len(encode_conversation(tokenizer, example.content)) for example in examples[1:])
    said = (
        f"2 of 3 examples have more tokens than data.max_length=40 ({path}, line 2: {first}; {path}, line 3: {last}): "
    )
    with pytest.raises(UsageError) as refused:
        encode_examples(tokenizer, examples, 40)
    most = max(first, last)
    assert str(refused.value) == f"{said}set data.max_length={most}, or data.on_too_long=truncate or skip"
    assert len(encode_examples(tokenizer, examples, most)) == 3
    reports: list[str] = []
    assert len(encode_examples(tokenizer, examples, 40, "skip", reports.append)) == 1
    cut = encode_examples(tokenizer, examples, 40, "truncate", reports.append)
    assert [len(d) for d in cut] == [len(cut[0]), 40]
    assert reports == [said + "0 are cut, 2 left out", said + "1 are cut, 1 left out"]
    with pytest.raises(UsageError, match=r"no example is left to train on: 3 of 3 .* line 2: .* line 3: "):
        encode_examples(tokenizer, examples, 5, "skip")


def test_of_many_the_first_few_are_told_and_how_many_there_are(tmp_path, make_tokenizer):
    bad = [{str(number): 0} for number in range(7)]
    path = write(tmp_path / "a.jsonl", bad + [{"messages": CONVERSATION[:3]}] * 5)
    with pytest.raises(UsageError, match=r"7 of 12 rows cannot be used: line 1: .*; line 3: [^;]*; and 4 more \("):
        read_examples(path)
    examples = read_examples(path, "skip")
    with pytest.raises(
        UsageError, match=r"^5 of 5 examples .*, line 8: .*no chat template.*, line 10: .*; and 2 more$"
    ):
        encode_examples(make_tokenizer(None), examples, 64)
