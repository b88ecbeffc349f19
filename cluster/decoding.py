"""What a user wrote, decoded: refusals name the setting, the value that was seen, and what would do."""

import difflib
import json
import re
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec
import yaml

from ..dispatch.errors import ConfigError

T = TypeVar("T")

_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing",
}
_LONGEST_VALUE = 60
_MERGE_TAG = "tag:yaml.org,2002:merge"


def decode(settings: dict[str, Any], kind: type[T], source: str) -> T:
    """Settings as the struct that holds them.

    Args:
        settings: as read from a file, nested like the struct.
        kind: of the struct.
        source: what was read, for messages.

    Raises:
        ConfigError: an unknown key (with the nearest known one), a value of another type, or one out of bounds.
    """
    refuse_unknown_keys(settings, kind, source)
    try:
        return msgspec.convert(settings, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_explained(error, settings, kind)}") from error
    except UnicodeEncodeError as error:
        name, value = next(_broken_texts(settings), ("a text", ""))
        raise ConfigError(f"{source}: {name}={value!r:.{_LONGEST_VALUE}} is no valid text: {error.reason}") from error


def _broken_texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Texts that have no UTF-8 form, as half of a surrogate pair in JSON makes them, by the settings' names."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _broken_texts(one, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _broken_texts(one, f"{name}[{index}]")
    elif isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        yield name, value


def read_mapping(path: str, source: str) -> dict[str, Any]:
    """A YAML or JSON file of settings.

    Raises:
        ConfigError: unreadable, neither of the two, no mapping, or a key that is there twice.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}") from error
    except ValueError as error:  # a name that holds a zero byte
        raise ConfigError(f"{source!r}: {error}") from error
    try:
        settings = _parsed(content)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    except Exception as error:  # whatever the constructors of YAML's own types raise
        raise ConfigError(f"{source}: neither YAML nor JSON: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        found = "nothing" if settings is None else type(settings).__name__
        raise ConfigError(f"{source}: holds {found}, not a mapping of settings")
    return settings


def parse_json(text: str | bytes) -> Any:
    """JSON in which no object has a key twice: which of the two was meant, nobody knows.

    Raises:
        ConfigError: a key that is there twice.
        ValueError: not JSON.
        RecursionError: nested too deeply.
    """
    return json.loads(text, object_pairs_hook=_unique)


def refuse_unknown_keys(settings: dict[str, Any], kind: Any, source: str, prefix: str = "") -> None:
    """Raise on a key that `kind` does not have, naming the nearest one that it has; looks into sections."""
    known = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
    for key, value in settings.items():
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1, cutoff=0.5)
            hint = f"did you mean {prefix}{nearest[0]}?" if nearest else f"known: {', '.join(known)}"
            raise ConfigError(f"{source}: unknown key {prefix}{key}: {hint}")
        section = _struct_in(known[key])
        if section is not None and isinstance(value, dict):
            refuse_unknown_keys(value, section, source, f"{prefix}{key}.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"the key {key!r} is there twice")
        found[key] = value
    return found


def _parsed(content: bytes) -> Any:
    """YAML takes most JSON, but no tabs between values, and `1e3` for a text."""
    try:
        return parse_json(content)
    except ConfigError:
        raise
    except (ValueError, RecursionError):
        return yaml.load(content, _UniqueKeys)


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that a mapping has twice, as `parse_json` does; what `<<` brings along may be there again."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE_TAG:
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"the key {key!r} is there twice, the second time in line {line}")
            seen.add(key if isinstance(key, Hashable) else id(key))
        return super().construct_mapping(node, deep)


def _explained(error: msgspec.ValidationError, settings: dict[str, Any], kind: Any) -> str:
    if isinstance(error.__cause__, ConfigError):
        return str(error.__cause__)  # out of bounds: it names the setting itself
    text, _, place = str(error).partition(" - at `$")
    steps = list(_steps(place))
    name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")
    value = f"{_value_at(settings, steps)!r:.{_LONGEST_VALUE}}"
    if match := re.fullmatch(r"Expected `(.+)`, got `.+`", text):
        wanted = " or ".join(_WORDS.get(word, word) for word in match[1].split(" | "))
        # Of a mapping's values msgspec does not say which.
        what = f"every value of {name}" if place.endswith("[...]`") else name
        return f"{name}={value}: set {what} to {wanted}"
    if text.startswith("Invalid enum value") and (allowed := _choices(kind, steps)):
        return f"{name}={value}: set {name} to one of {', '.join(map(str, allowed))}"
    if match := re.fullmatch(r"Object contains unknown field `(.+)`", text):
        return f"{name}={value}: unknown key {match[1]}: remove it"
    if match := re.fullmatch(r"Object missing required field `(.+)`", text):
        return f"{name}{'.' if name else ''}{match[1]} is missing: set it"
    return f"{name}={value}: {text}" if name else text


def _steps(place: str) -> Iterator[str | int]:
    """`.worker.threads` or `.prompt_token_ids[1]` in parts; what msgspec leaves open (`[...]`) ends them."""
    for name, index in re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", place):
        if index == "...":
            return
        yield name or int(index)


def _value_at(settings: Any, steps: list[str | int]) -> Any:
    for step in steps:
        settings = settings[step]
    return settings


def _choices(kind: Any, steps: list[str | int]) -> tuple[Any, ...]:
    """Of the literals that a setting may be."""
    for step in steps:
        struct = _struct_in(kind)
        if struct is None:
            return ()
        kind = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}[str(step)]
    literals = (kind, *get_args(kind))
    return tuple(value for one in literals if get_origin(one) is Literal for value in get_args(one))


def _struct_in(annotation: Any) -> Any:
    """The struct type that an annotation stands for, alone or beside `None`."""
    candidates = get_args(annotation) if get_origin(annotation) is not None else (annotation,)
    structs = [kind for kind in candidates if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    return structs[0] if structs else None
