"""One thing that a rank allocates for the life of a pool, as plans show it and the memory check counts it."""

from typing import Literal

import msgspec

BufferKind = Literal["weights", "KV cache", "buffer"]


class PlannedBuffer(msgspec.Struct, frozen=True):
    """Memory that one rank holds for the life of the pool, the same on every rank.

    Attributes:
        name: what it is, for people.
        rows: rows it holds; `None` where it is not made of rows.
        num_bytes: what is allocated for it.
        made_of: where the size comes from.
        kind: what the memory check counts it as.
    """

    name: str
    rows: int | None
    num_bytes: int
    made_of: str
    kind: BufferKind = "buffer"
