"""One line of an output, and reading the lines that an output holds."""

import contextlib
import re
from collections.abc import Iterable

import msgspec

from ...dispatch.errors import ConfigError
from ...workers.request import FinishReason
from ..completion import PoolCompletion


class OutputLine(msgspec.Struct, frozen=True):
    """One finished request, as the output file holds it."""

    id: str
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_completion_tokens: int

    @classmethod
    def of(cls, own_id: str, completion: PoolCompletion) -> "OutputLine":
        """The line of a completion; what it says beside the id are attributes of that, by the same names."""
        return cls(own_id, *(getattr(completion, name) for name in cls.__struct_fields__[1:]))


def finished_in(file: Iterable[bytes], source: str) -> tuple[dict[str, int], int]:
    """The tokens of each finished prompt by its id, and how many bytes are whole lines: a last one may be cut short.

    Raises:
        ConfigError: a line that is not this tool's.
    """
    finished: dict[str, int] = {}
    whole = 0
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            if not _is_torn_line(line):
                raise ConfigError(f"--output {source}, line {number}: not a completion of this tool; give another file")
            break
        try:
            held = msgspec.json.decode(line, type=OutputLine)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"--output {source}, line {number}: not a completion of this tool ({error}); give another file"
            ) from error
        finished[held.id] = held.num_prompt_tokens
        whole += len(line)
    return finished, whole


def readable_in(file: Iterable[bytes]) -> set[str]:
    """Ids of the requests whose lines can be read, whatever else stands there."""
    ids = set()
    for line in file:
        with contextlib.suppress(msgspec.DecodeError):
            ids.add(msgspec.json.decode(line, type=OutputLine).id)
    return ids


def _is_torn_line(line: bytes) -> bool:
    """Whether a line without an end is the beginning of one of ours, cut while it was written."""
    opening, following = b'{"id":"', b'","token_ids":['
    if not line.startswith(opening):
        return opening.startswith(line)
    text = re.match(rb'(?:[^"\\]|\\.)*', line[len(opening) :])
    rest = line[len(opening) + (text.end() if text else 0) :]
    return rest.startswith(following) or following.startswith(rest) or rest == b"\\"
