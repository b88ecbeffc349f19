"""Why the process of an actor ended, and what it said last: for whoever waited for it, and has only Ray's error.

Ray's error of a driver that is started anew does not say why; Ray's own tables do, and the log of the process is a file
on its node.
"""

import glob
import os
import time
from typing import Any

import ray

from ..ray_session.ray_internals import ActorProcess, end_of_worker, logs_folder, process_of
from .failure import reason_of_death

_KNOWN_S, _LOOK_S = 3.0, 0.1  # Ray's tables learn of an end a moment after its callers do
_TAIL_BYTES, _LINES, _LINE = 8192, 3, 200
# Ray's own marks in the logs of its workers.
_MARKS = (":job_id:", ":actor_name:", ":task_name:")


class ActorWatch:
    """The process of an actor from now on: Ray forgets it as soon as it starts the actor anew.

    Args:
        actor: to be explained, should it end.
    """

    def __init__(self, actor: Any):
        self._actor = actor
        self._process: ActorProcess | None = None
        self.look()

    def look(self) -> None:
        """To be called now and then: a process that has not been there yet may be."""
        self._process = self._process or process_of(self._actor)

    def how_it_ended(self, with_last_words: bool = False) -> str:
        """A sentence, or nothing where Ray does not know of an end; takes a moment.

        Args:
            with_last_words: go on with what the process said last.
        """
        deadline = time.monotonic() + _KNOWN_S
        while not (said := end_of_worker(self._actor, self._process)) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if not said:
            return ""
        reason = reason_of_death(said).rstrip(".")
        if self._process is None:
            return f"its process ended: {reason}"
        words = f"; {last_words(self._process)}" if with_last_words else ""
        return f"its process {self._process.pid} on {self._process.address} ended: {reason}{words}"


def last_words(process: ActorProcess) -> str:
    """The last lines of a process's standard error, or where they are.

    What a process writes is not trusted: characters that a terminal acts upon are escaped.
    """
    logs = glob.glob(os.path.join(logs_folder(), f"worker-*-{process.pid}.err"))
    if process.node_id != ray.get_runtime_context().get_node_id() or not logs:
        return f"its log is worker-*-{process.pid}.err in Ray's log folder on {process.address}"
    try:
        log = max(logs, key=os.path.getmtime)
        with open(log, "rb") as file:
            file.seek(max(0, os.path.getsize(log) - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError as error:  # it explains a failure, and must not become one
        return f"its log cannot be read: {error}"
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(_MARKS)]
    if not lines:
        return f"it said nothing ({log} is empty)"
    return f"it said last (in {log}): " + " | ".join(_printable(line)[-_LINE:] for line in lines[-_LINES:])


def _printable(line: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
