"""What `dispatch: auto` would choose for a layer, found by the pool's own code; for check_layers.py."""

import socket
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from expert_pool.dispatch.budgets.limits import Limits
from expert_pool.dispatch.budgets.path_settings import budget_for
from expert_pool.dispatch.dispatchers.allgather import AllGatherDispatcher
from expert_pool.dispatch.expert_path import ExpertPath
from expert_pool.dispatch.experts.torch_experts import TorchExperts
from expert_pool.dispatch.moe_layer import MoeLayer
from expert_pool.dispatch.paths.fastest import Measured, choose
from expert_pool.dispatch.paths.maker import PathMaker
from expert_pool.dispatch.paths.path import DispatchedPath
from expert_pool.dispatch.paths.table import PathName, PathTable, candidate_paths, measured_rows
from expert_pool.dispatch.paths.tuning import Tuning
from expert_pool.dispatch.probe import HostGroup
from expert_pool.dispatch.way import RankParts
from expert_pool.workers.graph_set import make_backend
from expert_pool.workers.path_selection.calibration import CALIBRATION_TOKENS
from expert_pool.workers.path_selection.check import PathCheck
from expert_pool.workers.path_selection.selection import PathSelection
from layer_setup import Layer


@dataclass
class Auto:
    """All candidates, ready to run, and what was chosen.

    Attributes:
        paths: those that every rank can take.
        measured: microseconds of each, as a start-up measures them.
        table: the chosen path of each number of rows.
        dropped: the others, with the reason.
    """

    paths: dict[PathName, ExpertPath]
    measured: Measured
    buckets: tuple[int, ...]
    table: PathTable
    dropped: tuple[str, ...]
    maker: PathMaker
    hosts: HostGroup

    def close(self) -> None:
        """Give up all of it; collective over all ranks."""
        self.paths.clear()
        self.maker.keep_only([], self.hosts)


class KeepingChoice(PathSelection):
    """Chooses as at a start-up, and keeps every candidate."""

    def measure_all(self, layer: MoeLayer, maker: PathMaker) -> Auto:
        config = self._config
        names = candidate_paths(
            config.tuning,
            config.worker.device,
            config.experts,
            config.quantisation,
            config.capacity,
            config.layout.world_size,
        )
        self._probe(names, [layer])
        left = [name for name in names if str(name) not in self._dropped]
        paths = self._build(left, [layer])
        buckets = measured_rows(config.limits, config.layout, config.capacity)
        measured = self._measure(paths, {layer.shape.text: layer}, buckets, [layer])
        copies = maker.copy_bytes(paths, [layer])
        choice = choose(buckets, measured, self._costs(paths), copies, config.tuning.max_bytes)
        return Auto(
            paths, measured[0], buckets, choice.table, tuple(map(str, self._dropped.values())), maker, self._group
        )


def auto(layer: Layer, tokens: tuple[int, ...], mega_capacities: tuple[int, ...] | None) -> Auto:
    """Measure the candidates for these numbers of tokens a rank, and choose; collective over all ranks.

    Args:
        layer: of a world.
        tokens: a rank, ascending; the largest is the capacity.
        mega_capacities: as in `Tuning`.
    """
    world = layer.world
    capacity, graphs = tokens[-1], tokens[:-1] or tokens
    limits = Limits(
        chunked_prefill_size=capacity,
        max_running_requests=graphs[-1],
        cuda_graph_bs=graphs,
        disable_piecewise_cuda_graph=True,
    )
    config: Any = SimpleNamespace(
        spec=SimpleNamespace(model_type="one layer", dtype="bfloat16", moe=(layer.local.shape,)),
        dispatch="measured",
        tuning=Tuning(mega_capacities=mega_capacities),
        limits=limits,
        layout=world.layout,
        capacity=capacity,
        experts="torch",
        quantisation="none",
        worker=SimpleNamespace(device=world.device.type, device_timeout_s=60.0),
    )
    maker = PathMaker(RankParts(config, world.rank, world.collectives, world.ep_group, world.device))
    assert world.host_group is not None, f"{socket.gethostname()} has one rank: nothing to choose from"
    hosts = HostGroup(world.host_group, world.rank)
    with torch.inference_mode(False):
        plain = AllGatherDispatcher(world.collectives, world.rank, budget_for(config), world.device)
        reference = DispatchedPath(plain, TorchExperts(world.device))
        check = PathCheck(world.layout, hosts, reference, min(CALIBRATION_TOKENS, capacity), "none", world.device)
        choice = KeepingChoice(config, maker, hosts, make_backend(world.device), check)
        return choice.measure_all(layer.local, maker)
