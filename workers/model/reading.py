"""Files of a model folder as libraries read them: whatever those raise is said of the file, and of the key in it."""

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...dispatch.errors import CheckpointError
from ..observing.printable import printable, told

Settings = dict[str, Any]
_SEARCH_S = 5.0
_LONGEST_VALUE = 60


@contextlib.contextmanager
def reading(
    path: str, problem: str, works: Callable[[Settings], Any] | None = None, file: str = "config.json"
) -> Iterator[None]:
    """Reads a user's file by a library: what that raises, of whatever type, is an error in the file.

    Args:
        path: the model folder.
        problem: what is wrong if something is raised, as it follows the folder's name in the message.
        works: raises where settings like those of the folder's file have the problem too. With it the message names
            the key that is to blame, where the library does not.
        file: with those settings, in JSON.

    Raises:
        CheckpointError: names folder, file, what was raised and, where it is found, the key.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"model={path!r}: {problem}: {told(error)}{_blamed(Path(path) / file, error, works)}"
        ) from error


def _blamed(file: Path, error: Exception, works: Callable[[Settings], Any] | None) -> str:
    """The key of a file without which it works, sought for a few seconds; empty where the error names one."""
    if works is None:
        return ""
    try:
        settings = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return ""
    if not isinstance(settings, dict) or any(
        re.search(rf"[`'\"]{re.escape(key)}[`'\"]", str(error)) for key in settings
    ):
        return ""
    try:
        works(settings)
    except Exception:
        pass  # it has the problem, which one of its keys may make
    else:
        return ""
    until = time.monotonic() + _SEARCH_S
    for key, value in settings.items():
        if time.monotonic() > until:
            break
        try:
            works({name: setting for name, setting in settings.items() if name != key})
        except Exception:
            continue
        return printable(f"; it would work without {key}={value!r:.{_LONGEST_VALUE}}: look there first")
    return ""
