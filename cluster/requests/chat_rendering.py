"""Chats as the texts that a model's chat template makes of them, within a bound of time, memory and size."""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from ...dispatch.errors import ConfigError
from ...workers.observing.printable import printable

RENDER_S = 10.0
# Templates add a few thousand characters of their own, and may quote a message more than once.
_MAX_OWN_CHARS, _MAX_FACTOR = 1 << 22, 16
_CHILD = Path(__file__).with_name("render_child.py")
_LONGEST_ERROR = 400
# To import Transformers takes seconds, on a busy machine or a slow file system many.
_START_S = 120.0
# Beyond its own timer.
_MARGIN_S = 10.0
_END_S = 1.0


class ChatRenderer:
    """Renders in a process of its own (`render_child`), which is started for the first chat and kept for the next.

    Threads take turns. A process that was forked off starts its own.
    """

    def __init__(self, seconds: float = RENDER_S):
        self._seconds = seconds
        self._lock = threading.Lock()
        self._child: _Child | None = None
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
            answer = self._asked(request)
        if "text" in answer:
            return str(answer["text"])
        message = " ".join(printable(answer["message"]).split())
        raise ConfigError(f"{answer['kind']}: {message:.{_LONGEST_ERROR}}")

    def close(self) -> None:
        """End the process, if it runs; the next chat starts another."""
        child, self._child = self._child, None
        if child is None or self._owner != os.getpid():
            return
        child.process.kill()
        child.process.wait()
        child.connection.close()
        child.errors.close()

    def _asked(self, request: str) -> dict[str, Any]:
        """The answer. What interrupts the wait ends the process: a later request would be answered with this one's.

        Raises:
            ConfigError: there is none.
        """
        answer = None
        try:
            child = self._running()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                child.connection.send_bytes(request.encode())
            answer = child.answer(self._seconds + _MARGIN_S)
            if answer is None:
                raise ConfigError(self._how_it_ended(child))
            return answer
        finally:
            if answer is None:
                self.close()

    def _running(self) -> "_Child":
        if self._child is None or self._owner != os.getpid() or self._child.process.poll() is not None:
            self._child, self._owner = _Child(), os.getpid()
            if self._child.answer(_START_S) is None:
                raise ConfigError(f"no process that renders it could be started: {self._child.said()}")
        return self._child

    def _how_it_ended(self, child: "_Child") -> str:
        code = child.ended_with()
        if code is not None and code >= 0:
            return f"the process that renders it ended with exit code {code}: {child.said()}"
        how = "no answer" if code is None else f"exit code {code}"
        return f"it did not end within {self._seconds:g} s, or needs more memory than it may have ({how})"


class _Child:
    """The process, and the connection to it."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(_CHILD), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self.errors,
                stderr=self.errors,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # an interrupt is its parent's to handle
            )
        except OSError as error:
            self.connection.close()
            self.errors.close()
            raise ConfigError(f"no process that renders it could be started: {error}") from error
        finally:
            theirs.close()

    def answer(self, within_s: float) -> dict[str, Any] | None:
        """The next answer, or `None` where the process ended, or gave none in time."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            if self.connection.poll(within_s):
                answer: dict[str, Any] = json.loads(self.connection.recv_bytes())
                return answer
        return None

    def ended_with(self) -> int | None:
        """Its exit code; `None` where it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(_END_S)
        return None

    def said(self) -> str:
        """The last line that it wrote, for people."""
        self.errors.seek(0)
        lines = self.errors.read().decode("utf-8", "replace").strip().splitlines()
        return printable(lines[-1])[:_LONGEST_ERROR] if lines else "it said nothing"


RENDERER = ChatRenderer()
