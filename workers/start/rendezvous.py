"""Ranks wait for each other over the rendezvous, each at its own pace: before there is a process group, and while they
read weights, when a node that is slow is no rank which does not take part."""

import secrets
import socket
from datetime import timedelta

import torch.distributed as dist

from ...dispatch.errors import RankError
from ..rank_config import Rendezvous
from .sealed_store import SECRET_BYTES, SealedStore


def open_store(host: str, timeout: timedelta) -> tuple[SealedStore, Rendezvous]:
    """A store that listens on a free port of this address alone, where `TCPStore` itself would take all addresses.

    Args:
        host: an address of this machine.
        timeout: of what the store waits for.

    Raises:
        RankError: it is none.
    """
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, 0), family=family)
    except OSError as error:
        raise RankError(
            f"rank 0 cannot listen on {host!r}, by which Ray knows its node ({error}): start Ray there with an address "
            "of the machine's own (`ray start --node-ip-address`)"
        ) from error
    rendezvous = Rendezvous(host, listening.getsockname()[1], secrets.token_bytes(SECRET_BYTES))
    store = dist.TCPStore(
        host,
        rendezvous.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listening.detach(),  # it is the store's from now on
    )
    return SealedStore(store, rendezvous.secret), rendezvous


def join_store(rendezvous: Rendezvous, timeout: timedelta) -> SealedStore:
    """The store that another rank has opened."""
    store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
    return SealedStore(store, rendezvous.secret)


def wait_for_all(
    store: dist.Store, what: str, rank: int, world_size: int, timeout_s: float, value: str = "", doing: str = ""
) -> list[str]:
    """Leave a value and wait for those of the others; every rank calls it, once for each `what`.

    Args:
        store: of the rendezvous.
        what: is waited for; equal on every rank.
        rank: this rank.
        world_size: how many there are.
        timeout_s: for the slowest rank, `placement.start_timeout_s`.
        value: of this rank.
        doing: what ranks do before they are here, for the message.

    Returns:
        The value of each rank, in rank order.

    Raises:
        RankError: names the ranks that were not here in time.
    """
    keys = [f"{what}/{other}" for other in range(world_size)]
    store.set(keys[rank], value)
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        late = [other for other, key in enumerate(keys) if not store.check([key])]
        raise RankError(
            f"ranks {late} did not {doing or what} within placement.start_timeout_s={timeout_s:g}"
        ) from error
    return [value.decode() for value in store.multi_get(keys)]
