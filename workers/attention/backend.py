"""What a rank's attention keeps, whatever computes it: a paged cache, a backend over it, and its batch of one step."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ...graphs.plan import CaptureEntry
from ..model.spec import AttentionShape
from ..scheduling.inputs import StepInputs


class PagedCache(Protocol):
    """What a rank keeps of its requests' tokens, in blocks; what else its attention asks of it is between the two."""

    @property
    def shapes(self) -> tuple[AttentionShape, ...]:
        """Of each layer."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens that a block holds."""
        ...

    @property
    def num_bytes(self) -> int:
        """What is allocated."""
        ...

    def write(self, layer: int, slots_T: torch.Tensor, key_THD: torch.Tensor, value_THD: torch.Tensor) -> None:
        """Store the keys and values of `T` tokens; slot `s` is place `s % block_size` of block `s // block_size`."""
        ...

    def read(self, layer: int, block_table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `length` keys `[length, H, D]` and values of a request whose blocks are `block_table` (int64)."""
        ...


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


class StepAttention:
    """A batch as the model hands it to its attention layers: always of this class, which compiled code is made for."""

    def __init__(self, batch: AttendingBatch):
        self._batch = batch

    def attend(self, module: torch.nn.Module, *tensors: torch.Tensor, **settings: Any) -> torch.Tensor:
        """See `AttendingBatch.attend`."""
        return self._batch.attend(module, *tensors, **settings)


class AttentionBackend(Protocol):
    """How a rank attends over its paged cache; which steps it can be recorded in, its `AttentionWay` says."""

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
