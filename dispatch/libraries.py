"""Versions of libraries, as ranks compare them and tables are kept for them."""

from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version


def versions_of(distributions: Sequence[str]) -> str:
    """Names with versions, with commas between them; those that are not installed are left out."""
    found = []
    for name in distributions:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)
