"""The table that follows from measured times: arithmetic on numbers that are equal on every rank."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from .table import PathTable
from .tuning import TableRow

# Two measurements of the same thing differ by this much; a path that gains less is not worth its memory.
_AS_FAST = 1.02


@dataclass(frozen=True)
class PathCost:
    """What keeping a path costs on one rank; equal on every rank.

    Attributes:
        parts: bytes of its buffers and workspaces by name; paths that name the same part share it.
        weights: the layout of expert weights that it reads.
    """

    parts: Mapping[str, int]
    weights: str


@dataclass(frozen=True)
class Measured:
    """Times of one shape of layer.

    Attributes:
        shape: of the layer.
        num_layers: that have it.
        microseconds: by path, for each bucket in order; infinite where a path does not reach so far. The largest of
            all ranks.
    """

    shape: str
    num_layers: int
    microseconds: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Choice:
    """What is kept: a table, and the bytes that its paths hold together."""

    table: PathTable
    num_bytes: int


def choose(
    buckets: Sequence[int],
    measured: Sequence[Measured],
    costs: Mapping[str, PathCost],
    copy_bytes: int,
    max_bytes: int,
) -> Choice:
    """The fastest table whose paths fit into the bound together.

    Of the sets of paths that fit, those count as fastest that are within 2% of the best path in every bucket; the one
    with the fewest paths and bytes is taken. Where none is, the set with the least time over all buckets is, each
    bucket weighed alike: what is given up is what is missed least.

    Args:
        buckets: rows a rank, ascending.
        measured: for each shape; equal on every rank.
        costs: of each path.
        copy_bytes: of the second layout of the expert weights, held where paths of both are kept.
        max_bytes: the bound.

    Raises:
        ConfigError: no path that reaches every bucket fits, and what the smallest takes; or none reaches them.
    """
    fitting: list[tuple[bool, float, int, tuple[str, ...]]] = []
    smallest = math.inf
    best = _times(tuple(costs), measured, len(buckets))
    for count in range(1, len(costs) + 1):
        if any(is_as_fast for is_as_fast, *_ in fitting):
            break  # of those, fewer paths are taken
        for names in itertools.combinations(costs, count):
            slowdowns = _slowdowns(_times(names, measured, len(buckets)), best)
            if math.isinf(max(slowdowns)):
                continue
            num_bytes = bytes_of(names, costs, copy_bytes)
            smallest = min(smallest, num_bytes)
            if num_bytes <= max_bytes:
                fitting.append((max(slowdowns) <= _AS_FAST, sum(slowdowns), num_bytes, names))
    if math.isinf(smallest):
        raise ConfigError(f"none of the paths {', '.join(costs)} reaches {buckets[-1]} rows a rank")
    if not fitting:
        raise ConfigError(
            f"tuning.max_bytes={max_bytes} holds no path that reaches {buckets[-1]} rows a rank: set it to "
            f"{smallest:.0f} or more"
        )
    as_fast = [found for found in fitting if found[0]]
    if as_fast:
        _, _, num_bytes, names = min(as_fast, key=lambda found: (len(found[3]), found[2], found[1]))
    else:
        _, _, num_bytes, names = min(fitting, key=lambda found: (found[1], found[2]))
    return Choice(PathTable(_rows(buckets, measured, names)), num_bytes)


def bytes_of(names: Sequence[str], costs: Mapping[str, PathCost], copy_bytes: int) -> int:
    """Bytes that these paths hold together."""
    copies = copy_bytes if len({costs[name].weights for name in names}) > 1 else 0
    parts = {part: num_bytes for name in names for part, num_bytes in costs[name].parts.items()}
    return sum(parts.values()) + copies


def _times(names: Sequence[str], measured: Sequence[Measured], num_buckets: int) -> list[float]:
    """For each bucket, the time of all layers, each through what is best for it of these paths."""
    return [
        sum(one.num_layers * min(one.microseconds[name][bucket] for name in names) for one in measured)
        for bucket in range(num_buckets)
    ]


def _slowdowns(taken: Sequence[float], best: Sequence[float]) -> list[float]:
    """For each bucket, a time over the best there is."""
    return [time / least if not math.isinf(least) else math.inf for time, least in zip(taken, best, strict=True)]


def _rows(buckets: Sequence[int], measured: Sequence[Measured], names: Sequence[str]) -> list[TableRow]:
    """One row a bucket; the shape is left out where there is one only."""
    rows = []
    for one in measured:
        shape = one.shape if len(measured) > 1 else ""
        for index, bucket in enumerate(buckets):
            best = min(names, key=lambda name: one.microseconds[name][index])
            rows.append(TableRow(bucket, best, shape, round(one.microseconds[best][index], 2)))
    return rows
