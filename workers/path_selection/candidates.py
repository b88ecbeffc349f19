"""Paths to the experts of a rank, made from its configuration."""

from dataclasses import replace

import torch
import torch.distributed as dist

from ...dispatch.budgets.budget import exchange_budget
from ...dispatch.collectives import Collectives
from ...dispatch.paths.maker import PathMaker
from ...dispatch.paths.path import ExpertPath
from ...dispatch.paths.table import PathName
from ...dispatch.probe import HostGroup
from ..rank_config import RankConfig
from .calibration import CALIBRATION_TOKENS, num_calibrating
from .check import PathCheck
from .exchange_sizes import budget_for, largest_pair_budget, row_formats


def path_maker(
    config: RankConfig, rank: int, collectives: Collectives, world: dist.ProcessGroup, device: torch.device
) -> PathMaker:
    """What makes the paths of a rank."""
    formats = zip((layer.num_experts for layer in config.spec.moe), row_formats(config.spec), strict=True)
    return PathMaker(
        collectives=collectives,
        group=world,
        layout=config.layout,
        rank=rank,
        device=device,
        budget=budget_for(config),
        pair_budget=largest_pair_budget(config),
        formats=tuple(dict.fromkeys(formats)),
        quantisation=config.quantisation,
        peer_timeout_s=config.worker.device_timeout_s,
        records_graphs=not config.limits.disable_cuda_graph,
    )


def loading_path(config: RankConfig, maker: PathMaker) -> ExpertPath:
    """What the model is bound to until its path is settled: computes in its own dtype, a few rows at a time."""
    budget = exchange_budget(config.limits, config.layout, row_formats(config.spec), capacity=CALIBRATION_TOKENS)
    kind = "allgather" if config.layout.world_size > 1 else "local"
    return replace(maker, budget=budget).make(PathName(kind, "torch"))


def path_check(config: RankConfig, group: HostGroup, reference: ExpertPath, device: torch.device) -> PathCheck:
    """What holds paths to the plain experts, which are `reference`: the `loading_path`."""
    return PathCheck(config.layout, group, reference, num_calibrating(config.spec), config.quantisation, device)
