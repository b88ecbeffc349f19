"""An attention that the house does not know: on CPUs, with keys and values of a layer in one tensor.

A module that the setting `plugins` may name. It plans a buffer as well, and records no graphs of prefill.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from expert_pool.dispatch.budgets.planned_buffer import PlannedBuffer
from expert_pool.dispatch.way import places
from expert_pool.graphs.plan import CaptureEntry
from expert_pool.workers.attention.registry import register
from expert_pool.workers.attention.way import AttentionWay
from expert_pool.workers.rank_config import RankConfig

if TYPE_CHECKING:
    import torch

_EXTRA = 1  # numbers that a token takes beside its keys and values, so that its bytes are not another attention's


@register
class JointWay(AttentionWay):
    """Serves models whose layers have one key head a query head or fewer, and no sinks."""

    kind = "joint"
    devices = places(cpu=0)

    @classmethod
    def notes(cls, module: torch.nn.Module) -> tuple[tuple[str, int], ...]:
        return (("joint_groups", module.num_key_value_groups),) if hasattr(module, "num_key_value_groups") else ()

    @classmethod
    def refusal(cls, config: RankConfig) -> str | None:
        if any(shape.has_sinks or not dict(shape.noted) for shape in config.spec.attention):
            return "some layer has sinks, or no groups of heads"
        return None

    @classmethod
    def entry_refusal(cls, config: RankConfig, entry: CaptureEntry) -> str | None:
        return "records no prefill with joint attention" if entry.kind == "piecewise" else None

    @classmethod
    def token_bytes(cls, config: RankConfig) -> int:
        return sum(shape.width + _EXTRA for shape in config.spec.attention) * config.spec.dtype_bytes

    @classmethod
    def planned(cls, config: RankConfig) -> list[PlannedBuffer]:
        return [PlannedBuffer("attention: joint", None, 1 << 10, "for the test")]

    @classmethod
    def make_cache(cls, config: RankConfig, num_blocks: int, device: torch.device) -> Any:
        return JointCache(config, num_blocks, device)

    @classmethod
    def make(cls, config: RankConfig, model: Any, cache: Any, device: torch.device) -> Any:
        from expert_pool.workers.attention.paged import SdpaAttention

        return SdpaAttention(cache, device)


class JointCache:
    """`[num_blocks x block_size, width]` a layer: keys of all heads, their values, and a number that counts writes."""

    def __init__(self, config: RankConfig, num_blocks: int, device: torch.device):
        import torch

        self.shapes, self.block_size = config.spec.attention, config.block_size
        dtype, num_slots = getattr(torch, config.spec.dtype), num_blocks * config.block_size
        self._rows = [torch.zeros(num_slots, shape.width + _EXTRA, dtype=dtype, device=device) for shape in self.shapes]

    @property
    def num_bytes(self) -> int:
        return sum(rows.nbytes for rows in self._rows)

    @property
    def num_written(self) -> int:
        """Rows of all layers that hold a token."""
        return sum(int((rows[:, -1] > 0).sum()) for rows in self._rows)

    def write(self, layer: int, slots_T: torch.Tensor, key_THD: torch.Tensor, value_THD: torch.Tensor) -> None:
        rows = self._rows[layer]
        num_keys = key_THD[0].numel()
        rows[slots_T, :num_keys] = key_THD.flatten(1)
        rows[slots_T, num_keys:-1] = value_THD.flatten(1)
        rows[slots_T, -1] += 1

    def read(self, layer: int, block_table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape, blocks = self.shapes[layer], block_table[: -(-length // self.block_size)]
        pages = self._rows[layer].unflatten(0, (-1, self.block_size))
        rows = pages.index_select(0, blocks).flatten(0, 1)[:length]
        num_keys = shape.num_kv_heads * shape.key_dim
        keys, values = rows[:, :num_keys], rows[:, num_keys:-1]
        return keys.unflatten(1, (-1, shape.key_dim)), values.unflatten(1, (-1, shape.value_dim))
