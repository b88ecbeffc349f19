"""One static input of a step, by its size; free of PyTorch, so that plans count what `graphs.static` allocates."""

import math
from dataclasses import dataclass

from ..dispatch.dtypes import dtype_bytes


@dataclass(frozen=True)
class BufferSpec:
    """One input of a step.

    Attributes:
        shape: at the largest bucket.
        dtype: of the buffer, as PyTorch names it.
        padding: what rows beyond a step's own hold; safe to compute with.
        rows: what the first dimension counts: `tokens`, `requests`, or rows that are `due` an output.
    """

    shape: tuple[int, ...]
    dtype: str
    padding: int | float
    rows: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * dtype_bytes(self.dtype)
