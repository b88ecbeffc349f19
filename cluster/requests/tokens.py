"""Texts, chat messages and token ids, on the side of the caller: the model folder's own tokenizer."""

import json
import operator
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ...dispatch.errors import CheckpointError, ConfigError
from ...workers.model.spec import ModelSpec, digest_of_tokenizer
from ...workers.observing.printable import told
from ..decoding import decode
from .chat_rendering import RENDERER

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
    from ...workers.model.reading import reading

    folder = Path(spec.path)
    with reading(spec.path, "its tokenizer cannot be read", partial(_loaded_with, folder), "tokenizer_config.json"):
        tokenizer = _loaded(folder)
    here = digest_of_tokenizer(spec.path)
    if spec.tokenizer_digest and here != spec.tokenizer_digest:
        raise CheckpointError(
            f"model={spec.path!r}: its tokenizer differs (here {here}, where the pool was launched "
            f"{spec.tokenizer_digest}), and its tokens would mean others: have one model folder on all nodes, or send "
            "token ids"
        )
    return tokenizer


def _loaded(folder: Path) -> Any:
    """The tokenizer, used once: some settings are looked at only then."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    tokenizer.decode(tokenizer(["a"])["input_ids"][0], skip_special_tokens=True)
    return tokenizer


def _loaded_with(folder: Path, settings: dict[str, Any]) -> Any:
    """The tokenizer of a folder with other settings in its `tokenizer_config.json`."""
    with tempfile.TemporaryDirectory() as other:
        for file in folder.iterdir():
            if file.name != "tokenizer_config.json":
                (Path(other) / file.name).symlink_to(file.resolve())
        (Path(other) / "tokenizer_config.json").write_text(json.dumps(settings))
        return _loaded(Path(other))


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
        token_ids = _templated(messages, tokenizer)
    except Exception as error:  # a template is a program of the model's: what it raises is not ours to list
        said = str(error) if isinstance(error, ConfigError) else told(error)
        raise ConfigError(
            f"the model's chat template cannot render messages={messages!r:.60}, with the roles "
            f"{', '.join(message.role for message in chat.messages):.60}: {said}; give messages that it takes, or a "
            "text or token ids"
        ) from error
    if not token_ids:
        raise ConfigError(f"the model's chat template makes no token of messages={messages!r:.60}: give others")
    return tuple(token_ids)


def _templated(messages: list[dict[str, str]], tokenizer: Any) -> list[int]:
    """What `apply_chat_template` returns, with the template run where it can be ended."""
    from transformers import PreTrainedTokenizerBase

    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return list(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        )
    special_tokens = {name: _text_of(token) for name, token in tokenizer.special_tokens_map.items()}
    text = RENDERER.render(tokenizer.get_chat_template(), messages, special_tokens)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _text_of(token: Any) -> Any:
    return [str(one) for one in token] if isinstance(token, (list, tuple)) else str(token)


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
        given = tuple(prompt)
        if any(isinstance(token_id, bool) for token_id in given):  # integers to Python alone
            raise TypeError
        token_ids = tuple(map(operator.index, given))
    except TypeError as error:
        raise ConfigError(f"{_WHAT_A_PROMPT_IS}, not {prompt!r:.60}") from error
    if any(not -(2**63) <= token_id < 2**63 for token_id in token_ids):
        raise ConfigError(f"a token id does not fit into 64 bits: {token_ids!r:.60}")
    return token_ids
