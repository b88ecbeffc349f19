"""What starts measured, kept in a file for later ones: rank 0 reads and writes it, and the others get what it found."""

import logging
import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..errors import ConfigError
from ..libraries import versions_of
from ..probe import HostGroup

logger = logging.getLogger(__name__)

# What a path, its home folder and its content may raise.
_FILE_ERRORS = (OSError, RuntimeError, ValueError, msgspec.DecodeError)
_LIBRARIES = ("torch", "triton", "flashinfer-python", "quack-kernels", "nvidia-cutlass-dsl")
_DEFAULT = Path("expert_pool") / "measured.json"
_MOST_KEPT = 200  # those of code that is gone are never found again

Value = TypeVar("Value")


class _Found(msgspec.Struct):
    """What rank 0 made of its file: the JSON that it holds under a key, or why it could not."""

    value: bytes | None = None
    problem: str | None = None


class KeptMeasurements:
    """The measurements of one file, by what they hold for. All methods are collective.

    Args:
        path: of the file, on rank 0's node; `None`: one in the user's cache folder there, which nobody asked for: a
            start goes on without it where it cannot be read or written, and says so.
        basis: what all measurements hold for: GPUs, versions, code; equal on every rank, as the path is.
        group: all ranks.
    """

    def __init__(self, path: str | None, basis: str, group: HostGroup):
        self._path = path
        self._basis = basis
        self._group = group

    @property
    def said(self) -> str:
        """Where a measurement came from, for people; equal on every rank."""
        return "kept from an earlier start" if self._path is None else f"from tuning.cache={self._path}"

    def find(self, key: str, kind: Any) -> Any:
        """What is kept under this key, of this type, or `None`.

        Raises:
            ConfigError: on every rank alike, where the file that a user named cannot be read.
        """
        found = self._group.from_first(self._read_value(key, kind) if self._group.rank == 0 else None, _Found)
        self._complain(found.problem)
        return None if found.value is None else msgspec.json.decode(found.value, type=kind)

    def keep(self, key: str, value: object) -> None:
        """Write what was measured under this key.

        Raises:
            ConfigError: on every rank alike, where the file that a user named cannot be written.
        """
        found = self._group.from_first(
            _Found(problem=self._write(key, value)) if self._group.rank == 0 else None, _Found
        )
        self._complain(found.problem)

    def _complain(self, problem: str | None) -> None:
        if problem is not None and self._path is not None:
            raise ConfigError(problem)
        if problem is not None and self._group.rank == 0:
            logger.warning("%s", problem)

    @property
    def _file(self) -> Path:
        if self._path is not None:
            return Path(self._path).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / _DEFAULT

    @property
    def _named(self) -> str:
        if self._path is not None:
            return f"tuning.cache={self._path!r}"
        return f"tuning.cache, {_DEFAULT} in the user's cache folder,"

    def _full(self, key: str) -> str:
        return f"{key}; {self._basis}"

    def _read_value(self, key: str, kind: Any) -> _Found:
        try:
            value = self._read().get(self._full(key))
            if value is not None:
                msgspec.json.decode(value, type=kind)
        except _FILE_ERRORS as error:
            return _Found(problem=f"{self._named} cannot be read: {error}; remove it, or name another file")
        return _Found(None if value is None else bytes(value))

    def _read(self) -> dict[str, msgspec.Raw]:
        if not self._file.exists():
            return {}
        return msgspec.json.decode(self._file.read_bytes(), type=dict[str, msgspec.Raw])

    def _write(self, key: str, value: object) -> str | None:
        try:
            kept = {other: old for other, old in self._read().items() if other != self._full(key)}
            kept = dict(list(kept.items())[-_MOST_KEPT + 1 :]) | {
                self._full(key): msgspec.Raw(msgspec.json.encode(value))
            }
            file = self._file
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_name(f"{file.name}.{os.getpid()}")
            unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1))
            unfinished.replace(file)
        except _FILE_ERRORS as error:
            return f"{self._named} cannot be written: {error}; name a file that can be"
        return None


def library_versions() -> str:
    """What computes paths, with versions; those that are not installed are left out."""
    return versions_of(_LIBRARIES)
