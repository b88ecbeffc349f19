"""Number formats by PyTorch's names for them, and their bytes; free of PyTorch, which takes seconds to import."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4, "uint8": 1}


def dtype_bytes(name: str) -> int:
    """Bytes of one number."""
    return _BYTES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """PyTorch's name for a format; `getattr(torch, name)` is the way back."""
    return str(dtype).removeprefix("torch.")
