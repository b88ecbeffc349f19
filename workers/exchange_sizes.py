"""What a rank's ways to the experts are made from: sizes of buffers, formats of rows, groups."""

from dataclasses import replace

import torch
import torch.distributed as dist

from ..dispatch.budget import ExchangeBudget, RowFormat, exchange_budget, exchange_rows
from ..dispatch.collectives import Collectives
from ..dispatch.experts.pair_budget import ExpertShape, PairBudget, pair_budget
from ..dispatch.paths.maker import PathMaker
from ..dispatch.paths.path import ExpertPath
from ..dispatch.paths.table import PathName
from .calibrate import CALIBRATION_TOKENS
from .model_spec import ModelSpec
from .rank_config import RankConfig


def row_formats(spec: ModelSpec) -> list[RowFormat]:
    """The wire format of each MoE layer."""
    return [
        RowFormat(layer.hidden_size, layer.top_k, getattr(torch, spec.dtype), getattr(torch, layer.weights_dtype))
        for layer in spec.moe
    ]


def budget_for(config: RankConfig) -> ExchangeBudget:
    """Exchange buffers of each rank."""
    return exchange_budget(config.limits, config.layout, row_formats(config.spec), capacity=config.capacity)


def pair_budget_for(config: RankConfig) -> PairBudget | None:
    """Buffers of each rank's CuTe DSL experts; `None` where others compute, or where what computes is measured."""
    if config.experts != "cutedsl" or config.dispatch in ("mega", "measured"):
        return None
    return _pair_budget(config)


def _pair_budget(config: RankConfig) -> PairBudget:
    ep_size = config.layout.world_size
    shapes = [
        ExpertShape(layer.hidden_size, layer.intermediate_size, layer.top_k, layer.num_experts // ep_size)
        for layer in config.spec.moe
    ]
    return pair_budget(exchange_rows(config.layout, config.capacity), shapes)


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
        pair_budget=_pair_budget(config),
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
