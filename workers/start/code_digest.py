"""A name for the code that decides what a rank does; free of PyTorch, since the driver carries its own to the ranks."""

import functools
import hashlib
import importlib.metadata
import importlib.resources
import importlib.util
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path

import msgspec

from ...dispatch.registry import plugged_in

DISTRIBUTION = "expert-pool"

_PACKAGE = __package__.partition(".")[0]
RANK_SIDE = ("dispatch", "graphs", "workers")
WHOLE = ("cluster", *RANK_SIDE)


class LaunchedWith(msgspec.Struct, frozen=True):
    """What the driver runs, for ranks to compare with; empty texts where there is no driver.

    Attributes:
        code: its `code_digest`.
        plugged_in: its `plugged_in_digest`.
    """

    code: str = ""
    plugged_in: str = ""


NO_DRIVER = LaunchedWith()


@functools.cache
def code_digest(folders: tuple[str, ...] = RANK_SIDE) -> str:
    """One name for source files, by default those that decide what a rank does; equal names mean equal files.

    They are read once, so it has to be asked for early: of a process that goes on while another version is installed,
    the name stays that of its own.
    Where there are none, because only compiled files were installed, it is the version of the distribution.
    """
    digest, num_files = hashlib.sha256(), 0
    for folder in folders:
        for name, source in _sources(importlib.resources.files(f"{_PACKAGE}.{folder}"), folder):
            digest.update(f"{name} {len(source)}\n".encode() + source)
            num_files += 1
    if num_files:
        return digest.hexdigest()[:16]
    return f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)}"


def module_digest(module: str) -> str:
    """One name for the source of a module, or of all that a package holds; the reason where it cannot be found."""
    digest = hashlib.sha256()
    try:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            return "cannot be found"
        if spec.submodule_search_locations is None:
            digest.update(Path(spec.origin).read_bytes())
        else:
            for name, source in _sources(importlib.resources.files(module), module):
                digest.update(f"{name} {len(source)}\n".encode() + source)
    except Exception as error:  # to find a module of the user's own may run code of it
        return f"cannot be found ({type(error).__name__}: {error})"
    return digest.hexdigest()[:16]


def plugged_in_digest() -> str:
    """What plugins have registered, one a line, each with a name for the source that it comes
    from: the module that a plugin imports its class from, or all of the package that has it."""
    return "\n".join(f"{kind} {module_digest(module.partition('.')[0])}" for kind, module in plugged_in())


def _sources(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    """Python files under a folder with their paths, in an order that is the same everywhere.

    Those alone that can be imported, by their name: editors, notebooks and file servers leave others beside them.
    """
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name = f"{path}/{entry.name}"
        if not entry.name.removesuffix(".py").isidentifier():
            continue
        if entry.is_dir():
            yield from _sources(entry, name)
        elif entry.name.endswith(".py") and entry.is_file():
            yield name, entry.read_bytes()
