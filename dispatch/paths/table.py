"""Which way to the experts a step takes, by its rows: names of ways, tables, and what is wrong with a table.

Free of PyTorch: the driver checks a table that a user wrote before any actor starts. A step looks its path up by
`runtime_max_tokens_per_rank`, which follows from the step plan, so all ranks take the same.
"""

import re
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..budgets.layout import Layout
from ..budgets.limits import Limits, QuantisationKind
from ..budgets.step_kinds import graph_tokens
from ..budgets.stored_coding import PLAIN
from ..errors import ConfigError, GeometryError
from ..registry import (
    LOCAL,
    PLAIN_EXPERTS,
    dispatcher_kinds,
    dispatcher_of,
    experts_kinds,
    experts_of,
    fused_kinds,
    fused_of,
    native_experts,
    reads,
)
from .tuning import TableRow, Tuning

# One way to write each: a path's name is what its table, its members and its memory are found by.
_FUSED = re.compile(r"([a-z][a-z0-9_]*)@([1-9][0-9]{0,8})")


class PathName(NamedTuple):
    """A way to the experts: how rows travel, what computes them, and the rows that a fused kernel is built for."""

    dispatch: str
    experts: str
    capacity: int | None = None

    def __str__(self) -> str:
        return f"{self.dispatch}+{self.experts}" if self.capacity is None else f"{self.dispatch}@{self.capacity}"

    @property
    def is_plain(self) -> bool:
        """Whether it is what the others are held to: PyTorch's experts behind PyTorch's collectives, or behind none."""
        if self.capacity is not None:
            return False
        return experts_of(self.experts).is_plain and dispatcher_of(self.dispatch).is_plain

    @property
    def weights(self) -> str:
        """The layout of expert weights that the path reads: the model's own, or one prepared from it."""
        if self.capacity is not None:
            return fused_of(self.dispatch).weights_layout
        return experts_of(self.experts).weights_layout

    @classmethod
    def fused(cls, kind: str, capacity: int) -> "PathName":
        return cls(kind, kind, capacity)

    @classmethod
    def parse(cls, text: str) -> "PathName":
        """The path of this name.

        Raises:
            ConfigError: not the name of a path.
        """
        fused = _FUSED.fullmatch(text)
        if fused is not None and fused[1] in fused_kinds():
            return cls.fused(fused[1], int(fused[2]))
        dispatch, _, experts = text.partition("+")
        if not dispatch or not experts:
            known = fused_kinds()
            forms = " or ".join(f"{kind}@CAPACITY" for kind in known)
            raise ConfigError(f"path {text!r} is neither DISPATCH+EXPERTS nor {forms}, like {known[0]}@64")
        return cls(dispatch, experts)


class PathTable:
    """A checked table.

    Args:
        rows: for every shape of layer ascending rows, the last of which are the most that a step may have.
    """

    def __init__(self, rows: Sequence[TableRow]):
        self.rows = tuple(rows)
        self._bounds: dict[str, list[int]] = {}
        self._paths: dict[str, list[str]] = {}
        for row in self.rows:
            self._bounds.setdefault(row.shape, []).append(row.rows)
            self._paths.setdefault(row.shape, []).append(row.path)

    @property
    def text(self) -> str:
        """The table without its times, as one line; what ranks compare."""
        return "; ".join(f"{row.shape or 'all layers'} to {row.rows}: {row.path}" for row in self.rows)

    @property
    def names(self) -> tuple[str, ...]:
        """Each path once, in the order in which they come."""
        return tuple(dict.fromkeys(row.path for row in self.rows))

    def path_for(self, shape: str, num_rows: int) -> str:
        """The path of a step.

        Args:
            shape: of the layer.
            num_rows: `runtime_max_tokens_per_rank`, equal on every rank.

        Raises:
            GeometryError: on every rank alike, where the table ends below these rows.
        """
        key = shape if shape in self._bounds else ""
        index = bisect_left(self._bounds.get(key, []), num_rows)
        if key not in self._bounds or index == len(self._bounds[key]):
            raise GeometryError(f"no path for {num_rows} rows a rank of {shape}: the table is {self.text}")
        return self._paths[key][index]


def available_paths(
    device: str, quantisation: QuantisationKind, world_size: int, weights: str = PLAIN
) -> tuple[PathName, ...]:
    """The paths that so many ranks have beside fused kernels, fastest first as far as one can know.

    Where something reads kept weights as they are, what expands them in each call is no candidate.
    """
    found = []
    computing = native_experts(device, weights) or tuple(
        one for one in experts_kinds(device) if reads(experts_of(one), weights)
    )
    for dispatch in dispatcher_kinds(device) if world_size > 1 else (LOCAL,):
        for experts in computing:
            way = experts_of(experts)
            if quantisation in way.computes and way.is_candidate_behind(dispatcher_of(dispatch)):
                found.append(PathName(dispatch, experts))
    return tuple(found)


def available_fused(
    device: str, quantisation: QuantisationKind, world_size: int, weights: str = PLAIN
) -> tuple[str, ...]:
    """The fused ways that so many ranks have: those exchange, so one rank has none."""
    kinds = fused_kinds(device) if world_size > 1 else ()
    ways = {kind: fused_of(kind) for kind in kinds}
    return tuple(kind for kind, way in ways.items() if quantisation in way.computes and reads(way, weights))


def candidate_paths(
    tuning: Tuning,
    device: str,
    experts: str,
    quantisation: QuantisationKind,
    capacity: int,
    world_size: int,
    weights: str = PLAIN,
) -> tuple[PathName, ...]:
    """The paths to choose from; with a pinned table, those it names.

    Args:
        tuning: how to choose; equal on every rank, and so is the rest.
        device: `cpu` or `cuda`.
        experts: resolved; any but PyTorch's leave nothing else.
        quantisation: in which experts are computed; what does not compute in it is no candidate.
        capacity: the most rows one rank brings to a step.
        world_size: ranks of the pool; one has its experts to choose from, and nothing to exchange.
        weights: the kind that experts are kept in, see `stored_coding.weights_kind`.
    """
    if tuning.table is not None:
        return tuple(PathName.parse(name) for name in PathTable(tuning.table).names)
    separate = available_paths(device, quantisation, world_size, weights)
    if experts != PLAIN_EXPERTS and quantisation == "none":
        return tuple(name for name in separate if name.experts == experts)
    fused = available_fused(device, quantisation, world_size, weights)
    return (
        *separate,
        *(PathName.fused(kind, rows) for kind in fused for rows in fused_of(kind).candidates(tuning, capacity)),
    )


def table_problems(
    rows: Sequence[TableRow],
    device: str,
    quantisation: QuantisationKind,
    capacity: int,
    shapes: Sequence[str],
    world_size: int,
    weights: str = PLAIN,
) -> tuple[str, ...]:
    """What is wrong with a table that was not measured here, each with its value and what would be right.

    Args:
        rows: of the table.
        device: `cpu` or `cuda`.
        quantisation: in which experts are computed.
        capacity: the most rows a rank that a step has.
        shapes: of the model's MoE layers, as `MoeShape.text` writes them.
        world_size: ranks of the pool.
        weights: the kind that experts are kept in.
    """
    problems: list[str] = []
    known = available_paths(device, quantisation, world_size, weights)
    fused = available_fused(device, quantisation, world_size, weights)
    for row in rows:
        try:
            name = PathName.parse(row.path)
        except ConfigError as error:
            problems.append(f"tuning.table: {error}")
            continue
        if not (name in known if name.capacity is None else name.dispatch in fused):
            names = [*map(str, known), *(f"{kind}@CAPACITY" for kind in fused)]
            problems.append(
                f"tuning.table: path {row.path!r} does not exist on worker.device={device!r} with "
                f"ranks={world_size} and quantisation={quantisation!r}: use one of {', '.join(names) or 'none'}"
            )
        elif name.capacity is not None and name.capacity < row.rows:
            problems.append(
                f"tuning.table: {row.path} cannot take {row.rows} rows: name {name.dispatch}@{row.rows} or more"
            )
    for shape in dict.fromkeys(row.shape for row in rows):
        bounds = [row.rows for row in rows if row.shape == shape]
        if bounds != sorted(set(bounds)) or bounds[0] < 1:
            problems.append(f"tuning.table: rows {bounds} of {shape or 'all layers'} have to rise, from 1 or more")
        if bounds[-1] < capacity:
            problems.append(
                f"tuning.table ends at {bounds[-1]} rows for {shape or 'all layers'}, and a step may have {capacity}: "
                f"add a row for {capacity}"
            )
    return (*problems, *_shape_problems(dict.fromkeys(row.shape for row in rows), dict.fromkeys(shapes)))


def _shape_problems(tabled: Collection[str], shapes: Collection[str]) -> list[str]:
    """Rows that no layer would take, and layers that would take none."""
    known = ", ".join(map(repr, shapes))
    problems = [
        f"tuning.table: no MoE layer of this model has shape {shape!r}: use one of {known}, or leave shape out for all"
        for shape in tabled
        if shape and shape not in shapes
    ]
    left = [shape for shape in shapes if shape not in tabled]
    if left and "" not in tabled:
        problems.append(
            f"tuning.table has no rows for MoE layers of shape {', '.join(map(repr, left))}: add them, or rows without "
            "a shape for all that have none"
        )
    return problems


def measured_rows(limits: Limits, layout: Layout, capacity: int) -> tuple[int, ...]:
    """Rows a rank for which paths are measured, ascending: those of every graph, and the capacity for eager steps."""
    rows = {-(-count // layout.attn_tp_size) for count in graph_tokens(limits)}
    return tuple(sorted({count for count in rows if count < capacity} | {capacity}))
