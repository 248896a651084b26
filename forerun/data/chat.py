"""Chat templates: messages to token ids, and which of them are targets to be learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from forerun.data.packing import Document
from forerun.data.rows import is_text
from forerun.errors import UsageError

Messages = list[dict[str, str]]


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, max_length: int | None = None, name: str = "the prompt"
) -> list[int]:
    """Token ids of a prompt that ends where the assistant's turn begins.

    A tokenizer without a chat template takes a single turn of the user and encodes its content as it stands.

    Args:
        max_length: the context; a prompt must leave room in it for at least one token.
        name: names the prompt in an error.

    Raises:
        UsageError: the prompt is empty, no text or fills the context, or there is no chat template for a conversation.
    """
    text = _render(tokenizer, messages, generate=True)
    if not is_text(text):
        raise UsageError(f"{name} is not valid UTF-8: give it as text")
    ids = _tokens(tokenizer, text)
    if not ids:
        raise UsageError(f"{name} has no tokens: give it some text")
    if max_length is not None and len(ids) >= max_length:
        raise UsageError(
            f"{name} has {len(ids)} tokens, which leaves no room in a context of {max_length}: "
            "shorten it, or raise the context length if the model allows it"
        )
    return ids


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None
) -> tuple[int, ...]:
    """The tokens that end an answer: the tokenizer's end token and the generation config's, ascending."""
    found = {tokenizer.eos_token_id}
    named = generation_config.eos_token_id if generation_config is not None else None
    found.update(named if isinstance(named, list) else [named])
    return tuple(sorted(token for token in found if token is not None))


def response_document(
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    response_extras: Mapping[str, Sequence[float] | Tensor | float] | None = None,
) -> Document:
    """A prompt and the answer to it: the answer's tokens are targets, the prompt's are not.

    Args:
        response_extras: per token of the answer, or one number for all of them; the prompt's tokens get 0.
    """
    extras: dict[str, Sequence[float]] = {}
    for name, values in (response_extras or {}).items():
        if isinstance(values, (int, float)):
            values = [values] * len(response_ids)
        values = values.tolist() if isinstance(values, Tensor) else list(values)
        if len(values) != len(response_ids):
            raise ValueError(f"{name} has {len(values)} entries for {len(response_ids)} response tokens")
        extras[name] = [type(values[0])(0) if values else 0] * len(prompt_ids) + values
    mask = [False] * len(prompt_ids) + [True] * len(response_ids)
    return Document([*prompt_ids, *response_ids], mask, extras)


def encode_conversation(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> Document:
    """A whole conversation: each assistant turn is a target, up to and with the token that ends it.

    Every assistant turn is tokenized by itself, after exactly the prompt that `encode_prompt` makes of the turns before
    it, so that training sees a turn's beginning as generation does.

    Raises:
        UsageError: no assistant turn, no chat template, or a template that writes earlier turns differently once later
            ones follow (some reasoning models' do).
    """
    ids: list[int] = []
    mask: list[bool] = []
    done = ""

    def extend(text: str, is_target: bool) -> None:
        nonlocal done
        if not text.startswith(done):
            raise UsageError(
                "this chat template rewrites earlier turns when later ones follow, so their tokens are not what was "
                "generated: give rows of `prompt` and `response` with one answer each"
            )
        tokens = _tokens(tokenizer, text[len(done) :])
        targets = _turn_length(tokenizer, tokens) if is_target else 0
        ids.extend(tokens)
        mask.extend([True] * targets + [False] * (len(tokens) - targets))
        done = text

    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            if index == 0:
                raise UsageError("the conversation begins with the assistant: put a user's turn before it")
            extend(_render(tokenizer, messages[:index], generate=True), is_target=False)
            extend(_render(tokenizer, messages[: index + 1], generate=False), is_target=True)
    if not ids:
        raise UsageError("the conversation has no assistant turn, so nothing in it is to be learned")
    return Document(ids, mask)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> Document:
    """Plain text, as the tokenizer begins one (some put a token before it), and the end token: all of it is a target.

    Raises:
        UsageError: the text is empty or no text.
    """
    if not is_text(text):
        raise UsageError("half a surrogate pair is no text")
    ids: list[int] = tokenizer(text)["input_ids"]
    if not text or not ids:
        raise UsageError("the text has no tokens, so nothing in it is to be learned")
    end = tokenizer.eos_token_id
    if end is not None and ids[-1] != end:
        ids.append(end)
    return Document(ids, [True] * len(ids))


def _render(tokenizer: PreTrainedTokenizerBase, messages: Messages, generate: bool) -> str:
    if tokenizer.chat_template is not None:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate))
    if [m["role"] for m in messages] != ["user", "assistant"][: len(messages)]:
        raise UsageError(
            "the tokenizer has no chat template, so it takes one user turn and one answer only: use an instruct model, "
            "or put a chat_template.jinja beside its tokenizer"
        )
    start = tokenizer.bos_token if getattr(tokenizer, "add_bos_token", False) else ""
    end = "" if generate else tokenizer.eos_token or ""
    return (start or "") + "".join(m["content"] for m in messages) + end


def _tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # Without added special tokens: the template writes them all, the beginning-of-text one included.
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def _turn_length(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> int:
    """Tokens of an assistant turn up to and with its last special token; what follows is the template's (a newline)."""
    special = set(tokenizer.all_special_ids)
    last = max((i for i, token in enumerate(tokens) if token in special), default=len(tokens) - 1)
    return last + 1
