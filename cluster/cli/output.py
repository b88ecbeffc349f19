"""The output: one JSON line a request, written as it finishes; a job started again continues it."""

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Set
from pathlib import Path
from types import TracebackType

import msgspec

from ...dispatch.errors import ConfigError, ExpertPoolError
from .object_output import PartsWriter
from .output_line import OutputLine, finished_in, readable_in

_LOCAL = re.compile(r"(?:file|local)://")
_NO_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # of file systems that know no such call
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+._-]*(?:://|::)")


def open_output(output: str) -> "OutputWriter":
    """A writer for a local path (or `file://`), or for any other URL of fsspec.

    Raises:
        ConfigError: nothing can be written there, another run writes it, or it holds what is not this tool's.
    """
    if local := _LOCAL.match(output):
        return CompletionWriter(output[local.end() :])
    return PartsWriter(output) if _URL.match(output) else CompletionWriter(output)


class CompletionWriter:
    """Appends to a JSONL file; knows what it already holds.

    A last line cut short (the machine died while it was written) is dropped, and its request runs again. While it is
    open no other writer may have the file: two runs that continue it side by side would both complete what is left.
    Locks do not bind everyone, so each write and the end compare the file with what this writer left there. Lines are
    not kept in memory: a run that is started again completes what somebody took away.

    Attributes:
        finished: tokens of the prompts that the file holds, by id.

    Raises:
        ConfigError: the file cannot be written, another run writes it, or it holds lines that are not this tool's.
    """

    def __init__(self, path: str):
        self._path = path
        self._new_folders: list[Path] = []
        try:
            self._new_folders = [folder for folder in Path(path).parents if not folder.exists()]
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            if Path(path).exists() and not Path(path).is_file():
                what = "a folder" if Path(path).is_dir() else "no regular file"
                raise ConfigError(f"--output {path}: is {what}; give a file, which a run started again can continue")
            self._is_new = not Path(path).exists()
            # Unbuffered: a line that the disk refused must not be tried again when the file is closed.
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by __exit__)
        except OSError as error:
            raise ConfigError(f"--output {path}: cannot be written: {error.strerror}: {error.filename}") from error
        except ConfigError:
            raise
        except ValueError as error:  # a name that holds a zero byte, or half of a surrogate pair
            raise ConfigError(f"--output {path!r}: cannot be written: {error}") from error
        try:
            self._refuse_second_writer()
            try:
                self.finished, self._size = self._read_finished()
            except OSError as error:
                raise ConfigError(
                    f"--output {path}: cannot be read to be continued: {error.strerror}; give another file"
                ) from error
            self._file.truncate(self._size)
        except BaseException:
            self._file.close()
            raise

    @property
    def finished_ids(self) -> Set[str]:
        """Ids of the requests that are in the output."""
        return self.finished.keys()

    def write(self, line: OutputLine) -> None:
        """Append one line; it is with the operating system when this returns.

        Raises:
            ExpertPoolError: the line did not fit; what was written before stays. Or somebody changed the file.
        """
        self.flush()  # before the line is there: at the end of a line cut by somebody it would be lost with that
        unwritten = memoryview(msgspec.json.encode(line) + b"\n")
        try:
            while unwritten:
                num_written = self._file.write(unwritten)
                self._size += num_written
                unwritten = unwritten[num_written:]
        except OSError as error:
            raise ExpertPoolError(
                f"--output {self._path}: cannot be written any further: {error.strerror}; it holds "
                f"{len(self.finished)} finished requests; make room and run again to complete it"
            ) from error
        except BaseException:  # an interrupt, after which nobody knows how much was written
            self._size = os.fstat(self._file.fileno()).st_size
            raise
        self.finished[line.id] = line.num_prompt_tokens

    def flush(self) -> None:
        """Make sure that the file is there as it was left; every line was handed to the operating system already.

        Raises:
            ExpertPoolError: the file was removed, replaced, cut or written to by somebody else meanwhile.
        """
        try:
            there, own = os.stat(self._path), os.fstat(self._file.fileno())
            is_there = os.path.samestat(there, own)
        except OSError:
            is_there = False
        if not is_there:
            raise ExpertPoolError(
                f"--output {self._path}: was removed or replaced while this run wrote it, and with it "
                f"{len(self.finished)} finished requests; run again to complete them"
            )
        if own.st_size != self._size:
            raise self._changed(f"it has {own.st_size} bytes, and this run left {self._size}")

    def verify(self) -> None:
        """Read the file again: it holds every request that this writer knows as finished.

        Raises:
            ExpertPoolError: it does not, or what was written did not reach the disk.
        """
        self.flush()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            if error.errno not in _NO_FSYNC:
                raise ExpertPoolError(
                    f"--output {self._path}: not all of it reached the disk: {error.strerror}; run again to complete it"
                ) from error
        try:
            held, whole = self._read_finished()
        except ConfigError as error:
            raise self._changed("its contents are not those that this run left") from error
        except OSError as error:
            raise self._unreadable(error) from error
        if whole != self._size or not self.finished.keys() <= held.keys():
            raise self._changed("its contents are not those that this run left")

    def close(self) -> None:
        """An empty file that was not there before does not stay, nor do folders that were made for it."""
        if self._is_new and not self.finished:
            with contextlib.suppress(OSError):
                if os.fstat(self._file.fileno()).st_size == 0:
                    os.unlink(self._path)
                    for folder in self._new_folders:
                        folder.rmdir()
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

    def _read_finished(self) -> tuple[dict[str, int], int]:
        """What the file holds, and the bytes of its whole lines."""
        with open(self._path, "rb") as file:
            return finished_in(file, self._path)

    def _changed(self, how: str) -> ExpertPoolError:
        """Somebody else wrote the file or cut it; says how much of what was finished is gone."""
        way_out = "run again to complete it"
        try:
            held: Set[str] = self._read_finished()[0].keys()
        except OSError as error:
            return self._unreadable(error)
        except ConfigError as error:
            held, way_out = self._read_readable(), f"it cannot be continued: {error}"
        num_gone = len(self.finished.keys() - held)
        return ExpertPoolError(
            f"--output {self._path}: somebody changed it while this run wrote it ({how}): {num_gone} of "
            f"{len(self.finished)} finished requests are no longer there; {way_out}"
        )

    def _read_readable(self) -> Set[str]:
        try:
            with open(self._path, "rb") as file:
                return readable_in(file)
        except OSError:
            return frozenset()

    def _unreadable(self, error: OSError) -> ExpertPoolError:
        return ExpertPoolError(
            f"--output {self._path}: cannot be read back: {error.strerror}; run again to see what it holds"
        )


OutputWriter = CompletionWriter | PartsWriter
