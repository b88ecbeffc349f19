"""What a step yields, a row for each slice that reaches the end of its sequence: on the device and on the host.

What a row has is said once, by the fields of `StepRows` and the columns of `Generated`. How rows are packed, sent and
taken apart follows from the fields, which are equal on every rank, so a broadcast never depends on what rows hold.
"""

import enum
from dataclasses import dataclass, field, fields

import torch
import torch.distributed as dist

from ..request import Generated
from ..sharing import SharingRanks


class RowFailure(enum.IntEnum):
    """Why a step has no token for a request. On the device 0 stands for none of them."""

    NOT_FINITE = 1

    def told(self, num_tokens: int) -> str:
        """For the caller, of a request that has so many tokens."""
        return f"the model's logits are not finite after {num_tokens} tokens"


@dataclass(frozen=True, slots=True)
class Row:
    """What a step yields for one slice, on the host.

    Attributes:
        generated: the token and what came with it; empty where the row failed.
        failure: why there is no token.
    """

    generated: Generated
    failure: RowFailure | None = None


@dataclass(frozen=True)
class StepRows:
    """The rows of one step on one device, a tensor a field. That of a column of `Generated` has its name and `_N`.

    Each field is int64 or float64: a row is packed as eight bytes a field.

    Attributes:
        token_ids_N: `[N]`; ids within the vocabulary also where the row failed, since the next step may take them in.
        failures_N: `[N]`, a `RowFailure` each, or 0.
    """

    token_ids_N: torch.Tensor = field(metadata={"dtype": torch.int64})
    failures_N: torch.Tensor = field(metadata={"dtype": torch.int64})

    @classmethod
    def none(cls, device: torch.device) -> "StepRows":
        """Of a step that yields nothing."""
        return cls.unpacked(cls._space(0, device))

    @classmethod
    def unpacked(cls, packed_NF: torch.Tensor) -> "StepRows":
        """Views of what `packed` returned."""
        return cls(*(packed_NF[:, index].view(one.metadata["dtype"]) for index, one in enumerate(fields(cls))))

    def packed(self) -> torch.Tensor:
        """All of it as a new `[N, F]` int64 tensor of the bits of `F` fields."""
        return torch.stack([getattr(self, one.name).view(torch.int64) for one in fields(self)], dim=1)

    @classmethod
    def shared(cls, own: "StepRows | None", num_rows: int, sharing: SharingRanks, device: torch.device) -> "StepRows":
        """The leader's rows on every rank that shares its batch; one broadcast, collective over these ranks.

        Args:
            own: of the leader; not looked at elsewhere.
            num_rows: `N`, by the batch; equal on these ranks.
            sharing: these ranks.
            device: of this rank.
        """
        if sharing.is_leader:
            assert own is not None
            packed_NF = own.packed()
        else:
            packed_NF = cls._space(num_rows, device)
        dist.broadcast(packed_NF, src=sharing.leader, group=sharing.step_group)
        return cls.unpacked(packed_NF)

    def pinned(self) -> "StepRows":
        """A copy on the host, which may be under way when this returns."""
        packed_NF = self.packed()
        on_host = torch.empty(packed_NF.shape, dtype=torch.int64, pin_memory=True)
        on_host.copy_(packed_NF, non_blocking=True)
        return self.unpacked(on_host)

    def rows(self) -> list[Row]:
        """One by one; waits for a device, so call it of rows that are on the host."""
        columns = [[(value,) for value in getattr(self, f"{name}_N").tolist()] for name in Generated.__struct_fields__]
        return [
            Row(Generated(), RowFailure(failure)) if failure else Row(Generated(*values))
            for failure, *values in zip(self.failures_N.tolist(), *columns, strict=True)
        ]

    @classmethod
    def _space(cls, num_rows: int, device: torch.device) -> torch.Tensor:
        return torch.empty(num_rows, len(fields(cls)), dtype=torch.int64, device=device)
