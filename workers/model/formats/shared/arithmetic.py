"""From stored codes and scales to floats, in float32, on tensors of any device: what all formats share.

Letters are shapes: `N` rows and `K` columns of a weight, `R` and `C` rows and columns of its scales.
"""

from collections.abc import Mapping
from functools import cache

import torch

from ..contract import BadPart

_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_HALF, *(-value for value in _HALF))
"""The values of four bits as floats of two exponent bits and one of mantissa, by code."""
# Times the largest code of any format it is a number still.
_MOST_SCALE = torch.finfo(torch.float32).max / torch.finfo(torch.float8_e4m3fn).max


def check_scales(parts: Mapping[str, torch.Tensor], name: str, scales: torch.Tensor | None = None) -> None:
    """Refuse scales that no weights can have.

    Args:
        parts: of a tensor, on the host.
        name: of the part.
        scales: what its values stand for, where they are not the scales themselves.

    Raises:
        BadPart: one is NaN, infinite, zero or negative, or makes weights infinite.
    """
    found = (parts[name] if scales is None else scales).float()
    if bool(((found <= _MOST_SCALE) & (found > 0)).all()):
        return
    wrong = {
        "NaN": found.isnan(),
        "infinite": found.isinf() & (found > 0),
        "zero": found == 0,
        "negative": found < 0,
        "so large that codes times it are infinite": found.isfinite() & (found > _MOST_SCALE),
    }
    counts = ", ".join(f"{int(where.sum()):,} {what}" for what, where in wrong.items() if where.any())
    raise BadPart(name, f"has scales that no weights can have, of {found.numel():,}: {counts}")


def check_e4m3(parts: Mapping[str, torch.Tensor], name: str) -> None:
    """Refuse codes of a part, on the host, that are no numbers.

    Raises:
        BadPart: one is NaN.
    """
    magnitudes = parts[name].view(torch.int8) & 127
    if int(magnitudes.max()) == 127:
        raise BadPart(name, f"has {int((magnitudes == 127).sum()):,} weights of {magnitudes.numel():,} that are NaN")


def values_of_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """The values of codes in e4m3, in float32.

    By way of float16, whose bits are those of e4m3 but for one more of the exponent: PyTorch's own cast takes five
    times as long on CPUs.
    """
    # The sign is extended into what the shift puts in its place, and into the bit that float16 has more: that goes.
    halves = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080)
    return halves.view(torch.float16).float().mul_(256)


@cache
def pairs_of(values_V: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Values of both codes of each byte, the low one first, from those of codes of four bits, `[16]`.

    Made once for a device: a step that is recorded copies nothing from the host.

    Returns:
        `[256]` int64, each with the bits of two float32: they are looked up as one.
    """
    with torch.inference_mode(False):
        codes, table = torch.arange(256), torch.tensor(values_V)
        return torch.stack((table[codes & 15], table[codes >> 4]), -1).view(torch.int64).squeeze(-1).to(device)


def unpacked(bytes_NB: torch.Tensor, values_V: tuple[float, ...]) -> torch.Tensor:
    """`[N, 2 B]` values of `[N, B]` bytes, each of two codes; see `pairs_of`."""
    pairs = pairs_of(values_V, bytes_NB.device)
    return pairs.index_select(0, bytes_NB.reshape(-1).int()).view(torch.float32).reshape(bytes_NB.shape[0], -1)


def times_blocks(values_NK: torch.Tensor, scales_RC: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Multiply each block by its scale, in place. The last blocks of rows and columns may be smaller than others."""
    rows, columns = block
    if rows == 1:
        whole = values_NK.shape[1] // columns
        values_NK[:, : whole * columns].unflatten(1, (whole, columns)).mul_(scales_RC[:, :whole, None])
        values_NK[:, whole * columns :].mul_(scales_RC[:, whole:])
        return values_NK
    scales_RK = scales_RC.repeat_interleave(columns, 1)[:, : values_NK.shape[1]]
    for values, scales_K in zip(values_NK.split(rows), scales_RK, strict=True):
        values.mul_(scales_K)
    return values_NK


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of what has to be a matrix; where it is none, those of one that it will be held against."""
    rows, columns = (1, 1, *shape)[-2:]
    return rows, columns


def num_blocks(size: int, block: int) -> int:
    """Blocks of a dimension, of which the last may be smaller."""
    return -(-size // block)
