"""Tables kept in a file between starts: rank 0 reads and writes it, and the others get what rank 0 found."""

import os
from pathlib import Path

import msgspec

from ..errors import ConfigError
from ..libraries import versions_of
from ..probe import HostGroup
from .tuning import TableRow

# What a path, its home folder and its content may raise.
_FILE_ERRORS = (OSError, RuntimeError, ValueError, msgspec.DecodeError)
_LIBRARIES = ("torch", "triton", "flashinfer-python", "quack-kernels", "nvidia-cutlass-dsl")


class _Found(msgspec.Struct):
    """What rank 0 made of its file: the rows it holds under a key, or why it could not."""

    rows: tuple[TableRow, ...] | None = None
    problem: str | None = None


class TableCache:
    """The tables of one file, by what they hold for.

    Args:
        path: of the file, on rank 0's node; equal on every rank.
        group: all ranks.
    """

    def __init__(self, path: str, group: HostGroup):
        self._path = path
        self._group = group

    def find(self, key: str) -> tuple[TableRow, ...] | None:
        """The table under this key, as rank 0's file has it; collective.

        Raises:
            ConfigError: on every rank alike, where the file cannot be read.
        """
        found = self._group.from_first(self._read_row(key) if self._group.rank == 0 else None, _Found)
        if found.problem is not None:
            raise ConfigError(found.problem)
        return found.rows

    def keep(self, key: str, rows: tuple[TableRow, ...]) -> None:
        """Write the table under this key; collective.

        Raises:
            ConfigError: on every rank alike, where the file cannot be written.
        """
        found = self._group.from_first(
            _Found(problem=self._write(key, rows)) if self._group.rank == 0 else None, _Found
        )
        if found.problem is not None:
            raise ConfigError(found.problem)

    def _read_row(self, key: str) -> "_Found":
        try:
            return _Found(self._read().get(key))
        except _FILE_ERRORS as error:
            problem = f"tuning.cache={self._path!r} cannot be read: {error}; remove it, or name another file"
            return _Found(problem=problem)

    def _read(self) -> dict[str, tuple[TableRow, ...]]:
        path = Path(self._path).expanduser()
        if not path.exists():
            return {}
        return msgspec.json.decode(path.read_bytes(), type=dict[str, tuple[TableRow, ...]])

    def _write(self, key: str, rows: tuple[TableRow, ...]) -> str | None:
        try:
            tables = self._read() | {key: rows}
            path = Path(self._path).expanduser()
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f"{path.name}.{os.getpid()}")
            unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(tables), indent=1))
            unfinished.replace(path)
        except _FILE_ERRORS as error:
            return f"tuning.cache={self._path!r} cannot be written: {error}; name a file that can be"
        return None


def library_versions() -> str:
    """What computes paths, with versions; those that are not installed are left out."""
    return versions_of(_LIBRARIES)
