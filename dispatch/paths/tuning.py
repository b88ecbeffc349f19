"""Settings of the choice between ways to the experts, where `dispatch` is `measured`; free of PyTorch."""

import msgspec

from ..errors import ConfigError

MEASURE_ALWAYS = "off"
# The choice weighs every set of paths: 2 to the power of these, and of the few paths beside them.
_MAX_MEGA_CAPACITIES = 10


class TableRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a table of paths.

    Attributes:
        rows: steps of up to so many rows a rank (`runtime_max_tokens_per_rank`) take this path, down to the row above.
        path: `allgather+torch`, `flashinfer+cutedsl`, ..., or `mega@CAPACITY`; see `paths.table.PathName`.
        shape: of the MoE layers it is for (`MoeShape.text`); empty: all.
        microseconds: what one layer took when it was measured, on the slowest rank; says nothing where it was not.
    """

    rows: int
    path: str
    shape: str = ""
    microseconds: float | None = None


class Tuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the path of each bucket is chosen; the same on every rank.

    Attributes:
        max_bytes: bound on what all paths that are kept hold together on one rank: workspaces, exchange buffers, and
            the second copy of the expert weights where paths that want different layouts are kept side by side. The
            set of paths that is fastest within it is kept; the others are given up.
        mega_capacities: rows a rank for which mega kernels are built as candidates, each of which takes seconds to
            compile at a first start; at most 10. Unset: 8, 64, 256 and 1024 below the capacity, and the capacity.
        repeats: replays that make one measurement, each of a few calls of one layer.
        table: the paths to take, instead of measuring; has to cover the capacity.
        cache: a JSON file on rank 0's node in which tables, and tiles of grouped GEMMs, are kept, by GPU, versions,
            code, geometry and layout, and found again by the next start. Unset: on GPUs `expert_pool/measured.json`
            in the user's cache folder, on CPUs none. `off`: measured at every start.
    """

    max_bytes: int = 8 << 30
    mega_capacities: tuple[int, ...] | None = None
    repeats: int = 10
    table: tuple[TableRow, ...] | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_bytes", "repeats"):
            if getattr(self, name) < 1:
                raise ConfigError(f"tuning.{name}={getattr(self, name)} is below 1: set it to 1 or more")
        if self.mega_capacities is not None and (not self.mega_capacities or min(self.mega_capacities) < 1):
            raise ConfigError(f"tuning.mega_capacities={list(self.mega_capacities)} has to list rows of 1 or more")
        if self.mega_capacities is not None and len(self.mega_capacities) > _MAX_MEGA_CAPACITIES:
            raise ConfigError(
                f"tuning.mega_capacities lists {len(self.mega_capacities)} numbers of rows, more than "
                f"{_MAX_MEGA_CAPACITIES}: leave out some"
            )
        if self.table is not None and not self.table:
            raise ConfigError("tuning.table is empty: list rows and paths, or leave it out to measure")
