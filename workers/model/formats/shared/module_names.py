"""Which modules a list of a checkpoint's declarations names: three manners of writing such lists.

A module is named as in the files: what stands before `.weight`. A list that cannot be read is found by `list_problems`
before anything is looked up in it.
"""

import functools
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

REGULAR = "re:"
Names = Callable[[Sequence[str], str], bool]


def as_transformers(patterns: Sequence[str], module: str) -> bool:
    """Transformers' manner: a regular expression for the start of a name up to the end of a part, or a name's end."""
    return any(_bounded(pattern).match(module) or module.endswith(pattern) for pattern in patterns)


def as_modelopt(patterns: Sequence[str], module: str) -> bool:
    """ModelOpt's manner: the name of the module or of one that it is in, with `*` and `?`."""
    parts = module.split(".")
    names = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def as_compressed_tensors(patterns: Sequence[str], module: str) -> bool:
    """The manner of compressed-tensors: the name itself, or `re:` and a regular expression from its start."""
    return any(
        _compiled(pattern.removeprefix(REGULAR)).match(module) is not None
        if pattern.startswith(REGULAR)
        else pattern == module
        for pattern in patterns
    )


def list_problems(setting: str, given: Any, is_regular: Callable[[str], bool]) -> list[str]:
    """What is wrong with a list of patterns.

    Args:
        setting: its name, for messages.
        given: the list; `None` where there is none.
        is_regular: which of its patterns are regular expressions.
    """
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(one, str) and one for one in given):
        return [f"{setting}={given!r:.60} is no list of names of modules"]
    return [
        f"{setting} has {one!r:.60}, which is no pattern ({why})" for one in given if (why := _why(one, is_regular))
    ]


def _why(pattern: str, is_regular: Callable[[str], bool]) -> str | None:
    try:
        re.compile(pattern.removeprefix(REGULAR)) if is_regular(pattern) else None
    except re.error as error:
        return str(error)
    return None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _bounded(pattern: str) -> re.Pattern[str]:
    """`layers.1` is the start of `layers.1.mlp` and not of `layers.11.mlp`."""
    return _compiled(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))")
