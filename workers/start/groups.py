"""From a rendezvous to process groups: a rank among the others, before it has read anything."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ...dispatch.collectives import Collectives, GroupName
from ...dispatch.errors import ConfigError
from ...dispatch.registry import load_plugins
from ..rank_config import RankConfig
from ..sharing import SharingRanks
from .code_digest import LaunchedWith
from .same_start import facts_of, plugin_facts, require_same_start
from .transports import unusable_settings


@dataclass(frozen=True)
class Joined:
    """A rank that has met the others.

    Attributes:
        rank: this rank.
        device: on which it computes.
        store: of the rendezvous.
        world: all ranks, over which experts exchange.
        host_group: a Gloo group of all ranks, which no step uses but for its agreement.
        collectives: through which steps exchange.
        sharing: the ranks that share this rank's batch.
    """

    rank: int
    device: torch.device
    store: dist.Store
    world: dist.ProcessGroup
    host_group: dist.ProcessGroup
    collectives: Collectives
    sharing: SharingRanks


def join_groups(
    config: RankConfig, rank: int, device: torch.device, store: dist.Store, launched_with: LaunchedWith
) -> Joined:
    """Form the process groups over the rendezvous; collective over all ranks.

    Args:
        config: equal on every rank.
        rank: this rank.
        device: on which it computes.
        store: of the rendezvous.
        launched_with: see `facts_of`.

    Raises:
        ConfigError: on every rank, when some of them cannot import a plugin, or communication cannot use what their
            environment sets.
        GeometryError: on every rank, when some of them run other code, or read another model under the same path.
        RankError: others did not come in time.
    """
    layout, on_gpu = config.layout, device.type == "cuda"
    timeout = timedelta(seconds=config.worker.peer_wait_s)
    # Of groups whose collectives run inside steps.
    step_timeout = timedelta(seconds=config.worker.device_timeout_s) if on_gpu else timeout
    if on_gpu:
        torch.cuda.set_device(device)
    unusable = unusable_settings(os.environ, on_gpu)
    try:
        load_plugins(config.plugins)
    except ConfigError as error:  # said to all ranks: they would wait for this one
        unusable = (*unusable, str(error))
    facts = facts_of(config.spec, config.weights != "random", launched_with)
    facts += plugin_facts(config.plugins, launched_with)
    require_same_start(store, rank, layout.world_size, facts, config.start_timeout_s, unusable)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=layout.world_size,
        timeout=step_timeout,
        device_id=device if on_gpu else None,
    )
    all_hosts = dist.new_group(backend="gloo", timeout=timeout)
    sharing = SharingRanks(rank, layout.dp_rank(rank), layout.ranks_of(layout.dp_rank(rank)))
    if layout.attn_tp_size > 1:
        for dp_rank in range(layout.dp_size):
            ranks = layout.ranks_of(dp_rank)
            host_group = dist.new_group(list(ranks), backend="gloo", timeout=timeout)
            step_group = dist.new_group(list(ranks), timeout=step_timeout)
            if dp_rank == sharing.dp_rank:
                sharing = SharingRanks(rank, dp_rank, ranks, host_group, step_group)
    assert dist.group.WORLD is not None
    groups: dict[GroupName, dist.ProcessGroup] = {"ep": dist.group.WORLD}
    if sharing.step_group is not None:
        # Gathering a shared batch is part of a step; the agreement's own group must not advance with it.
        groups["attn_tp"] = sharing.step_group
    return Joined(rank, device, store, dist.group.WORLD, all_hosts, Collectives(groups), sharing)
