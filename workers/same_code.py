"""Whether all ranks run the same code: plans are derived from equal inputs, so ranks of two versions would differ.

Asked over the rendezvous, before there is a process group: another version may bring another number of fields to an
agreement, or another collective while it loads, and would leave the others waiting in it.
"""

import hashlib
import importlib.metadata
import importlib.resources
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from importlib.resources.abc import Traversable

import torch.distributed as dist

from ..dispatch.errors import GeometryError

_PACKAGE = __package__.rpartition(".")[0]
_RANK_SIDE = ("dispatch", "graphs", "workers")
_DISTRIBUTION = "expert-pool"
_STAY = timedelta(seconds=5)


def code_digest() -> str:
    """One name for the source files that decide what a rank does; equal names mean equal files.

    Where there are none, because only compiled files were installed, it is the version of the distribution.
    """
    digest, num_files = hashlib.sha256(), 0
    for folder in _RANK_SIDE:
        for name, source in _sources(importlib.resources.files(f"{_PACKAGE}.{folder}"), folder):
            digest.update(f"{name} {len(source)}\n".encode() + source)
            num_files += 1
    if num_files:
        return digest.hexdigest()[:16]
    return f"{_DISTRIBUTION} {importlib.metadata.version(_DISTRIBUTION)}"


def require_same_code(store: dist.Store, rank: int, world_size: int) -> None:
    """Show this rank's code to the others and compare; every rank calls it, and all pass or all raise.

    Args:
        store: of the rendezvous; its timeout bounds the wait for the slowest rank.
        rank: this rank.
        world_size: how many there are.

    Raises:
        GeometryError: on every rank alike; names each kind of code with its ranks and nodes.
    """
    store.set(f"code/{rank}", f"{code_digest()}@{socket.gethostname()}")
    holders: dict[str, list[str]] = {}
    for other in range(world_size):
        code, _, host = store.get(f"code/{other}").decode().partition("@")
        holders.setdefault(code, []).append(f"rank {other} on {host}")
    if len(holders) > 1:
        _stay_until_all_have_read(store, rank, world_size)
        listed = "; ".join(f"{code}: {', '.join(ranks)}" for code, ranks in holders.items())
        raise GeometryError(
            f"ranks disagree before a step: their code differs ({listed}): "
            f"install the same {_DISTRIBUTION} on all nodes"
        )


def _stay_until_all_have_read(store: dist.Store, rank: int, world_size: int) -> None:
    """Rank 0 holds the store; were it ended first, the others would see a lost connection and not the reason."""
    store.set(f"code/read/{rank}", "")
    if rank == 0:
        with suppress(dist.DistStoreError):
            store.wait([f"code/read/{other}" for other in range(world_size)], _STAY)


def _sources(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
    """Python files under a folder with their paths, in an order that is the same everywhere."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name = f"{path}/{entry.name}"
        if entry.is_dir():
            yield from _sources(entry, name)
        elif entry.name.endswith(".py") and entry.is_file():
            yield name, entry.read_bytes()
