"""Widths that the SM90 mega kernel and NVFP4 experts take; free of PyTorch, to be refused before any actor starts."""

from ..budgets.limits import QuantisationKind

# Of hidden and intermediate sizes: the second GEMM's tile, TMA rows, and blocks of scales with their layout. FlashInfer
# takes multiples of 64 in `fp8` and says that it never tried those that are none of 128: at an intermediate size of 64
# it computed garbage for some numbers of rows, another at every run.
_MULTIPLES = {"none": (256, 64), "fp8": (128, 128), "fp8_blockwise": (128, 128), "nvfp4": (128, 128)}


def width_problem(hidden_size: int, intermediate_size: int, quantisation: QuantisationKind) -> str | None:
    """Which width the kernel does not take, if any."""
    widths = (("hidden size", hidden_size), ("intermediate size", intermediate_size))
    for (what, size), multiple in zip(widths, _MULTIPLES[quantisation], strict=True):
        if size % multiple:
            return f"{what} {size} is no multiple of {multiple}, as quantisation={quantisation!r} needs"
    return None
