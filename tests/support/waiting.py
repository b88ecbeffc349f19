"""Waiting for what comes true in a moment, with a bound."""

import time
from collections.abc import Callable
from typing import Any


def holds_in_time(holds: Callable[[], Any], within_s: float) -> bool:
    """Whether it holds before the time is over."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
