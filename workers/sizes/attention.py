"""Which steps ranks record with the attention that they take, and what a graph takes; free of PyTorch.

All from configuration: the memory check counts the graphs that ranks record.
"""

from ...dispatch.budgets.step_kinds import KINDS
from ...graphs.plan import CaptureEntry, plan_captures
from ..attention.registry import chosen
from ..rank_config import RankConfig

# An estimate of what one CUDA graph takes beside activations: its kernel nodes, and the allocator's rounding. Graphs of
# the small models in docs/gpu-results.md took less.
GRAPH_BYTES = 24 << 20


def recorded_entries(config: RankConfig) -> list[CaptureEntry]:
    """The planned graphs that the attention of a rank can be recorded in."""
    attention = chosen(config)
    return [entry for entry in plan_captures(config.limits).entries if attention.entry_refusal(config, entry) is None]


def records_prefill(config: RankConfig) -> bool:
    """Whether steps that prefill have graphs, as far as the attention of a rank can be recorded in them."""
    return any(KINDS[entry.kind].serves == "prefill" for entry in recorded_entries(config))
