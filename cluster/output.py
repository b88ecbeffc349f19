"""The output file: one JSON line a request, written as it finishes; a job started again continues it."""

import fcntl
import re
from pathlib import Path
from types import TracebackType

import msgspec

from ..dispatch.errors import ConfigError, ExpertPoolError
from ..workers.request import FinishReason


class OutputLine(msgspec.Struct, frozen=True):
    """One finished request, as the output file holds it."""

    id: str
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_completion_tokens: int


class CompletionWriter:
    """Appends to a JSONL file; knows which ids it already holds.

    A last line cut short (the machine died while it was written) is dropped, and its request runs again. While it is
    open no other writer may have the file: two runs that continue it side by side would both complete what is left.

    Raises:
        ConfigError: the file cannot be written, another run writes it, or it holds lines that are not this tool's.
    """

    def __init__(self, path: str):
        self._path = path
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            if Path(path).exists() and not Path(path).is_file():
                raise ConfigError(f"--output {path}: is not a regular file, which it has to be to be continued")
            # Unbuffered: a line that the disk refused must not be tried again when the file is closed.
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by __exit__)
        except OSError as error:
            raise ConfigError(f"--output {path}: cannot be written: {error.strerror}: {error.filename}") from error
        try:
            self._refuse_second_writer()
            self.finished_ids = self._read_finished()
        except BaseException:
            self._file.close()
            raise

    def write(self, line: OutputLine) -> None:
        """Append one line; it is with the operating system when this returns.

        Raises:
            ExpertPoolError: the line did not fit, or the file is gone; what was written before stays.
        """
        unwritten = memoryview(msgspec.json.encode(line) + b"\n")
        try:
            while unwritten:
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as error:
            raise ExpertPoolError(
                f"--output {self._path}: cannot be written any further: {error.strerror}; it holds "
                f"{len(self.finished_ids)} finished requests; make room and run again to complete it"
            ) from error
        self.finished_ids.add(line.id)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "CompletionWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _refuse_second_writer(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"--output {self._path}: another run is writing it; wait, or give another file"
            ) from error
        except OSError:
            return  # some network file systems know no locks

    def _read_finished(self) -> set[str]:
        finished: set[str] = set()
        whole = 0
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    if not _is_torn_line(line):
                        raise ConfigError(
                            f"--output {self._path}, line {number}: not a completion of this tool; give another file, "
                            "or remove this one"
                        )
                    self._file.truncate(whole)
                    break
                try:
                    finished.add(msgspec.json.decode(line, type=OutputLine).id)
                except msgspec.DecodeError as error:
                    raise ConfigError(
                        f"--output {self._path}, line {number}: not a completion of this tool ({error}); "
                        "give another file, or remove this one"
                    ) from error
                whole += len(line)
        return finished


def _is_torn_line(line: bytes) -> bool:
    """Whether a line without an end is the beginning of one of ours, cut while it was written."""
    opening, following = b'{"id":"', b'","token_ids":['
    if not line.startswith(opening):
        return opening.startswith(line)
    text = re.match(rb'(?:[^"\\]|\\.)*', line[len(opening) :])
    rest = line[len(opening) + (text.end() if text else 0) :]
    return rest.startswith(following) or following.startswith(rest) or rest == b"\\"
