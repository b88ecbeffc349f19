"""Texts, chat messages and token ids, on the side of the caller: the model folder's own tokenizer."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..dispatch.errors import CheckpointError, ConfigError
from ..workers.model_spec import ModelSpec, digest_of_tokenizer
from .decoding import decode

AnyPrompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""A text, token ids, or chat messages, each with `role` and `content`."""

_WHAT_A_PROMPT_IS = "a prompt is a text, a sequence of integer token ids or a list of chat messages"


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One message of a chat; which roles there are, the model's chat template says."""

    role: str
    content: str


class Chat(msgspec.Struct, frozen=True):
    """The messages of one prompt, in their order."""

    messages: tuple[Message, ...]


def load_tokenizer(spec: ModelSpec) -> Any:
    """The folder's tokenizer; `None` where it carries none.

    Raises:
        CheckpointError: it cannot be read here, or is another one than where the pool was launched.
    """
    if not spec.has_tokenizer:
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(spec.path, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise CheckpointError(f"model={spec.path!r}: its tokenizer cannot be read: {error}") from error
    here = digest_of_tokenizer(spec.path)
    if spec.tokenizer_digest and here != spec.tokenizer_digest:
        raise CheckpointError(
            f"model={spec.path!r}: its tokenizer differs (here {here}, where the pool was launched "
            f"{spec.tokenizer_digest}), and its tokens would mean others: have one model folder on all nodes, or send "
            "token ids"
        )
    return tokenizer


def needs_tokenizer(prompt: Any) -> bool:
    """Whether it is not token ids already."""
    return isinstance(prompt, (str, Chat)) or _holds_messages(prompt)


def tokenize(prompts: Sequence[AnyPrompt], tokenizer: Any) -> list[tuple[int, ...]]:
    """Token ids of each prompt; those given as token ids pass through.

    Raises:
        ConfigError: a text or messages where there is no tokenizer, messages that are none or that the chat template
            does not take, or a prompt that is nothing of all that.
    """
    prompts = [
        _chat_token_ids(prompt, tokenizer, f"prompts[{index}]") if _holds_messages(prompt) else prompt
        for index, prompt in enumerate(prompts)
    ]
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts and tokenizer is None:
        raise ConfigError(
            f"prompt {texts[0][:40]!r} is text, and the model folder carries no tokenizer: give token ids"
        )
    for text in texts:
        refuse_broken_text("a prompt", text)
    encoded = iter(tokenizer(texts)["input_ids"] if texts else [])
    return [tuple(next(encoded)) if isinstance(prompt, str) else _integers(prompt) for prompt in prompts]


def render_chat(chat: Chat, tokenizer: Any) -> tuple[int, ...]:
    """Token ids of a chat up to where the model's answer begins: what `apply_chat_template` of Transformers makes.

    The template writes all special tokens itself, the first one included; the tokenizer adds none.

    Raises:
        ConfigError: there is no tokenizer or it has no chat template, the template cannot render these messages, or a
            text of them has no UTF-8 form.
    """
    if tokenizer is None:
        raise ConfigError("the prompt is chat messages, and the model folder carries no tokenizer: give token ids")
    if not tokenizer.chat_template:
        raise ConfigError(
            "the prompt is chat messages, and the model folder carries no chat template (chat_template.jinja, or "
            "chat_template in tokenizer_config.json): add the model's own, or give a text or token ids"
        )
    for message in chat.messages:
        refuse_broken_text("a message's role", message.role)
        refuse_broken_text("a message's content", message.content)
    messages = msgspec.to_builtins(list(chat.messages))
    try:
        token_ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # a template is a program of the model's: what it raises is not ours to list
        raise ConfigError(
            f"the model's chat template cannot render messages={messages!r:.60}, with the roles "
            f"{', '.join(message.role for message in chat.messages):.60}: {type(error).__name__}: "
            f"{' '.join(str(error).split())}; give messages that it takes, or a text or token ids"
        ) from error
    if not token_ids:
        raise ConfigError(f"the model's chat template makes no token of messages={messages!r:.60}: give others")
    return tuple(token_ids)


def refuse_broken_text(what: str, text: str) -> None:
    """Refuse text that has no UTF-8 form, as half of a surrogate pair in JSON makes it.

    Raises:
        ConfigError: naming the character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is no valid text: {error}") from error


def _holds_messages(prompt: Any) -> bool:
    """By its first item: of token ids there may be very many."""
    is_sequence = isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes))
    return is_sequence and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _chat_token_ids(prompt: Any, tokenizer: Any, where: str) -> tuple[int, ...]:
    messages = [dict(message) if isinstance(message, Mapping) else message for message in prompt]
    chat = decode({"messages": messages}, Chat, where)
    try:
        return render_chat(chat, tokenizer)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _integers(prompt: Any) -> tuple[int, ...]:
    """Plain integers from a list, an array or a tensor: what travels to the ranks is encoded as 64 bits each."""
    if isinstance(prompt, bytes):
        raise ConfigError(f"{_WHAT_A_PROMPT_IS}, not bytes: {prompt!r:.60}")
    if isinstance(prompt, Mapping):
        raise ConfigError(
            f"{_WHAT_A_PROMPT_IS}, not one message: {prompt!r:.60}; a whole chat is one prompt: give a list of chats"
        )
    try:
        token_ids = tuple(operator.index(token_id) for token_id in prompt)
    except TypeError as error:
        raise ConfigError(f"{_WHAT_A_PROMPT_IS}, not {prompt!r:.60}") from error
    if any(not -(2**63) <= token_id < 2**63 for token_id in token_ids):
        raise ConfigError(f"a token id does not fit into 64 bits: {token_ids!r:.60}")
    return token_ids
