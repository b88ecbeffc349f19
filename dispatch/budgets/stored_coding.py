"""How experts are kept that stay in the bytes of their checkpoint; free of PyTorch, since plans count those bytes."""

from typing import Literal

import msgspec

CodesKind = Literal["e4m3", "e2m1", "int4", "int8"]
ScalesKind = Literal["float32", "bfloat16", "float16", "e4m3", "e8m0"]
PLAIN = "plain"
"""What ways to the experts call weights that are floating-point numbers of the model's dtype; see `reads`."""

_CODE_BITS = {"e4m3": 8, "e2m1": 4, "int4": 4, "int8": 8}
_SCALE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "e4m3": 1, "e8m0": 1}
_WHOLE_BYTES = 4


class StoredCoding(msgspec.Struct, frozen=True):
    """What the bytes of kept expert weights stand for; equal on every rank.

    A weight `[N, K]` has codes `[N, K]`, which are packed along columns, the first in the lowest bits, and scales
    `[ceil(N / rows), ceil(K / columns)]`.

    Attributes:
        format: of the checkpoint, for messages.
        codes: floats of 8 or 4 bits, or integers counted from the lowest.
        block: rows and columns that share a scale, as a factor; 0 stands for all of them.
        scales: how those are stored; `e8m0` are exponents of two.
        has_whole: whether each weight has one more factor, in float32.
    """

    format: str
    codes: CodesKind
    block: tuple[int, int]
    scales: ScalesKind
    has_whole: bool = False

    @property
    def code_bits(self) -> int:
        return _CODE_BITS[self.codes]

    def num_bytes(self, num_rows: int, num_columns: int) -> int:
        """Of one weight of an expert."""
        rows, columns = self.block[0] or num_rows, self.block[1] or num_columns
        scales = -(-num_rows // rows) * -(-num_columns // columns) * _SCALE_BYTES[self.scales]
        return num_rows * num_columns * self.code_bits // 8 + scales + self.has_whole * _WHOLE_BYTES


def weights_kind(stored: StoredCoding | None) -> str:
    """What a way has to read, of expert weights that are kept so, or expanded."""
    return PLAIN if stored is None else stored.codes
