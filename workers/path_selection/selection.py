"""Which way to the experts a rank takes: the one that the configuration names, or those that measure best.

Every function is collective over all ranks. They probe the same paths, build the same in the same order, measure the
same, and choose from times of which each is the largest over all ranks: so all of them hold the same table.
"""

import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from ...dispatch.budgets.stored_coding import PLAIN, weights_kind
from ...dispatch.errors import ConfigError
from ...dispatch.expert_path import ExpertPath, MemberPath
from ...dispatch.moe import MoeExchange
from ...dispatch.moe_layer import MoeLayer, one_of_each_shape
from ...dispatch.paths.fastest import Choice, Measured, PathCost, bytes_of, choose
from ...dispatch.paths.maker import PathMaker
from ...dispatch.paths.measured import MeasuredPath
from ...dispatch.paths.table import PathName, PathTable, candidate_paths, measured_rows, table_problems
from ...dispatch.paths.tuning import TableRow
from ...dispatch.probe import Dropped, HostGroup, agree_on_refusals, attempt
from ...dispatch.registry import MEASURED, experts_for, fused_kinds, fused_of
from ...dispatch.way import AS_LOADED
from ...graphs.backend import CaptureBackend
from ..rank_config import RankConfig
from .calibration import calibrate
from .check import PathCheck
from .layer_timer import LayerTimer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settled:
    """What a rank computes experts with.

    Attributes:
        path: for all MoE layers, which it has taken over.
        lines: for people: the table, and what was dropped and why. Equal on every rank.
    """

    path: ExpertPath
    lines: tuple[str, ...]


class PathSelection:
    """Settles the path of one rank, once its model is loaded.

    Args:
        config: of the rank.
        maker: of paths.
        group: all ranks.
        backend: how steps are recorded here; records what is measured.
        check: which a path that has just been built has to pass.
    """

    def __init__(
        self, config: RankConfig, maker: PathMaker, group: HostGroup, backend: CaptureBackend, check: PathCheck
    ):
        self._config = config
        self._maker = maker
        self._group = group
        self._backend = backend
        self._check = check
        self._dropped: dict[str, Dropped] = {}

    @torch.inference_mode(False)
    def settle(self, model: PreTrainedModel, exchange: MoeExchange) -> Settled:
        """The path, built and with its weights prepared; collective over all ranks.

        Raises:
            ConfigError: on every rank alike: some rank cannot take the path that the configuration names, or all that
                it leaves to choose from; names the rank and the reason.
        """
        config = self._config
        layers = exchange.layers
        names = named_paths(config)
        self._probe(names, layers)
        left = {name.dispatch for name in names if name.capacity is not None and str(name) not in self._dropped}
        calibrated = [kind for kind in sorted(left) if config.quantisation in fused_of(kind).calibrated]
        if calibrated:
            scales, rows = calibrate(config.spec, model, exchange, self._group, self._maker.device)
            self._check.real_rows |= rows
            pairs = {layer.index: pair for layer, pair in zip(layers, scales, strict=True)}
            for kind in calibrated:
                self._maker.shared(kind).scales |= pairs
        if config.dispatch != MEASURED:
            paths = self._all_of(names, layers, f"dispatch={config.dispatch!r}")
            self._adopt(paths, layers)
            return Settled(paths[names[0]], ())
        return self._measured(names, layers)

    def _probe(self, names: Sequence[PathName], layers: Sequence[MoeLayer]) -> None:
        """Agree on which paths some rank cannot take; nothing is built before."""
        host = self._group.from_first(socket.gethostname(), str)
        refusals = {str(name): self._refusal(name, layers, host) for name in names}
        self._dropped |= agree_on_refusals(self._group, refusals)

    def _refusal(self, name: PathName, layers: Sequence[MoeLayer], host: str) -> str | None:
        try:
            return self._maker.refusal(name, layers, host)
        except Exception as error:  # of a library or driver that one machine has otherwise: the others wait to hear it
            return f"{type(error).__name__}: {error}"

    def _all_of(
        self, names: Sequence[PathName], layers: Sequence[MoeLayer], setting: str
    ) -> dict[PathName, MemberPath]:
        """These paths, none of which may be missing.

        Raises:
            ConfigError: on every rank alike, where some rank cannot take one.
        """
        paths: dict[PathName, MemberPath] = {}
        if not any(str(name) in self._dropped for name in names):
            paths = self._build(names, list(one_of_each_shape(layers).values()))
        lost = [self._dropped[str(name)] for name in names if str(name) in self._dropped]
        if lost:
            raise ConfigError(f"{setting} cannot run: {'; '.join(map(str, lost))}")
        return paths

    def _measured(self, names: Sequence[PathName], layers: Sequence[MoeLayer]) -> Settled:
        config = self._config
        if config.tuning.table is not None:
            pinned, source = PathTable(config.tuning.table), "pinned by tuning.table"
            return self._as_tabled(pinned, self._tabled_paths(pinned, layers, source), layers, source)
        left = self._left_of(names)
        kept = self._maker.parts.kept
        key = self._key(left, layers)
        found = None if kept is None else kept.find(key, tuple[TableRow, ...])
        shapes = [layer.shape.text for layer in layers]
        ranks, weights = config.layout.world_size, weights_kind(config.stored)
        if found is not None and not table_problems(
            found, config.worker.device, config.quantisation, config.capacity, shapes, ranks, weights
        ):
            assert kept is not None
            cached, source = PathTable(found), kept.said
            try:
                members = self._tabled_paths(cached, layers, source)
            except ConfigError as error:  # on every rank alike
                logger.warning("measuring anew: %s", error)
                left = self._left_of(left)  # what was built on some ranks alone cannot be built by all again
            else:
                return self._as_tabled(cached, members, layers, source)
        settled = self._by_measuring(left, layers)
        if kept is not None:
            assert isinstance(settled.path, MeasuredPath)
            kept.keep(key, settled.path.table.rows)
        return settled

    def _left_of(self, names: Sequence[PathName]) -> list[PathName]:
        left = [name for name in names if str(name) not in self._dropped]
        if not left:
            reasons = "; ".join(map(str, self._dropped.values()))
            raise ConfigError(f"no path is left for quantisation={self._config.quantisation!r}: {reasons}")
        return left

    def _tabled_paths(self, table: PathTable, layers: Sequence[MoeLayer], source: str) -> dict[PathName, MemberPath]:
        return self._all_of(list(map(PathName.parse, table.names)), layers, f"the table {source}")

    def _as_tabled(
        self, table: PathTable, members: dict[PathName, MemberPath], layers: Sequence[MoeLayer], source: str
    ) -> Settled:
        """The paths of a table that exists, held to the bound."""
        copies = self._maker.copy_bytes(members, layers)
        self._adopt(members, layers)
        num_bytes = bytes_of(table.names, self._costs(members), copies)
        if num_bytes > self._config.tuning.max_bytes:
            raise ConfigError(
                f"the table {table.text} keeps paths of {num_bytes} bytes together, above tuning.max_bytes="
                f"{self._config.tuning.max_bytes}: raise it, or name fewer paths"
            )
        return self._settled(members, Choice(table, num_bytes), layers, source)

    def _by_measuring(self, names: Sequence[PathName], layers: Sequence[MoeLayer]) -> Settled:
        config = self._config
        samples = one_of_each_shape(layers)
        paths = self._build(names, list(samples.values()))
        buckets = measured_rows(config.limits, config.layout, config.capacity)
        measured = self._measure(paths, samples, buckets, layers)
        if not paths:
            raise ConfigError(f"no path is left: {'; '.join(map(str, self._dropped.values()))}")
        copies = self._maker.copy_bytes(paths, layers)
        try:
            choice = choose(buckets, measured, self._costs(paths), copies, config.tuning.max_bytes)
        except ConfigError as error:
            raise ConfigError("; ".join([str(error), *map(str, self._dropped.values())])) from error
        kept = {name: paths[name] for name in map(PathName.parse, choice.table.names)}
        paths.clear()
        self._maker.keep_only(list(kept), self._group)
        if self._maker.device.type == "cuda":
            torch.cuda.empty_cache()
        self._adopt(kept, layers)
        return self._settled(kept, choice, layers, f"measured, best of {len(names)} paths")

    def _build(self, names: Sequence[PathName], samples: Sequence[MoeLayer]) -> dict[PathName, MemberPath]:
        """The paths over one layer of each shape; those that fail on some rank are dropped."""
        paths: dict[PathName, MemberPath] = {}
        for name in names:
            local = attempt(self._group, str(name), partial(self._maker.make_local, name))
            built = local if isinstance(local, Dropped) else self._attempt_whole(name, samples)
            if isinstance(built, Dropped):
                self._dropped[str(name)] = built
                self._maker.give_up(name, paths, self._group)
            else:
                paths[name] = built
        return paths

    def _attempt_whole(self, name: PathName, samples: Sequence[MoeLayer]) -> MemberPath | Dropped:
        return attempt(self._group, str(name), partial(self._built, name, samples))

    def _built(self, name: PathName, samples: Sequence[MoeLayer]) -> MemberPath:
        path = self._maker.make(name)
        for layer in samples:
            path.adopt(layer)
        path.prepare(self._group)
        if not name.is_plain:
            for layer in samples:
                self._check.require_right(path, layer, str(name))
        return path

    def _measure(
        self,
        paths: dict[PathName, MemberPath],
        samples: Mapping[str, MoeLayer],
        buckets: Sequence[int],
        layers: Sequence[MoeLayer],
    ) -> list[Measured]:
        """The times of each shape, the largest of all ranks; a path that fails on some rank is taken out of `paths`."""
        config = self._config
        timer = LayerTimer(
            config.layout,
            self._group,
            self._backend,
            self._maker.device,
            config.capacity,
            config.tuning.repeats,
        )
        times: dict[str, torch.Tensor] = {}
        for name in list(paths):
            taken = attempt(self._group, str(name), partial(_times_of, timer, paths[name], samples, buckets))
            if isinstance(taken, Dropped):
                self._dropped[str(name)] = taken
                del paths[name]
            else:
                times[str(name)] = self._group.largest(taken)
        shapes = [layer.shape.text for layer in layers]
        return [
            Measured(shape, shapes.count(shape), {name: times[name][index].tolist() for name in times})
            for index, shape in enumerate(samples)
        ]

    def _costs(self, paths: Mapping[PathName, ExpertPath]) -> dict[str, PathCost]:
        """What each path costs, where ranks differ the most that any of them pays."""
        own = {str(name): self._maker.cost_of(name, path) for name, path in paths.items()}
        by_rank = self._group.gather({name: dict(cost.parts) for name, cost in own.items()}, dict[str, dict[str, int]])
        return {
            name: PathCost({part: max(costs[name][part] for costs in by_rank) for part in cost.parts}, cost.weights)
            for name, cost in own.items()
        }

    def _adopt(self, paths: Mapping[PathName, MemberPath], layers: Sequence[MoeLayer]) -> None:
        """Have all layers computed; where no path reads the model's own weights, they are given up layer by layer."""
        is_prepared = all(name.weights != AS_LOADED for name in paths)
        for layer in layers:
            for path in paths.values():
                path.adopt(layer)
            if is_prepared:
                layer.weights.release()
        for path in paths.values():
            path.prepare(self._group)

    def _settled(
        self, members: Mapping[PathName, ExpertPath], choice: Choice, layers: Sequence[MoeLayer], source: str
    ) -> Settled:
        shapes = {layer.index: layer.shape.text for layer in layers}
        named = {str(name): path for name, path in members.items()}
        buffers = bytes_of(choice.table.names, self._costs(members), 0)
        path = MeasuredPath(named, choice.table, shapes, buffers, self._config.capacity)
        lines = [f"experts by table, {source}; paths hold {choice.num_bytes} bytes"]
        lines += [_readable(row) for row in choice.table.rows]
        lines += map(str, self._dropped.values())
        only = PathName.parse(choice.table.names[0]) if len(choice.table.names) == 1 else None
        if only is not None and only.is_plain and self._dropped:
            lines.append(f"all ranks fall back to {only}")
        if self._group.rank == 0:
            for dropped in self._dropped.values():
                logger.warning("%s", dropped)
        return Settled(path, tuple(lines))

    def _key(self, names: Sequence[PathName], layers: Sequence[MoeLayer]) -> str:
        """What a table holds for, beside GPUs and code; equal on every rank."""
        config = self._config
        shapes = [layer.shape.text for layer in layers]
        parts = (
            f"{config.layout.dp_size} x {config.layout.attn_tp_size} ranks",
            ", ".join(f"{shapes.count(shape)} x ({shape})" for shape in dict.fromkeys(shapes)),
            f"{config.spec.dtype}, quantisation {config.quantisation}, experts {config.stored or PLAIN}",
            f"rows {measured_rows(config.limits, config.layout, config.capacity)}",
            f"paths {', '.join(map(str, names))}",
            f"within {config.tuning.max_bytes} bytes, {config.tuning.repeats} repeats",
        )
        return "; ".join(parts)


def named_paths(config: RankConfig) -> tuple[PathName, ...]:
    """The path that the configuration names, or those that it leaves to choose from; equal on every rank."""
    tuning, device, quantisation = config.tuning, config.worker.device, config.quantisation
    if config.dispatch == MEASURED:
        ranks = config.layout.world_size
        weights = weights_kind(config.stored)
        return candidate_paths(tuning, device, config.experts, quantisation, config.capacity, ranks, weights)
    if config.dispatch in fused_kinds():
        return (PathName.fused(config.dispatch, config.capacity),)
    experts = experts_for(config.experts, quantisation)
    assert experts is not None, "a quantisation that nothing computes is refused before"
    return (PathName(config.dispatch, experts.kind),)


def _times_of(
    timer: LayerTimer, path: ExpertPath, samples: Mapping[str, MoeLayer], buckets: Sequence[int]
) -> torch.Tensor:
    """Microseconds, `[shapes, buckets]`; infinite beyond the path's capacity."""
    return torch.tensor(
        [
            [timer.microseconds(path, layer, rows) if rows <= path.held.capacity else float("inf") for rows in buckets]
            for layer in samples.values()
        ],
        dtype=torch.float64,
    )


def _readable(row: TableRow) -> str:
    took = "" if row.microseconds is None else f", {row.microseconds:g} us a layer"
    return f"  {row.shape or 'all layers'}, up to {row.rows} rows a rank: {row.path}{took}"
