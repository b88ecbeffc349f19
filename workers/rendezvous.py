"""Ranks wait for each other over the rendezvous, each at its own pace: before there is a process group, and while they
read weights, when a node that is slow is no rank which does not take part."""

from datetime import timedelta

import torch.distributed as dist

from ..dispatch.errors import RankError


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
