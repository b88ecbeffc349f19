"""The input tensors of one step: exact ones for an eager step, views of static buffers for a graph."""

from dataclasses import dataclass, fields

import torch

from ..graphs.static import BufferSpec
from .kv_cache import PADDING_BLOCK, PADDING_SLOT
from .scheduler import ScheduledBatch


@dataclass(frozen=True)
class StepInputs:
    """A packed batch of `B` requests and `T` tokens, of which `N` rows are due logits. All int64 but the last.

    Attributes:
        input_ids: `[T]` token ids.
        positions: `[T]` place of each token in its request.
        slots: `[T]` cache slot each token's key and value go to; padding goes to the padding block.
        due_rows: `[N]` rows of the batch whose logits are due.
        query_starts: `[B]` first row of each request.
        query_lens: `[B]` rows of each request; 0 where there is none.
        context_lens: `[B]` tokens of each request that are cached already.
        block_tables: `[B, M]` its cache blocks, in order.
        num_valid_tokens: `[1]` int32, rows that carry a token.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    due_rows: torch.Tensor
    query_starts: torch.Tensor
    query_lens: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    num_valid_tokens: torch.Tensor

    def to(self, device: torch.device) -> "StepInputs":
        """The same inputs on a device; those that are there already are not copied."""
        return StepInputs(**{name: tensor.to(device, non_blocking=True) for name, tensor in self.values().items()})

    def values(self) -> dict[str, torch.Tensor]:
        """The tensors by name, for copying into static buffers."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def pack(batch: ScheduledBatch, block_size: int) -> StepInputs:
    """The inputs of a scheduled batch, on the host; an empty batch packs to nothing."""
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    due_rows: list[int] = []
    starts: list[int] = []
    lens: list[int] = []
    contexts: list[int] = []
    for piece in batch.slices:
        sequence = piece.sequence
        start, end = sequence.num_computed, sequence.num_computed + piece.num_tokens
        starts.append(len(input_ids))
        lens.append(piece.num_tokens)
        contexts.append(start)
        input_ids += sequence.token_ids[start:end]
        positions += range(start, end)
        blocks = sequence.blocks
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(start, end)]
        if piece.reaches_end:
            due_rows.append(len(input_ids) - 1)
    widest = max((len(piece.sequence.blocks) for piece in batch.slices), default=0)
    tables = [piece.sequence.blocks + [PADDING_BLOCK] * (widest - len(piece.sequence.blocks)) for piece in batch.slices]

    def tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64)

    return StepInputs(
        input_ids=tensor(input_ids),
        positions=tensor(positions),
        slots=tensor(slots),
        due_rows=tensor(due_rows),
        query_starts=tensor(starts),
        query_lens=tensor(lens),
        context_lens=tensor(contexts),
        block_tables=torch.tensor(tables, dtype=torch.int64).view(len(tables), widest),
        num_valid_tokens=torch.tensor([len(input_ids)], dtype=torch.int32),
    )


def dummy() -> StepInputs:
    """What an idle rank runs eagerly: one token that no expert computes, whose logits nobody wants."""
    zero = torch.zeros(1, dtype=torch.int64)
    none = torch.zeros(0, dtype=torch.int64)
    return StepInputs(
        input_ids=zero,
        positions=zero,
        slots=torch.full_like(zero, PADDING_SLOT),
        due_rows=zero,
        query_starts=none,
        query_lens=none,
        context_lens=none,
        block_tables=none.view(0, 0),
        num_valid_tokens=torch.zeros(1, dtype=torch.int32),
    )


def target_buffer_specs(max_tokens: int, max_requests: int, max_due: int, max_blocks: int) -> dict[str, BufferSpec]:
    """Static buffers of the target model's graphs.

    Args:
        max_tokens: of the largest graph, padded for the ranks that share a batch.
        max_requests: in any graph.
        max_due: rows of logits of any graph.
        max_blocks: KV blocks of one request.
    """
    integer = torch.int64
    return {
        "input_ids": BufferSpec((max_tokens,), integer, 0, "tokens"),
        "positions": BufferSpec((max_tokens,), integer, 0, "tokens"),
        "slots": BufferSpec((max_tokens,), integer, PADDING_SLOT, "tokens"),
        "due_rows": BufferSpec((max_due,), integer, 0, "due"),
        "query_starts": BufferSpec((max_requests,), integer, 0, "requests"),
        "query_lens": BufferSpec((max_requests,), integer, 0, "requests"),
        "context_lens": BufferSpec((max_requests,), integer, 0, "requests"),
        "block_tables": BufferSpec((max_requests, max_blocks), integer, PADDING_BLOCK, "requests"),
        "num_valid_tokens": BufferSpec((1,), torch.int32, 0, "step"),
    }
