"""Output to a URL of fsspec (`s3://`, `gs://`, `memory://`): a folder of parts, each of them one whole object.

Objects in a store cannot be appended to. So lines are gathered for a few seconds, or until they fill a part, and a part
once written is never touched again; a run that is started again reads all parts and adds its own. No part has the name
of another run's, so two runs on one folder lose nothing, though they would do the same work twice.
"""

import contextlib
import threading
import time
import uuid
from collections.abc import Iterable, Set
from types import TracebackType
from typing import Any

import msgspec

from ...dispatch.errors import ConfigError, ExpertPoolError
from ...workers.observing.printable import told
from .output_line import OutputLine, finished_in, readable_in

PART_S, PART_BYTES, GIVE_UP_S = 10.0, 8 * 1024**2, 60.0


class PartsWriter:
    """Writes parts into a folder; knows what it already holds.

    Args:
        url: of the folder.
        part_s: how long a finished request may wait for others before it is in the store.

    Attributes:
        finished: tokens of the prompts that the parts hold, by id.

    Raises:
        ConfigError: nothing can be written there, or it holds lines that are not this tool's.
    """

    def __init__(self, url: str, part_s: float = PART_S):
        self._url = url
        self._run = uuid.uuid4().hex[:8]
        self._part_s = part_s
        self._parts = 0
        self._part: str | None = None
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._written = 0
        self._failure: Exception | None = None
        self._failing_since = 0.0
        self._lock = threading.Lock()  # of what is pending
        self._uploading = threading.Lock()
        self._due, self._closed = threading.Event(), threading.Event()
        self._folder, self._path = self._open()
        self.finished, self._sizes = self._read_at_first()
        self._probe()
        self._thread = threading.Thread(target=self._keep_flushing, name="output parts", daemon=True)
        self._thread.start()

    @property
    def finished_ids(self) -> Set[str]:
        """Ids of the requests that are in the output."""
        return self.finished.keys()

    def write(self, line: OutputLine) -> None:
        """Take one line; it is in the store after at most `part_s`, a `flush` or `close`.

        Raises:
            ExpertPoolError: no part could be written for a minute.
        """
        if self._failure is not None and time.monotonic() - self._failing_since > GIVE_UP_S:
            raise self._error(self._failure)
        encoded = msgspec.json.encode(line) + b"\n"
        with self._lock:
            self._pending.append(encoded)
            self._pending_bytes += len(encoded)
            full = self._pending_bytes >= PART_BYTES
        self.finished[line.id] = line.num_prompt_tokens
        if full:
            self._due.set()

    def flush(self) -> None:
        """Write what is pending as a part of its own, now.

        Raises:
            ExpertPoolError: it could not be written.
        """
        try:
            self._upload()
        except Exception as error:  # each kind of store has its own
            raise self._error(error) from error

    def verify(self) -> None:
        """List the parts again: those that were read and written are there, with their sizes.

        They are read anew, at what that costs, only where the list is another: a run that gathers parts into one loses
        nothing.

        Raises:
            ExpertPoolError: finished requests are no longer in the folder, or it cannot be listed.
        """
        self.flush()
        spoilt: ConfigError | None = None
        try:
            self._folder.invalidate_cache()
            there = self._parts_there()
            if self._sizes.items() <= there.items():
                return
            try:
                held: Set[str] = self._read_finished(there).keys()
            except ConfigError as error:
                held, spoilt = self._read_readable(), error
        except Exception as error:
            raise ExpertPoolError(
                f"--output {self._url}: cannot be read back: {told(error)}; run again to see what it holds"
            ) from error
        num_gone = len(self.finished.keys() - held)
        if num_gone or spoilt:
            way_out = f"it cannot be continued: {spoilt}" if spoilt else "run again to complete it"
            raise ExpertPoolError(
                f"--output {self._url}: somebody removed or replaced parts while this run wrote there: {num_gone} of "
                f"{len(self.finished)} finished requests are no longer there; {way_out}"
            )
        self._sizes = there

    def close(self) -> None:
        """Write what is pending, and stop."""
        self._closed.set()
        self._due.set()
        self._thread.join()
        self.flush()

    def __enter__(self) -> "PartsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Whatever else ends the `with` block is not hidden by what could not be written."""
        with contextlib.nullcontext() if kind is None else contextlib.suppress(ExpertPoolError):
            self.close()

    def _open(self) -> tuple[Any, str]:
        try:
            import fsspec

            filesystem, path = fsspec.core.url_to_fs(self._url)
        except Exception as error:  # a package is missing, no store has that scheme, or what each kind of store raises
            raise ConfigError(f"--output {self._url}: no output can be opened there: {told(error)}") from error
        return filesystem, path.rstrip("/")

    def _read_at_first(self) -> tuple[dict[str, int], dict[str, int]]:
        try:
            self._folder.invalidate_cache()
            if self._folder.isfile(self._path):
                raise ConfigError(f"--output {self._url}: is one object, and the parts of an output need a folder")
            sizes = self._parts_there()
            return self._read_finished(sizes), sizes
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"--output {self._url}: cannot be read: {told(error)}") from error

    def _read_finished(self, parts: Iterable[str]) -> dict[str, int]:
        """What these parts hold; raises what stores raise.

        Raises:
            ConfigError: a line that is not this tool's.
        """
        finished: dict[str, int] = {}
        for part in parts:
            with self._folder.open(f"{self._path}/{part}", "rb") as file:
                finished |= finished_in(file, f"{self._url}, {part}")[0]
        return finished

    def _read_readable(self) -> Set[str]:
        ids: set[str] = set()
        for part in self._parts_there():
            with self._folder.open(f"{self._path}/{part}", "rb") as file:
                ids |= readable_in(file)
        return ids

    def _parts_there(self) -> dict[str, int]:
        """Sizes of the parts, in their order. Listed, and not matched to a pattern, as which a folder might be read."""
        try:
            there = self._folder.ls(self._path, detail=True)
        except FileNotFoundError:
            return {}
        sizes = {part["name"].rpartition("/")[2]: part.get("size", -1) for part in there}
        return {name: sizes[name] for name in sorted(sizes) if name.endswith(".jsonl")}

    def _probe(self) -> None:
        """Find out before anything starts whether parts can be written."""
        probe = f"{self._path}/{self._run}.probe"
        try:
            self._folder.makedirs(self._path, exist_ok=True)
            self._folder.pipe_file(probe, b"")
            self._folder.rm_file(probe)
        except Exception as error:
            raise ConfigError(f"--output {self._url}: cannot be written: {told(error)}") from error

    def _keep_flushing(self) -> None:
        """Upload in the background; what fails stays pending and is tried again, with what came meanwhile."""
        while not self._closed.is_set():
            self._due.wait(self._part_s)
            self._due.clear()
            if self._closed.is_set():
                return
            try:
                self._upload()
                self._failure = None
            except Exception as error:
                if self._failure is None:
                    self._failing_since = time.monotonic()
                self._failure = error

    def _upload(self) -> None:
        """Write what is pending as one part; where that fails it stays pending."""
        with self._uploading:
            with self._lock:
                lines = list(self._pending)
            if not lines:
                return
            # In order of time; kept until it is written: what a store took but did not confirm is then written over.
            self._part = self._part or f"part-{time.time_ns() // 1_000_000:014d}-{self._run}-{self._parts:06d}.jsonl"
            content = b"".join(lines)
            self._folder.pipe_file(f"{self._path}/{self._part}", content)
            self._sizes[self._part] = len(content)
            self._part = None
            self._parts += 1
            self._written += len(lines)
            with self._lock:
                del self._pending[: len(lines)]
                self._pending_bytes = sum(map(len, self._pending))

    def _error(self, error: Exception) -> ExpertPoolError:
        return ExpertPoolError(
            f"--output {self._url}: cannot be written any further: {told(error)}; this run wrote {self._written} "
            "finished requests there; run again to complete it"
        )
