"""Which tiles of QuACK's grouped GEMMs are tried for how many rows.

QuACK's own tuner tries some forty tiles a shape and takes 8 to 30 s for it. These few are chosen for what differs here:
with few rows an expert (decode) a GEMM streams weights, wants small tiles and single blocks; with many (prefill) it
computes, wants large tiles and clusters that share loads.
"""

from collections.abc import Sequence

from .quack_gemm import GemmTile

TUNED_ROWS = (16, 64, 256, 1024, 4096, 16384)
_MANY_PAIRS = 96

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


def gate_up_tiles(pairs_an_expert: float) -> Sequence[GemmTile]:
    """Candidates for the first GEMM, which gathers its rows and so takes no cluster of columns."""
    return _COMPUTING if pairs_an_expert > _MANY_PAIRS else _STREAMING


def down_tiles(pairs_an_expert: float) -> Sequence[GemmTile]:
    """Candidates for the second GEMM."""
    return (*_COMPUTING, _SHARING_ROWS) if pairs_an_expert > _MANY_PAIRS else _STREAMING
