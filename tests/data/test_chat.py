"""Which tokens a chat template gives, and which of them are targets."""

import json

import pytest
import torch
from transformers import GenerationConfig

from forerun.data.chat import (
    encode_conversation,
    encode_examples,
    encode_prompt,
    read_examples,
    response_document,
    stop_token_ids,
)
from forerun.errors import UsageError

CONVERSATION = [
    {"role": "system", "content": "the user"},
    {"role": "user", "content": "two and three?"},
    {"role": "assistant", "content": "five"},
    {"role": "user", "content": "is it?"},
    {"role": "assistant", "content": "\nthe sum"},
]


def target_text(tokenizer, document):
    return tokenizer.decode([t for t, m in zip(document.token_ids, document.loss_mask, strict=True) if m])


def test_assistant_turns_with_their_end_are_the_targets(tokenizer):
    document = encode_conversation(tokenizer, CONVERSATION)
    assert target_text(tokenizer, document) == "five<|im_end|>\nthe sum<|im_end|>"
    text = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert tokenizer.decode(document.token_ids) == text
    prompt = encode_prompt(tokenizer, CONVERSATION[:2])
    assert document.token_ids[: len(prompt)] == prompt and not any(document.loss_mask[: len(prompt)])
    assert document.loss_mask[len(prompt)]


def test_turns_after_the_last_answer_are_left_out(tokenizer):
    document = encode_conversation(tokenizer, CONVERSATION[:4])
    assert tokenizer.decode(document.token_ids).endswith("five<|im_end|>\n")


def test_a_template_that_rewrites_the_past_is_refused(make_tokenizer):
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] }}{% if m['role'] != 'assistant' or loop.last %}"
        "{{ m['content'] }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    rewriting = make_tokenizer(template)
    with pytest.raises(UsageError, match="rewrites earlier turns"):
        encode_conversation(rewriting, CONVERSATION)
    assert target_text(rewriting, encode_conversation(rewriting, CONVERSATION[:3])) == "five<|im_end|>"


def test_without_a_template_one_turn_and_one_answer(make_tokenizer):
    plain = make_tokenizer(None)
    document = encode_conversation(plain, CONVERSATION[1:3])
    assert plain.decode(document.token_ids) == "two and three?five<|im_end|>"
    assert target_text(plain, document) == "five<|im_end|>"
    with pytest.raises(UsageError, match="no chat template"):
        encode_prompt(plain, CONVERSATION[:2])


def test_a_prompt_must_leave_room(tokenizer):
    ids = encode_prompt(tokenizer, CONVERSATION[:2])
    assert encode_prompt(tokenizer, CONVERSATION[:2], max_length=len(ids) + 1) == ids
    with pytest.raises(UsageError, match=f"prompt 7 has {len(ids)} tokens, which leaves no room in a context of"):
        encode_prompt(tokenizer, CONVERSATION[:2], max_length=len(ids), name="prompt 7")


def test_response_document_aligns_extras_with_tokens():
    document = response_document([5, 6, 7], [8, 9], {"advantages": 0.5, "old_log_probs": torch.tensor([-1.0, -2.0])})
    assert document.loss_mask == [False, False, False, True, True]
    assert document.extras == {"advantages": [0, 0, 0, 0.5, 0.5], "old_log_probs": [0, 0, 0, -1.0, -2.0]}
    with pytest.raises(ValueError, match="1 entries for 2"):
        response_document([5], [8, 9], {"old_log_probs": [0.0]})


def test_stop_tokens(tokenizer):
    assert stop_token_ids(tokenizer) == (2,)
    assert stop_token_ids(tokenizer, GenerationConfig(eos_token_id=[2, 0])) == (0, 2)


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


def test_rows_that_are_alike_are_told_once(tmp_path):
    """Where no row is usable, leaving bad ones out is no way out."""
    path = write(tmp_path / "a.jsonl", [{"text": "a"}] * 3 + ["{"] + [{"text": "b"}])
    said = "line 1 and 3 like it: needs 'messages', or 'prompt' and 'response', but has 'text'; line 4: not JSON"
    with pytest.raises(UsageError, match=f"5 of 5 rows cannot be used: {said}") as refused:
        read_examples(path)
    assert "on_bad_row" not in str(refused.value)


def test_a_message_keeps_all_that_it_says_or_is_refused(tmp_path):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    path = write(tmp_path / "a.jsonl", [{"messages": [*CONVERSATION[:3], call]}])
    with pytest.raises(UsageError, match="column 'messages': 'tool_calls' of a message is not read: write it into"):
        read_examples(path)
    path = write(tmp_path / "b.jsonl", [{"messages": [CONVERSATION[1], CONVERSATION[2] | {"tool_calls": None}]}])
    assert read_examples(path)[0].messages == CONVERSATION[1:3]


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
    first, last = (len(encode_conversation(tokenizer, example.messages)) for example in examples[1:])
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
