"""Values that ranks show each other: encoded by their type, and decoded strictly. Nothing from a peer is unpickled."""

from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from .collectives import all_gather_tensors

T = TypeVar("T")


def gather_values(value: T, kind: Any, group: dist.ProcessGroup | None) -> list[T]:
    """What each rank brings, in rank order; collective over the group, on the host.

    Args:
        value: of this rank.
        kind: its type, as msgspec takes types, equal on every rank.
        group: a group that carries tensors of the host.

    Raises:
        msgspec.ValidationError: a rank brought something of another type.
    """
    messages = gather_messages(msgspec.msgpack.encode(value), group)
    return [msgspec.msgpack.decode(message, type=kind) for message in messages]


def gather_messages(message: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """The message of each rank, in rank order, of any lengths; collective over the group, on the host."""
    world_size = dist.get_world_size(group)
    lengths = torch.zeros(world_size, dtype=torch.int64)
    all_gather_tensors(lengths, torch.tensor([len(message)]), group=group)
    longest = max(1, int(lengths.max()))
    sent = torch.zeros(longest, dtype=torch.uint8)
    if message:
        sent[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    received = torch.zeros(world_size * longest, dtype=torch.uint8)
    all_gather_tensors(received, sent, group=group)
    parts = received.view(world_size, longest)
    return [bytes(part[:length].numpy()) for part, length in zip(parts, lengths.tolist(), strict=True)]
