"""A place for every rank: one placement-group bundle each. On an autoscaled cluster this is what makes nodes come."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from ...dispatch.errors import PlacementError

_REPORT_INTERVAL_S = 5.0
_POLL_S = 0.5


class Placement:
    """The placement group of a pool.

    Args:
        num_ranks: bundles to place.
        bundle: resources of one rank.
        timeout_s: how long to wait for all of them.
        domain_label: a label of nodes that all bundles have to agree in.
        is_setting: whether `timeout_s` is what the user set, for messages.
    """

    def __init__(
        self,
        num_ranks: int,
        bundle: dict[str, float],
        timeout_s: float,
        domain_label: str | None = None,
        is_setting: bool = True,
    ):
        self._within = f"placement.timeout_s={timeout_s:g}" if is_setting else f"{timeout_s:g} s"
        self._num_ranks = num_ranks
        self._bundle = bundle
        self._timeout_s = timeout_s
        self._domain_label = domain_label
        self.group: PlacementGroup | None = None

    async def acquire(self) -> AsyncIterator[str]:
        """Ask for the bundles and wait; yields what is being waited for, every few seconds.

        Raises:
            PlacementError: not all bundles were placed in time; the request is withdrawn.
        """
        # A bundle without resources is refused by Ray; a rank that asks for none still gets a bundle of its own.
        bundle = self._bundle or {"CPU": 0.001}
        bundles = [bundle] * self._num_ranks
        name = f"{_own_prefix()}{uuid.uuid4().hex[:8]}"
        if self._domain_label is None:
            self.group = placement_group(bundles, strategy="PACK", name=name)
        else:  # Ray packs by node within the domain
            self.group = placement_group(bundles, topology_strategy={self._domain_label: "STRICT_PACK"}, name=name)
        ready = asyncio.ensure_future(self.group.ready())
        deadline = time.monotonic() + self._timeout_s
        while True:
            left = deadline - time.monotonic()
            await asyncio.wait([ready], timeout=max(0.0, min(_REPORT_INTERVAL_S, left)))
            if ready.done():
                ready.result()
                return
            facts = await asyncio.to_thread(self._facts)
            if time.monotonic() >= deadline:
                ready.cancel()
                self.release()
                apart = (
                    ""
                    if self._domain_label is None
                    else (
                        "unset placement.domain_label to let ranks be in several domains (dispatch='allgather' can), "
                    )
                )
                raise PlacementError(
                    f"no place for all ranks within {self._within}: {facts}. Set ranks or "
                    "placement.cpus_per_rank / gpus_per_rank to what the cluster can hold (worker.device='cuda' asks "
                    f"for one GPU a rank), {apart}or wait longer"
                )
            yield facts

    async def wait_again(self) -> AsyncIterator[str]:
        """Wait until every bundle has a place again, after ranks or their nodes were lost; yields as `acquire`.

        Ray keeps the bundles of a node that lives, and looks for another place for those of a node that is gone.

        Raises:
            PlacementError: not all bundles had a place in time; the group is kept, with what it has.
        """
        deadline, report_at = time.monotonic() + self._timeout_s, time.monotonic() + _REPORT_INTERVAL_S
        while await asyncio.to_thread(self.num_placed) < self._num_ranks:
            now = time.monotonic()
            if now >= deadline:
                raise PlacementError(
                    f"no place for all ranks again within {self._within}: {await asyncio.to_thread(self._facts)}"
                )
            if now >= report_at:
                report_at = now + _REPORT_INTERVAL_S
                yield await asyncio.to_thread(self._facts)
            await asyncio.sleep(_POLL_S)

    def num_placed(self) -> int:
        """Bundles that have a place on a node that lives."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return sum(node in alive for node in self._nodes().values())

    def rank_order(self) -> list[int]:
        """Bundle index of each rank, so that ranks on one node are neighbours."""
        nodes = self._nodes()
        return sorted(range(self._num_ranks), key=lambda index: (nodes[index], index))

    def release(self) -> None:
        """Give all bundles back, or withdraw the request for them."""
        if self.group is not None:
            remove_placement_group(self.group)
            self.group = None

    def _nodes(self) -> dict[int, str]:
        """The node of each bundle; empty for one that has none."""
        assert self.group is not None
        return placement_group_table(self.group).get("bundles_to_node_id", {})

    def _facts(self) -> str:
        placed = self.num_placed()
        totals, free = ray.cluster_resources(), ray.available_resources()
        held = ", ".join(f"{free.get(name, 0):g} of {totals.get(name, 0):g} {name} free" for name in self._bundle)
        missing = self._num_ranks - placed
        return (
            f"{placed} of {self._num_ranks} bundles placed; waiting for {missing} x {_readable(self._bundle)}"
            f"{self._domain_facts()}; the cluster has {held or 'no resources'}"
        )

    def _domain_facts(self) -> str:
        """Which domains there are, and what each has in all."""
        if self._domain_label is None:
            return ""
        totals: dict[str, dict[str, float]] = {}
        for node in ray.nodes():
            domain = node["Labels"].get(self._domain_label)
            if node["Alive"] and domain is not None:
                total = totals.setdefault(domain, dict.fromkeys(self._bundle, 0.0))
                for name in self._bundle:
                    total[name] += node["Resources"].get(name, 0.0)
        each = ", ".join(f"{domain!r} has {_readable(total)}" for domain, total in sorted(totals.items()))
        return f" in one domain by {self._domain_label} ({each or 'no node has that label'})"


def remove_own_groups() -> None:
    """Give back what a process before this one of the same actor asked for. Ray does so too when an actor's process
    ends; this is for a group that it was just about to make."""
    for group in placement_group_table().values():
        if group["name"].startswith(_own_prefix()) and group["state"] != "REMOVED":
            with contextlib.suppress(ValueError):  # it was just removed
                remove_placement_group(get_placement_group(group["name"]))


def _own_prefix() -> str:
    """What the names of this actor's placement groups begin with."""
    return f"expert_pool/{ray.get_runtime_context().get_actor_id()}/"


def _readable(bundle: dict[str, float]) -> str:
    return "{" + ", ".join(f"{name}: {amount:g}" for name, amount in bundle.items()) + "}"
