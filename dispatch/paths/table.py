"""Which way to the experts a step takes, by its rows: names of ways, tables, and what is wrong with a table.

Free of PyTorch: the driver checks a table that a user wrote before any actor starts. A step looks its path up by
`runtime_max_tokens_per_rank`, which follows from the step plan, so all ranks take the same.
"""

import re
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ..budgets.buckets import decode_buckets, piecewise_buckets
from ..budgets.layout import Layout
from ..budgets.limits import ExpertsKind, Limits, QuantisationKind, step_widths
from ..errors import ConfigError, GeometryError
from .tuning import TableRow, Tuning

_MEGA_CAPACITIES = (8, 64, 256, 1024)
# One way to write each: a path's name is what its table, its members and its memory are found by.
_MEGA = re.compile(r"mega@([1-9][0-9]{0,8})")


class PathName(NamedTuple):
    """A way to the experts: how rows travel, what computes them, and the rows that a mega kernel is built for."""

    dispatch: str
    experts: str
    capacity: int | None = None

    def __str__(self) -> str:
        return f"{self.dispatch}+{self.experts}" if self.capacity is None else f"{self.dispatch}@{self.capacity}"

    @property
    def is_mega(self) -> bool:
        return self.capacity is not None

    @property
    def is_plain(self) -> bool:
        """Whether it is what the others are held to: PyTorch's experts behind PyTorch's collectives, or behind none."""
        return self.experts == "torch" and self.dispatch in ("local", "allgather")

    @property
    def weights(self) -> str:
        """The layout of expert weights that the path reads: the model's own, or one prepared from it."""
        return "mega" if self.is_mega else "nvfp4" if self.experts == "nvfp4" else "as loaded"

    @classmethod
    def mega(cls, capacity: int) -> "PathName":
        return cls("mega", "mega", capacity)

    @classmethod
    def parse(cls, text: str) -> "PathName":
        """The path of this name.

        Raises:
            ConfigError: not the name of a path.
        """
        mega = _MEGA.fullmatch(text)
        if mega is not None:
            return cls.mega(int(mega[1]))
        dispatch, _, experts = text.partition("+")
        if not dispatch or not experts:
            raise ConfigError(f"path {text!r} is neither DISPATCH+EXPERTS nor mega@CAPACITY, like mega@64")
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


def available_paths(device: str, quantisation: QuantisationKind) -> tuple[PathName, ...]:
    """The paths that a device has beside mega kernels, fastest first as far as one can know."""
    if quantisation != "none":
        return (PathName("flashinfer", "nvfp4"),) if quantisation == "nvfp4" and device == "cuda" else ()
    if device == "cpu":
        return PathName("allgather", "torch"), PathName("alltoall", "torch")
    kinds = (("flashinfer", "cutedsl"), ("flashinfer", "torch"), ("allgather", "torch"))
    return tuple(PathName(dispatch, experts) for dispatch, experts in kinds)


def candidate_paths(
    tuning: Tuning, device: str, experts: ExpertsKind, quantisation: QuantisationKind, capacity: int
) -> tuple[PathName, ...]:
    """The paths to choose from; with a pinned table, those it names.

    Args:
        tuning: how to choose; equal on every rank, and so is the rest.
        device: `cpu` or `cuda`.
        experts: resolved; `cutedsl` leaves nothing else.
        quantisation: in which experts are computed; what does not compute in it is no candidate.
        capacity: the most rows one rank brings to a step.
    """
    if tuning.table is not None:
        return tuple(PathName.parse(name) for name in PathTable(tuning.table).names)
    plain = available_paths(device, quantisation)
    if device == "cpu" or quantisation == "nvfp4":
        return plain
    if experts == "cutedsl" and quantisation == "none":
        return tuple(name for name in plain if name.experts == experts)
    below = tuning.mega_capacities or _MEGA_CAPACITIES
    capacities = sorted({rows for rows in below if rows < capacity} | {capacity})
    return (*plain, *map(PathName.mega, capacities))


def table_problems(
    rows: Sequence[TableRow], device: str, quantisation: QuantisationKind, capacity: int, shapes: Sequence[str]
) -> tuple[str, ...]:
    """What is wrong with a table that was not measured here, each with its value and what would be right.

    Args:
        rows: of the table.
        device: `cpu` or `cuda`.
        quantisation: in which experts are computed.
        capacity: the most rows a rank that a step has.
        shapes: of the model's MoE layers, as `shape_of` writes them.
    """
    problems: list[str] = []
    known = available_paths(device, quantisation)
    for row in rows:
        try:
            name = PathName.parse(row.path)
        except ConfigError as error:
            problems.append(f"tuning.table: {error}")
            continue
        has_mega = device == "cuda" and quantisation != "nvfp4"
        if not (has_mega if name.is_mega else name in known):
            names = [*map(str, known), *(["mega@CAPACITY"] if has_mega else [])]
            problems.append(
                f"tuning.table: path {row.path!r} does not exist on worker.device={device!r} with "
                f"quantisation={quantisation!r}: use one of {', '.join(names) or 'none'}"
            )
        elif name.capacity is not None and name.capacity < row.rows:
            problems.append(f"tuning.table: {row.path} cannot take {row.rows} rows: name mega@{row.rows} or more")
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
    tokens = [bucket * width.tokens_per_request for width in step_widths(limits) for bucket in decode_buckets(limits)]
    rows = {-(-count // layout.attn_tp_size) for count in (*tokens, *piecewise_buckets(limits))}
    return tuple(sorted({count for count in rows if count < capacity} | {capacity}))


def shape_of(num_experts: int, hidden_size: int, intermediate_size: int, top_k: int) -> str:
    """The shape of a MoE layer, over all ranks, as tables name it."""
    return f"{num_experts} x {hidden_size} x {intermediate_size} top-{top_k}"
