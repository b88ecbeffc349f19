"""How a collective is written down, to be compared between ranks; free of PyTorch, since the driver compares."""

import msgspec


class CollectiveCall(msgspec.Struct, frozen=True):
    """One collective as a rank issues it.

    Attributes:
        op: what it does.
        group: among which ranks.
        shape: of what this rank sends.
        dtype: of what this rank sends.
    """

    op: str
    group: str
    shape: tuple[int, ...]
    dtype: str
