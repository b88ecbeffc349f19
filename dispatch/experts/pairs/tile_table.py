"""Which tiles a pair of grouped GEMMs takes for how many rows: measurement, and rank 0's choice for all ranks."""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ...errors import ConfigError
from ...paths.kept_measurements import KeptMeasurements
from ...probe import HostGroup

logger = logging.getLogger(__name__)

_LAUNCHES = 10
_REPLAYS = 4

Tile = TypeVar("Tile")


@dataclass(frozen=True)
class TileTable(Generic[Tile]):
    """Tiles of both GEMMs of one shape of layer; equal on every rank.

    Attributes:
        num_rows: received rows, ascending; each entry holds up to its number.
        tiles: of the first and second GEMM, one pair an entry.
    """

    num_rows: tuple[int, ...]
    tiles: tuple[tuple[Tile, Tile], ...]

    def tiles_for(self, num_rows: int) -> tuple[Tile, Tile]:
        """Of the first entry that holds this many rows; `num_rows` is at most the last entry's."""
        return self.tiles[bisect_left(self.num_rows, num_rows)]

    def __str__(self) -> str:
        entries = zip(self.num_rows, self.tiles, strict=True)
        return ", ".join(f"<={rows} {gate_up}+{down}" for rows, (gate_up, down) in entries)


def tuned_rows(wanted: Sequence[int], max_rows: int) -> tuple[int, ...]:
    """Numbers of received rows that get a choice of their own, ascending up to the most there are."""
    return (*(rows for rows in wanted if rows < max_rows), max_rows)


def timed(candidates: Sequence[Tile], launches: Callable[[Tile], Sequence[Callable[[], None]]]) -> dict[Tile, float]:
    """Milliseconds of a launch with each candidate on this GPU; a candidate that fails is said and left out.

    Args:
        candidates: tiles.
        launches: with one of them, each on other rows where the weights of a few rows would stay in a cache.
    """
    times: dict[Tile, float] = {}
    for tile in candidates:
        try:
            times[tile] = milliseconds(launches(tile))
        except Exception as error:
            logger.warning("tile %s left out: %s: %s", tile, type(error).__name__, error)
    return times


def fastest(times: dict[Tile, float], setting: str) -> Tile:
    """The candidate of the least time.

    Args:
        times: from `timed`.
        setting: that asks for the kernel, for messages.

    Raises:
        ConfigError: none of them runs.
    """
    if not times:
        raise ConfigError(f"{setting}: no tile of its grouped GEMM runs here: set experts to 'torch'")
    return min(times, key=lambda tile: times[tile])


def milliseconds(launches: Sequence[Callable[[], None]]) -> float:
    """Time of one of these launches inside a CUDA graph of all, where the host's part of it does not count."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    repeats = -(-_LAUNCHES // len(launches))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in (*launches,) * repeats:
            launch()
    graph.replay()
    best = float("inf")
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / (repeats * len(launches)))
    return best


def agree_on(
    group: HostGroup | None,
    tune: Callable[[], TileTable[Tile]],
    tile: type[Tile],
    kept: KeptMeasurements | None = None,
    key: str = "",
) -> TileTable[Tile]:
    """What rank 0 finds, on every rank; collective over `group`, inside what its ranks attempt together.

    All ranks tune, though only one is heeded: they would wait for it otherwise, as long as for a step at most, and have
    to compile what it chooses anyway.

    Args:
        group: all ranks; `None` for one rank alone.
        tune: measures.
        tile: what tiles are.
        kept: what starts before measured, on every rank or on none: a table that is there is taken.
        key: what the table holds for, beside what `kept` has of all; equal on every rank.

    Raises:
        PeerGaveUp: another rank found nothing, or failed before.
        ConfigError: this one found nothing.
    """
    if group is None:
        return tune()
    kind: Any = TileTable[tile]  # type: ignore[valid-type]
    if kept is not None:
        group.meet()  # a rank that has failed so far never comes to look
        found: TileTable[Tile] | None = kept.find(key, kind)
        if found is not None:
            return found
    table = group.gather_met(tune(), kind)[0]
    if kept is not None:
        kept.keep(key, table)
    return table
