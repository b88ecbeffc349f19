"""The input tensors of one step: exact ones for an eager step, views of static buffers for a graph."""

from dataclasses import dataclass, fields

import torch

from ..sizes.kv_blocks import PADDING_BLOCK, PADDING_SLOT
from .sampler import to_device
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

    def laid_out_on(self, flat: torch.Tensor) -> "StepInputs":
        """The same inputs as views of a copy of the memory that they share; see `PackedStep`."""
        columns = [tensor.numel() for tensor in self.values().values()][:-2]
        return _views(flat, columns, (self.block_tables.shape[0], self.block_tables.shape[1]))

    def values(self) -> dict[str, torch.Tensor]:
        """The tensors by name, for copying into static buffers."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class PackedStep:
    """A step's inputs on the host, and which of its tokens only the device knows yet.

    Attributes:
        inputs: all of them on the host; tokens that are not known are 0.
        carried_rows: rows of `input_ids` that are not known.
        carried_from: for each, its place among the tokens that the last step sampled.
        flat: the memory behind `inputs`, one int64 row; `None` where there is none in common.
    """

    inputs: StepInputs
    carried_rows: tuple[int, ...] = ()
    carried_from: tuple[int, ...] = ()
    flat: torch.Tensor | None = None

    def on(self, device: torch.device, last_tokens_N: torch.Tensor) -> StepInputs:
        """The inputs on the device, complete; nothing waits for the device.

        Args:
            device: of this rank.
            last_tokens_N: what the last step sampled, on the device; where it failed, any token of the vocabulary.
        """
        if self.flat is None or self.flat.device == device:
            inputs = self.inputs.to(device)
        else:
            inputs = self.inputs.laid_out_on(self.flat.to(device, non_blocking=True))
        if self.carried_rows:
            places = to_device([*self.carried_rows, *self.carried_from], torch.int64, device)
            rows, origins = places.split(len(self.carried_rows))
            inputs.input_ids[rows] = last_tokens_N[origins]
        return inputs


def pack(batch: ScheduledBatch, block_size: int, pin: bool = False) -> PackedStep:
    """The inputs of a scheduled batch, on the host; an empty batch packs to nothing.

    Args:
        batch: before it is counted as launched.
        block_size: tokens of a KV block.
        pin: whether the memory shall be pinned, so that a copy to a GPU need not be waited for.
    """
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    due_rows: list[int] = []
    starts: list[int] = []
    lens: list[int] = []
    contexts: list[int] = []
    carried: dict[int, int] = {}
    for piece in batch.slices:
        sequence = piece.sequence
        start, end = sequence.num_computed, sequence.num_computed + piece.num_tokens
        starts.append(len(input_ids))
        lens.append(piece.num_tokens)
        contexts.append(start)
        input_ids += sequence.token_ids[start:end]
        if end > len(sequence.token_ids):
            carried[len(input_ids)] = sequence.pending_row
            input_ids.append(0)
        positions += range(start, end)
        blocks = sequence.blocks
        slots += [blocks[p // block_size] * block_size + p % block_size for p in range(start, end)]
        if piece.reaches_end:
            due_rows.append(len(input_ids) - 1)
    widest = max((len(piece.sequence.blocks) for piece in batch.slices), default=0)
    columns = [input_ids, positions, slots, due_rows, starts, lens, contexts]
    num_requests = len(batch.slices)
    flat = torch.empty(sum(map(len, columns)) + num_requests * widest + 1, dtype=torch.int64, pin_memory=pin)
    written, at = flat.numpy(), 0
    for column in columns:
        written[at : at + len(column)] = column
        at += len(column)
    tables = written[at : at + num_requests * widest].reshape(num_requests, widest)
    tables[:] = PADDING_BLOCK
    for row, piece in enumerate(batch.slices):
        tables[row, : len(piece.sequence.blocks)] = piece.sequence.blocks
    written[-1] = len(input_ids)
    inputs = _views(flat, [len(column) for column in columns], (num_requests, widest))
    return PackedStep(inputs, tuple(carried), tuple(carried.values()), flat)


def _views(flat: torch.Tensor, sizes: list[int], tables: tuple[int, int]) -> StepInputs:
    """The inputs that `flat` holds one after the other."""
    *columns, block_tables, num_valid = flat.split([*sizes, tables[0] * tables[1], 1])
    # The low half of an int64 is the int32: every platform that PyTorch runs on is little-endian.
    tensors = [*columns, block_tables.view(tables), num_valid.view(torch.int32)[:1]]
    return StepInputs(**{field.name: tensor for field, tensor in zip(fields(StepInputs), tensors, strict=True)})


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
