"""Which tokens a chat template gives, and which of them are targets."""

import pytest
import torch
from tokenizers import processors
from transformers import GenerationConfig

from forerun.data.chat import encode_conversation, encode_prompt, encode_text, response_document, stop_token_ids
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


def test_text_is_learned_whole_up_to_its_end(tokenizer):
    document = encode_text(tokenizer, "the sum is five")
    assert target_text(tokenizer, document) == "the sum is five<|im_end|>" and all(document.loss_mask)
    assert encode_text(tokenizer, "the sum is five<|im_end|>") == document
    with pytest.raises(UsageError, match="no tokens"):
        encode_text(tokenizer, "")


def test_text_begins_as_the_tokenizer_begins_it(make_tokenizer):
    begins = make_tokenizer()
    ends = [("<|im_start|>", begins.bos_token_id)]
    begins.backend_tokenizer.post_processor = processors.TemplateProcessing("<|im_start|> $A", None, ends)
    assert begins.decode(encode_text(begins, "five").token_ids) == "<|im_start|>five<|im_end|>"
    assert begins.decode(encode_prompt(begins, CONVERSATION[1:2])).count("<|im_start|>") == 2  # the template's alone


def test_stop_tokens(tokenizer):
    assert stop_token_ids(tokenizer) == (2,)
    assert stop_token_ids(tokenizer, GenerationConfig(eos_token_id=[2, 0])) == (0, 2)
