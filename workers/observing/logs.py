"""Log lines of a pool's processes: `key=value` with pool, rank and step, on stderr, where `ray logs` finds them."""

import logging
import sys
import time
from collections.abc import Callable
from typing import Literal

LogLevel = Literal["debug", "info", "warning", "error"]

_PACKAGE = __name__.partition(".workers")[0]


class KeyValueFormatter(logging.Formatter):
    """One line a record: `time=... level=... pool=... rank=... step=... logger=... message="..."`.

    Args:
        pool: the pool's name.
        rank: which rank, or `driver`.
        step: iterations of the step loop so far; `None` before there is one.
    """

    def __init__(self, pool: str, rank: int | str, step: Callable[[], int | None]):
        super().__init__()
        self.converter = time.gmtime
        self._pool = pool
        self._rank = rank
        self._step = step

    def format(self, record: logging.LogRecord) -> str:
        step = self._step()
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        pairs = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "pool": self._pool,
            "rank": str(self._rank),
            "step": "-" if step is None else str(step),
            "logger": record.name.removeprefix(f"{_PACKAGE}."),
            "message": message,
        }
        return " ".join(f"{key}={_quoted(value)}" for key, value in pairs.items())


def configure_logs(pool: str, rank: int | str, step: Callable[[], int | None], level: LogLevel) -> None:
    """Have this process's package log in that form; called once in each rank and in the driver."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(KeyValueFormatter(pool, rank, step))
    package = logging.getLogger(_PACKAGE)
    package.handlers[:] = [handler]
    package.setLevel(level.upper())
    package.propagate = False


def _quoted(value: str) -> str:
    """As it is where it is one plain word, else in quotes on one line."""
    if value and not any(character.isspace() or character in '="\\' for character in value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'
