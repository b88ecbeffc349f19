"""Which tile a grouped GEMM takes for how many rows: candidates, measurement, rank 0's choice for all ranks.

QuACK's own tuner tries some forty tiles a shape and takes 8 to 30 s for it. These few are chosen for what differs here:
with few rows an expert (decode) a GEMM streams weights, wants small tiles and single blocks; with many (prefill) it
computes, wants large tiles and clusters that share loads.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..errors import ConfigError
from ..probe import HostGroup
from .quack_gemm import GemmTile

logger = logging.getLogger(__name__)

_TUNED_ROWS = (16, 64, 256, 1024, 4096, 16384)
_MANY_PAIRS = 96
_LAUNCHES = 10
_REPLAYS = 4

_STREAMING = (
    GemmTile(64, 128, True),
    GemmTile(64, 256, True),
    GemmTile(64, 192, True),
    GemmTile(128, 192, True),
    GemmTile(128, 256, False),
)
_COMPUTING = (
    GemmTile(128, 192, True),
    GemmTile(128, 256, False),
    GemmTile(128, 256, False, 2, 1),
    GemmTile(256, 128, False, 2, 1),
)
_SHARING_ROWS = GemmTile(128, 256, False, 1, 2)


def tuned_rows(max_rows: int) -> tuple[int, ...]:
    """Numbers of received rows that get a choice of their own, ascending up to the most there are."""
    return (*(rows for rows in _TUNED_ROWS if rows < max_rows), max_rows)


def gate_up_tiles(pairs_an_expert: float) -> Sequence[GemmTile]:
    """Candidates for the first GEMM, which gathers its rows and so takes no cluster of columns."""
    return _COMPUTING if pairs_an_expert > _MANY_PAIRS else _STREAMING


def down_tiles(pairs_an_expert: float) -> Sequence[GemmTile]:
    """Candidates for the second GEMM."""
    return (*_COMPUTING, _SHARING_ROWS) if pairs_an_expert > _MANY_PAIRS else _STREAMING


@dataclass(frozen=True)
class TileTable:
    """Tiles of both GEMMs of one shape of layer; equal on every rank.

    Attributes:
        num_rows: received rows, ascending; each entry holds up to its number.
        tiles: of the first and second GEMM, one pair an entry.
    """

    num_rows: tuple[int, ...]
    tiles: tuple[tuple[GemmTile, GemmTile], ...]

    def tiles_for(self, num_rows: int) -> tuple[GemmTile, GemmTile]:
        """Of the first entry that holds this many rows; `num_rows` is at most the last entry's."""
        return self.tiles[bisect_left(self.num_rows, num_rows)]

    def __str__(self) -> str:
        entries = zip(self.num_rows, self.tiles, strict=True)
        return ", ".join(f"<={rows} {gate_up}+{down}" for rows, (gate_up, down) in entries)


def fastest(candidates: Sequence[GemmTile], launch: Callable[[GemmTile], None]) -> GemmTile:
    """The candidate whose launches take the least time on this GPU; a candidate that fails is said and left out.

    Raises:
        ConfigError: none of them runs.
    """
    times: dict[GemmTile, float] = {}
    for tile in candidates:
        try:
            times[tile] = milliseconds([partial(launch, tile)])
        except Exception as error:
            logger.warning("tile %s left out: %s: %s", tile, type(error).__name__, error)
    if not times:
        raise ConfigError("experts='cutedsl': no tile of QuACK's grouped GEMM runs here: set experts to 'torch'")
    return min(times, key=lambda tile: times[tile])


def milliseconds(launches: Sequence[Callable[[], None]]) -> float:
    """Time of one of these launches inside a CUDA graph of all, where the host's part of it does not count."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(-(-_LAUNCHES // len(launches))):
            for launch in launches:
                launch()
    num_launches = -(-_LAUNCHES // len(launches)) * len(launches)
    graph.replay()
    best = float("inf")
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / num_launches)
    return best


def agree_on(group: HostGroup | None, tune: Callable[[], TileTable]) -> TileTable:
    """What rank 0 finds, on every rank; collective over `group`, inside what its ranks attempt together.

    All ranks tune, though only one is heeded: they would wait for it otherwise, as long as for a step at most, and have
    to compile what it chooses anyway.

    Raises:
        PeerGaveUp: another rank found nothing, or failed before.
        ConfigError: this one found nothing.
    """
    own = tune()
    return own if group is None else group.gather_met(own, TileTable)[0]
