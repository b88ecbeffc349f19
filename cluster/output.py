"""The output file: one JSON line a request, written as it finishes; a job started again continues it."""

import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec

from ..dispatch.errors import ConfigError
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

    A last line cut short (the machine died while it was written) is dropped, and its request runs again.

    Raises:
        ConfigError: the file cannot be written, or holds lines that are not this tool's.
    """

    def __init__(self, path: str):
        self._path = path
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(path, "a+b")  # noqa: SIM115 (closed by __exit__)
        except OSError as error:
            raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from error
        self.finished_ids = self._read_finished()

    def write(self, line: OutputLine) -> None:
        """Append one line; it is with the operating system when this returns."""
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        self.finished_ids.add(line.id)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "CompletionWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_finished(self) -> set[str]:
        self._file.seek(0)
        finished: set[str] = set()
        whole = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                finished.add(msgspec.json.decode(line, type=OutputLine).id)
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"--output {self._path}, line {number}: not a completion of this tool ({error}); "
                    "give another file, or remove this one"
                ) from error
            whole += len(line)
        if whole < os.fstat(self._file.fileno()).st_size:
            self._file.truncate(whole)
        self._file.seek(0, os.SEEK_END)
        return finished
