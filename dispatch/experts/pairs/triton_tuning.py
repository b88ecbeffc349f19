"""Which tiles of the Triton GEMMs are tried for how many rows.

Few: a start with hundreds of variants would compile for minutes. With few pairs an expert a launch streams weights, and
wants deep loads and many programs; with many it computes, and wants large tiles.
"""

from collections.abc import Sequence

from .triton_gemm import TritonTile

TUNED_ROWS = (1, 2, 4, 8, 16, 64, 256, 1024, 4096, 16384)
_MOST_SLOTS = 128
# Rows whose experts' weights might fit into an L2 cache, and routings that do not together.
_CACHED_ROWS, _ROUTINGS = 16, 8
_FEW_PAIRS, _SOME_PAIRS = 12, 48

_GATE_UP_BY_SLOT = (
    TritonTile(0, 4, 1024, 4, 1),
    TritonTile(0, 8, 512, 4, 1),
    TritonTile(0, 8, 1024, 8, 1),
    TritonTile(0, 4, 512, 2, 1),
)
_DOWN_BY_ROW = (
    TritonTile(0, 4, 256, 4, 1),
    TritonTile(0, 8, 256, 4, 1),
    TritonTile(0, 16, 256, 8, 1),
    TritonTile(0, 2, 256, 2, 1),
)
_GATE_UP_STREAMING = (
    TritonTile(16, 32, 128, 4, 4),
    TritonTile(16, 64, 64, 4, 5),
    TritonTile(16, 64, 128, 4, 3),
    TritonTile(16, 64, 64, 4, 4, True),
    TritonTile(16, 64, 128, 4, 3, True),
)
_DOWN_STREAMING = (
    TritonTile(16, 64, 128, 4, 4),
    TritonTile(16, 128, 64, 4, 5),
    TritonTile(16, 128, 128, 4, 3),
    TritonTile(16, 64, 128, 4, 4, True),
    TritonTile(16, 128, 64, 4, 4, True),
)
_GATE_UP_BETWEEN = (
    TritonTile(32, 64, 64, 4, 4),
    TritonTile(64, 64, 64, 4, 4),
    TritonTile(32, 64, 64, 4, 4, True),
    TritonTile(32, 128, 64, 8, 4, True),
)
_DOWN_BETWEEN = (
    TritonTile(32, 128, 64, 4, 4),
    TritonTile(64, 128, 64, 4, 4),
    TritonTile(32, 128, 64, 4, 4, True),
    TritonTile(64, 128, 64, 8, 4, True),
)
_GATE_UP_COMPUTING = (
    TritonTile(64, 128, 64, 8, 3),
    TritonTile(128, 64, 64, 8, 3),
    TritonTile(128, 128, 64, 8, 3),
    TritonTile(64, 64, 64, 4, 4),
)
_DOWN_COMPUTING = (
    TritonTile(64, 128, 64, 4, 4),
    TritonTile(128, 128, 64, 8, 3),
    TritonTile(128, 256, 64, 8, 3),
    TritonTile(64, 256, 64, 8, 3),
)


def num_routings(num_rows: int) -> int:
    """Batches of rows, each routed otherwise, that a candidate is measured on."""
    return _ROUTINGS if num_rows <= _CACHED_ROWS else 1


def by_slot_tiles(num_slots: int | None) -> tuple[Sequence[TritonTile], Sequence[TritonTile]]:
    """Candidates for both launches without a sort; none where slots are so many that they share experts.

    Args:
        num_slots: of all rows; `None` where the buffers do not hold as many.
    """
    return ((), ()) if num_slots is None or num_slots > _MOST_SLOTS else (_GATE_UP_BY_SLOT, _DOWN_BY_ROW)


def sorted_tiles(pairs_an_expert: float) -> tuple[Sequence[TritonTile], Sequence[TritonTile]]:
    """Candidates for both launches over sorted pairs."""
    if pairs_an_expert <= _FEW_PAIRS:
        return _GATE_UP_STREAMING, _DOWN_STREAMING
    if pairs_an_expert <= _SOME_PAIRS:
        return (*_GATE_UP_STREAMING[2:], *_GATE_UP_BETWEEN), (*_DOWN_STREAMING[2:], *_DOWN_BETWEEN)
    return _GATE_UP_COMPUTING, _DOWN_COMPUTING
