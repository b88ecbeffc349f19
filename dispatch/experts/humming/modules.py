"""What humming compiles for a pool, as the stage before loading announces and builds it.

The library keeps what it compiled in `HUMMING_CACHE_DIR`, `~/.humming/cache` unless it is set. A mark beside its files
says which pools' kernels are all there; without the mark they are asked for, which costs a moment where they are there.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from humming.config import LayerConfig
from humming.jit.compiler import Compiler
from humming.jit.runtime import KernelRuntime
from humming.utils.jit import get_humming_cache_dir

from ...budgets.path_settings import PathSettings
from ...budgets.stored_coding import StoredCoding
from .kernels import Gemm, Interval, intervals, layer_config
from .sizes import budget_for, expected_pairs, gemm_sizes

_LABEL = "experts as stored"


@dataclass(frozen=True)
class HummingModule:
    """The kernels of one shape of layer; what `workers.kernels` asks of FlashInfer's specifications.

    Attributes:
        gemms: configuration and tiles of both projections.
        device: this rank's GPU.
    """

    gemms: tuple[tuple[LayerConfig, list[Interval]], ...]
    device: torch.device

    @property
    def name(self) -> str:
        compiler = KernelRuntime._get_compiler()
        told = (version("humming-kernels"), compiler.signature(), Compiler.cuh_last_update_time())
        asked = [f"{config.to_str()} {tiles}" for config, tiles in self.gemms]
        return f"humming_{hashlib.sha256(repr((told, asked)).encode()).hexdigest()[:16]}"

    @property
    def cached_in(self) -> str:
        return str(get_humming_cache_dir())

    @property
    def _mark(self) -> Path:
        return Path(self.cached_in) / "expert_pool" / self.name

    @property
    def is_compiled(self) -> bool:
        return self._mark.is_file()

    def build(self, need_lock: bool = True) -> None:
        """Compile what the cache lacks; the library's own locks keep other processes out meanwhile."""

        def build_one(gemm: tuple[LayerConfig, list[Interval]]) -> None:
            with torch.cuda.device(self.device):
                Gemm(*gemm, self.device)

        with ThreadPoolExecutor(len(self.gemms)) as threads:
            list(threads.map(build_one, self.gemms))
        self._mark.parent.mkdir(parents=True, exist_ok=True)
        self._mark.touch()


def modules_for(settings: PathSettings, coding: StoredCoding) -> list[tuple[str, Any]]:
    """Of each shape of layer, with a label for people."""
    return [(_LABEL, module) for module in _modules(settings, coding)]


def _modules(settings: PathSettings, coding: StoredCoding) -> Iterator[HummingModule]:
    device = torch.device("cuda", torch.cuda.current_device())
    num_rows, ep_size = budget_for(settings).pairs.num_rows, settings.layout.world_size
    for shape in {layer.text: layer for layer in settings.spec.moe}.values():
        num_local, has_bias = shape.num_local(ep_size), shape.gating is not None and shape.gating.has_bias
        max_pairs = expected_pairs(shape, num_local, num_rows)
        configs = [
            layer_config(size, coding, num_local, has_bias, device) for size in gemm_sizes(shape, coding).values()
        ]
        yield HummingModule(tuple((config, intervals(config, max_pairs, device)) for config in configs), device)
