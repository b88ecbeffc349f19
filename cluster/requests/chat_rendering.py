"""Chats as the texts that a model's chat template makes of them, within a bound of time, memory and size."""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from ...dispatch.errors import ConfigError
from ...workers.observing.printable import printable

RENDER_S = 10.0
# Templates add a few thousand characters of their own, and may quote a message more than once.
_MAX_OWN_CHARS, _MAX_FACTOR = 1 << 22, 16
_CHILD = Path(__file__).with_name("render_child.py")
_LONGEST_ERROR = 400


class ChatRenderer:
    """Renders in a process of its own (`render_child`), which is started for the first chat and kept for the next.

    Threads take turns. A process that was forked off starts its own.
    """

    def __init__(self, seconds: float = RENDER_S):
        self._seconds = seconds
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None
        self._owner = 0
        atexit.register(self.close)

    def render(self, template: str, messages: list[dict[str, str]], special_tokens: dict[str, Any]) -> str:
        """What Transformers makes of one chat, up to where the model's answer begins.

        Args:
            template: in Jinja.
            messages: each with its role and content.
            special_tokens: what the template may name, as the tokenizer has it.

        Raises:
            ConfigError: the template raises, does not end in time, or needs or writes more than it may.
        """
        max_chars = _MAX_OWN_CHARS + _MAX_FACTOR * sum(len(message["content"]) for message in messages)
        request = json.dumps(
            {
                "template": template,
                "messages": messages,
                "special_tokens": special_tokens,
                "seconds": self._seconds,
                "max_chars": max_chars,
            }
        )
        with self._lock:
            line, how_it_ended = self._asked(request)
        if not line:
            raise ConfigError(
                f"it did not end within {self._seconds:g} s, or needs more memory than it may have ({how_it_ended})"
            )
        answer = json.loads(line)
        if "text" in answer:
            return str(answer["text"])
        message = " ".join(printable(answer["message"]).split())
        raise ConfigError(f"{answer['kind']}: {message:.{_LONGEST_ERROR}}")

    def close(self) -> None:
        """End the process, if it runs; the next chat starts another."""
        child, self._child = self._child, None
        if child is None or self._owner != os.getpid():
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _asked(self, request: str) -> tuple[str, str]:
        """The answer, or an empty one and how the process ended. What interrupts the wait ends the process: a later
        request would be answered with this one's text."""
        child = self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        line = ""
        try:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(request + "\n")
                child.stdin.flush()
            line = child.stdout.readline()
            if line:
                return line, ""
            return "", f"exit code {child.wait()}"
        finally:
            if not line:
                self.close()

    def _running(self) -> subprocess.Popen[str]:
        if self._child is None or self._owner != os.getpid() or self._child.poll() is not None:
            self._child = subprocess.Popen(
                [sys.executable, "-P", str(_CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # an interrupt is this process's to handle
            )
            self._owner = os.getpid()
        return self._child


RENDERER = ChatRenderer()
