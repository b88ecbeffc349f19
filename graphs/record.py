"""What a recording froze, field by field, and how the fields of several ranks compare."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..dispatch.collective_call import CollectiveCall
from ..dispatch.expert_path import HeldAlike
from .plan import CaptureEntry


class BufferShape(msgspec.Struct, frozen=True):
    """Shape and dtype of one static buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class RecordedGeometry(msgspec.Struct, frozen=True):
    """Everything a recorded graph freezes; equal on every rank in every field.

    Attributes:
        kind, bucket, tokens_per_request, layer: of the entry.
        global_num_tokens_cpu: counts per DP rank; `None` where nothing is gathered.
        dp_buffer_length: rows of the gathered buffer; `None` where nothing is gathered.
        padding_mode: by name.
        runtime_max_tokens_per_rank: rows a rank handed to the dispatcher.
        static_buffers: the input buffers.
        held: the way to the experts.
        capture_depth: captures this one runs inside.
        collectives: what the step exchanges, in order.
    """

    kind: str
    bucket: int
    tokens_per_request: int
    layer: int
    global_num_tokens_cpu: tuple[int, ...] | None
    dp_buffer_length: int | None
    padding_mode: str
    runtime_max_tokens_per_rank: int
    static_buffers: tuple[BufferShape, ...]
    held: HeldAlike
    capture_depth: int
    collectives: tuple[CollectiveCall, ...]

    @property
    def entry(self) -> CaptureEntry:
        return CaptureEntry(self.kind, self.bucket, self.tokens_per_request, self.layer)


def differences(values: Mapping[str, Any]) -> list[str]:
    """Where frozen structs (or mappings) of several holders differ: one sentence a field, with holders and values.

    Args:
        values: a struct or mapping by the name of its holder, all of one type.
    """
    found: list[str] = []
    _compare("", values, found)
    return found


def _compare(path: str, values: Mapping[str, Any], found: list[str]) -> None:
    contents = list(values.values())
    if all(content == contents[0] for content in contents):
        return
    if all(isinstance(content, msgspec.Struct) for content in contents) and len({type(c) for c in contents}) == 1:
        for name in contents[0].__struct_fields__:
            parts = {holder: getattr(value, name) for holder, value in values.items()}
            # What is held of the way to the experts goes by its own names: `capacity`, `dispatcher`.
            is_held = isinstance(next(iter(parts.values())), HeldAlike)
            _compare(path if is_held else _join(path, name), parts, found)
    elif all(isinstance(content, Mapping) for content in contents):
        for name in sorted({key for content in contents for key in content}):
            _compare(_join(path, str(name)), {holder: value.get(name) for holder, value in values.items()}, found)
    elif _are_sequences(contents):
        for index in range(max(map(len, contents))):
            parts = {holder: value[index] if index < len(value) else None for holder, value in values.items()}
            _compare(f"{path}[{index}]", parts, found)
    else:
        listed = ", ".join(f"{holder}: {_readable(value)}" for holder, value in values.items())
        found.append(f"{path} differs ({listed})")


def _are_sequences(contents: Sequence[Any]) -> bool:
    return all(isinstance(content, (tuple, list)) for content in contents)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _readable(value: Any) -> str:
    if isinstance(value, msgspec.Struct):
        return " ".join(str(getattr(value, name)) for name in value.__struct_fields__)
    return "none" if value is None else str(value)
