"""Reading a file of prompts: one JSON object a line, refused whole if any line is wrong."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from ...dispatch.errors import ConfigError
from ...workers.request import SamplingParams
from ..decoding import decode, parse_json
from ..requests.tokens import Chat, Message, refuse_broken_text

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")


class PromptKeys(msgspec.Struct, frozen=True):
    """What a line has beside its sampling settings: one of `prompt`, `prompt_token_ids` and `messages`, and an optional
    `id`.
    """

    id: str | int | None = None
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None


def _in_line(kind: Any) -> Any:
    """What a line may give for a setting of this kind: nothing too, and one text for several."""
    return kind | str | None if kind == tuple[str, ...] else kind | None


PromptLine = msgspec.defstruct(
    "PromptLine",
    [(field.name, _in_line(field.type), None) for field in msgspec.structs.fields(SamplingParams)],
    bases=(PromptKeys,),
    frozen=True,
    forbid_unknown_fields=True,
)
"""One line: its keys, and what differs from the run's sampling settings."""


class PromptEntry(msgspec.Struct, frozen=True):
    """A prompt as its line gives it; `id` is the line's own, or its number counted from 1; `given` are its settings."""

    id: str
    line_number: int
    prompt: str | tuple[int, ...] | Chat
    sampling: SamplingParams
    given: dict[str, Any] = {}

    def over(self, defaults: SamplingParams) -> "PromptEntry":
        """The same prompt with other settings where its line says nothing."""
        return msgspec.structs.replace(self, sampling=msgspec.structs.replace(defaults, **self.given))


def read_prompts(path: str, defaults: SamplingParams) -> list[PromptEntry]:
    """All prompts of a JSONL file; blank lines are skipped.

    Args:
        path: the file.
        defaults: sampling settings of lines that say nothing else.

    Raises:
        ConfigError: the file cannot be read or holds no prompt; or a line is not JSON, has an unknown key or one twice,
            not exactly one of `prompt`, `prompt_token_ids` and `messages`, an empty prompt, a message that is more or
            less than two texts, a setting out of bounds, or the id of another.
    """
    try:
        # Lines end at line feeds alone: JSON allows other line separators inside its strings.
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(f"--prompts {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts {path}: not UTF-8 text: {error}") from error
    except ValueError as error:  # a name that holds a zero byte
        raise ConfigError(f"--prompts {path!r}: {error}") from error
    entries: dict[str, PromptEntry] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        entry = _parse(f"--prompts {path}, line {number}", number, line, defaults)
        if entry.id in entries:
            raise ConfigError(
                f"--prompts {path}, line {number}: id {entry.id!r:.80} is that of line {entries[entry.id].line_number}"
            )
        entries[entry.id] = entry
    if not entries:
        raise ConfigError(f"--prompts {path}: holds no prompts")
    return list(entries.values())


def _parse(where: str, number: int, text: str, defaults: SamplingParams) -> PromptEntry:
    try:
        fields = parse_json(text)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: a {type(fields).__name__}, not a JSON object")
    line: Any = decode(fields, PromptLine, where)
    try:
        given = [name for name in _PROMPT_KEYS if getattr(line, name) is not None]
        if len(given) != 1:
            raise ConfigError(f"give one of {', '.join(_PROMPT_KEYS)}; the line has {' and '.join(given) or 'none'}")
        for text_in_line in (line.id, line.prompt):
            if isinstance(text_in_line, str):
                refuse_broken_text("the line", text_in_line)
        if any(not -(2**63) <= token_id < 2**63 for token_id in line.prompt_token_ids or ()):
            raise ConfigError("a token id does not fit into 64 bits")
        prompt = getattr(line, given[0])
        if not prompt:
            raise ConfigError(f"the prompt is empty: {given[0]}={fields[given[0]]!r}")
        if line.messages is not None:
            prompt = Chat(line.messages)
        own_id = str(number) if line.id is None else str(line.id)
        given_settings = _given(line, own_id, defaults)
        sampling = msgspec.structs.replace(defaults, **given_settings)
        own = {name: getattr(sampling, name) for name in given_settings}
        return PromptEntry(own_id, number, prompt, sampling, own)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _given(line: PromptKeys, own_id: str, defaults: SamplingParams) -> dict[str, Any]:
    settings = {name: getattr(line, name) for name in SamplingParams.__struct_fields__}
    given = {name: value for name, value in settings.items() if value is not None}
    if "seed" not in given and defaults.seed is not None:
        given["seed"] = seed_of_line(defaults.seed, own_id)
    return given


def seed_of_line(seed: int, own_id: str) -> int:
    """A line's seed from the run's: lines with the same prompt get completions of their own, in every run the same."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {own_id}".encode(), digest_size=8).digest())
