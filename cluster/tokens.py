"""Texts and token ids, on the side of the caller: the model folder's own tokenizer."""

import operator
from collections.abc import Sequence
from typing import Any

from ..dispatch.errors import CheckpointError, ConfigError
from ..workers.model_spec import ModelSpec, digest_of_tokenizer


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


def tokenize(prompts: Sequence[str | Sequence[int]], tokenizer: Any) -> list[tuple[int, ...]]:
    """Token ids of each prompt; those given as token ids pass through.

    Raises:
        ConfigError: a text where there is no tokenizer, or a prompt that is neither text nor integers.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if texts and tokenizer is None:
        raise ConfigError(
            f"prompt {texts[0][:40]!r} is text, and the model folder carries no tokenizer: give token ids"
        )
    for text in texts:
        refuse_broken_text("a prompt", text)
    encoded = iter(tokenizer(texts)["input_ids"] if texts else [])
    return [tuple(next(encoded)) if isinstance(prompt, str) else _integers(prompt) for prompt in prompts]


def refuse_broken_text(what: str, text: str) -> None:
    """Refuse text that has no UTF-8 form, as half of a surrogate pair in JSON makes it.

    Raises:
        ConfigError: naming the character.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is no valid text: {error}") from error


def _integers(prompt: Sequence[int]) -> tuple[int, ...]:
    """Plain integers from a list, an array or a tensor: what travels to the ranks is encoded as 64 bits each."""
    if isinstance(prompt, bytes):
        raise ConfigError(f"a prompt is a text or a sequence of integer token ids, not bytes: {prompt!r:.60}")
    try:
        token_ids = tuple(operator.index(token_id) for token_id in prompt)
    except TypeError as error:
        raise ConfigError(f"a prompt is a text or a sequence of integer token ids, not {prompt!r:.60}") from error
    if any(not -(2**63) <= token_id < 2**63 for token_id in token_ids):
        raise ConfigError(f"a token id does not fit into 64 bits: {token_ids!r:.60}")
    return token_ids
