"""QuACK's CuTe DSL grouped GEMMs with an explicit tile, on Hugging Face's expert weights as they are.

QuACK is imported at construction.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from ...errors import ConfigError

_KNOWN_VERSION = "0.6.5"


@dataclass(frozen=True)
class GemmTile:
    """How a grouped GEMM is cut: rows and columns of a tile, two tiles in turn or together, and the cluster of blocks.

    Equal on every rank for the same layer and rows.
    """

    rows: int
    columns: int
    pingpong: bool
    cluster_rows: int = 1
    cluster_columns: int = 1

    def __str__(self) -> str:
        cluster = f"/{self.cluster_rows}x{self.cluster_columns}" if self.cluster_rows * self.cluster_columns > 1 else ""
        return f"{self.rows}x{self.columns}{'p' if self.pingpong else 'c'}{cluster}"


class QuackGemms:
    """The two GEMMs of gated experts. What a call compiles is kept by QuACK, in memory and on disk.

    Raises:
        ConfigError: QuACK is not installed; or CuTe DSL is outside site-packages, and QuACK not the version whose
            insides this module knows.
    """

    def __init__(self) -> None:
        try:
            import quack
            from quack.gemm_runtime import identity
        except ImportError as error:
            raise ConfigError(
                f"experts='cutedsl' needs quack-kernels {_KNOWN_VERSION} ({error}): install expert-pool[gpu], or set "
                "experts to 'torch'"
            ) from error
        with _cute_dsl_counts_as_installed(identity, quack.__version__):
            # The library makes epilogues when it is imported.
            from quack.epilogue.library import linear_act_mod
            from quack.gemm import gemm

            self._gated = linear_act_mod(
                "swiglu", gated=True, has_c=False, has_rowvec=False, has_colvec=False, sr=False, has_alpha=False
            )
        self._plain = gemm

    def gated(
        self,
        x_RH: torch.Tensor,
        gate_up_EFH: torch.Tensor,
        offsets: torch.Tensor,
        source_row_P: torch.Tensor,
        hidden_PI: torch.Tensor,
        tile: GemmTile,
    ) -> None:
        """`hidden[p] = silu(gate[e] @ x[source_row[p]]) * (up[e] @ x[source_row[p]])` for the pairs `p` of expert `e`.

        Args:
            x_RH: `[R, H]` bf16, rows of any stride; only rows of pairs are used.
            gate_up_EFH: `[E, 2I, H]` bf16, gate first.
            offsets: `[E + 1]` int32, where each expert's pairs start.
            source_row_P: `[P]` int32.
            hidden_PI: `[P, I]` bf16, written for the pairs.
            tile: `cluster_columns` of 1, which gathered rows need.
        """
        self._gated.gemm(
            x_RH,
            gate_up_EFH,
            None,
            None,
            epi_args={"mAuxOut": hidden_PI},
            tile_M=tile.rows,
            tile_N=tile.columns,
            cluster_M=tile.cluster_rows,
            cluster_N=tile.cluster_columns,
            pingpong=tile.pingpong,
            cu_seqlens_m=offsets,
            A_idx=source_row_P,
            concat_layout=("B",),
        )

    def plain(
        self,
        hidden_PI: torch.Tensor,
        down_EHI: torch.Tensor,
        offsets: torch.Tensor,
        output_PH: torch.Tensor,
        tile: GemmTile,
    ) -> None:
        """`output[p] = down[e] @ hidden[p]` for the pairs `p` of expert `e`; shapes as for `gated`."""
        self._plain(
            hidden_PI,
            down_EHI,
            output_PH,
            None,
            None,
            tile.rows,
            tile.columns,
            tile.cluster_rows,
            tile.cluster_columns,
            pingpong=tile.pingpong,
            cu_seqlens_m=offsets,
        )


@contextmanager
def _cute_dsl_counts_as_installed(identity: ModuleType, version: str) -> Iterator[None]:
    """Let QuACK fingerprint its epilogue wherever CuTe DSL is installed.

    QuACK keys installed libraries by name, and knows them by a path with `site-packages` or `dist-packages` in it. From
    any other folder (`pip install --target`, a packed environment) it goes on into CuTe DSL's own functions, where it
    meets a ContextVar that it cannot key, and raises. Here such a CuTe DSL counts as installed while epilogues are
    made, and nothing else changes: keys are the ones that an ordinary installation gives.
    """
    import cutlass

    root = str(Path(inspect.getfile(cutlass)).parent) + "/"
    if "/site-packages/" in root or "/dist-packages/" in root:
        yield
        return
    if version != _KNOWN_VERSION or not hasattr(identity, "_is_extern_function"):
        raise ConfigError(
            f"experts='cutedsl' needs QuACK {_KNOWN_VERSION} where CuTe DSL is outside site-packages, and finds "
            f"{version} with CuTe DSL in {root}: install both into site-packages, or set experts to 'torch'"
        )
    original = identity._is_extern_function

    def is_extern(function: object) -> bool:
        of_quack = (getattr(function, "__module__", None) or "").split(".")[0] == "quack"
        code = getattr(function, "__code__", None)
        return original(function) or (code is not None and not of_quack and code.co_filename.startswith(root))

    setattr(identity, "_is_extern_function", is_extern)  # noqa: B010
    try:
        yield
    finally:
        setattr(identity, "_is_extern_function", original)  # noqa: B010
