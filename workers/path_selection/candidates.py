"""Paths to the experts of a rank, made from its configuration."""

import msgspec
import torch
import torch.distributed as dist

from ...dispatch.collectives import Collectives
from ...dispatch.expert_path import ExpertPath
from ...dispatch.paths.kept_measurements import KeptMeasurements, library_versions
from ...dispatch.paths.maker import PathMaker
from ...dispatch.paths.table import PathName
from ...dispatch.paths.tuning import MEASURE_ALWAYS
from ...dispatch.probe import HostGroup
from ...dispatch.registry import LOCAL, PLAIN_EXPERTS
from ...dispatch.way import RankParts
from ..rank_config import RankConfig
from ..start.code_digest import code_digest, plugged_in_digest
from .calibration import CALIBRATION_TOKENS, num_calibrating
from .check import PathCheck


def kept_measurements(config: RankConfig, group: HostGroup, device: torch.device) -> KeptMeasurements | None:
    """What starts before measured, as `tuning.cache` says; collective. `None` where nothing is kept.

    On CPUs measuring takes no time worth a file that nobody named.
    """
    setting = config.tuning.cache
    if setting == MEASURE_ALWAYS or (setting is None and device.type != "cuda"):
        return None
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    machines = sorted(set(group.gather(f"{gpu}; {library_versions()}", str)))
    plugins = ", ".join(plugged_in_digest().splitlines())
    basis = "; ".join((*machines, f"code {code_digest()}", f"plugins {plugins}"))  # a changed kernel has other times
    return KeptMeasurements(setting, basis, group)


def path_maker(
    config: RankConfig,
    rank: int,
    collectives: Collectives,
    world: dist.ProcessGroup,
    device: torch.device,
    kept: KeptMeasurements | None = None,
) -> PathMaker:
    """What makes the paths of a rank."""
    return PathMaker(RankParts(config, rank, collectives, world, device, kept))


def loading_path(config: RankConfig, maker: PathMaker) -> ExpertPath:
    """What the model is bound to until its path is settled: computes in its own dtype, a few rows at a time."""
    parts, kind = maker.parts, "allgather" if config.layout.world_size > 1 else LOCAL
    few_rows = msgspec.structs.replace(config, capacity=CALIBRATION_TOKENS)
    small = RankParts(few_rows, parts.rank, parts.collectives, parts.group, parts.device)
    return PathMaker(small).make(PathName(kind, PLAIN_EXPERTS))


def path_check(config: RankConfig, group: HostGroup, reference: ExpertPath, device: torch.device) -> PathCheck:
    """What holds paths to the plain experts, which are `reference`: the `loading_path`."""
    return PathCheck(config.layout, group, reference, num_calibrating(config.spec), config.quantisation, device)
