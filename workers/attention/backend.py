"""What a rank's attention keeps, whatever computes it: a backend over the paged cache, and its batch of one step."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from ...graphs.plan import CaptureEntry
from ..scheduling.inputs import StepInputs


class AttendingBatch(Protocol):
    """A packed batch of one step, which its attention layers call."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """`[1, Hq, T, D]`, `[1, Hkv, T, D]`, `[1, Hkv, T, Dv]` -> `[1, T, Hq, Dv]`; what is added is written first.

        Args:
            module: of the layer that attends.
            query, key, value: of the batch's tokens.
            scaling: of the scores.
            sinks: `[Hq]` logits that take part in the softmax and carry no value; `None` where the layer has none.
        """
        ...


class AttentionBackend(Protocol):
    """How a rank attends over its paged cache."""

    def refusal(self, entry: CaptureEntry) -> str | None:
        """Why a kind of step can have no graph with this attention; `None` where it can."""
        ...

    def graph_bytes(self, entries: Sequence[CaptureEntry]) -> int:
        """Memory that graphs of these entries take for attention alone, beside inputs and outputs; an upper bound."""
        ...

    def prepare(self, entry: CaptureEntry, values: Mapping[str, torch.Tensor]) -> None:
        """What the host has to do before a graph runs on these inputs (host tensors, before padding)."""
        ...

    def batch(self, inputs: StepInputs, entry: CaptureEntry | None, slots_T: torch.Tensor) -> AttendingBatch:
        """What the attention layers of one step call.

        Args:
            inputs: of an eager step, on the host; of a graph, its static buffers.
            entry: which graph; `None` for an eager step.
            slots_T: the slots of these inputs, on the rank's device.
        """
        ...
