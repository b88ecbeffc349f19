"""A tensor that is expanded as it is read."""

from collections.abc import Mapping
from typing import Any

import torch

from ....dispatch.errors import CheckpointError
from .contract import BadPart, StoredTensor


class ExpandedTensor:
    """A lazy tensor, as the loader takes it, whose values are made of others'; of a stack, expert by expert.

    Args:
        stored: what it is made of.
        slices: the files' tensors, by name.
        dtype: of what is read.
    """

    def __init__(self, stored: StoredTensor, slices: Mapping[str, Any], dtype: torch.dtype):
        self._stored, self._slices, self._dtype = stored, slices, dtype

    def get_shape(self) -> list[int]:
        return list(self._stored.shape)

    def __getitem__(self, key: Any) -> torch.Tensor:
        """The whole of it for `...`, else what slices say, of which the first says which experts of a stack."""
        if not self._stored.is_stacked:
            whole = self._expanded(...)
            return whole if key is Ellipsis else whole[key]
        keys = (slice(None),) if key is Ellipsis else key
        numbers = range(*keys[0].indices(self._stored.shape[0]))
        experts = torch.empty(len(numbers), *self._stored.shape[1:], dtype=self._dtype)
        for expert, number in zip(experts, numbers, strict=True):
            expert.copy_(self._expanded(number))
        return experts[(slice(None), *keys[1:])]

    def _expanded(self, expert: Any) -> torch.Tensor:
        """Of one expert of a stack by its number; of anything else by `...`."""
        expand = self._stored.expand
        assert expand is not None, "a tensor that is stored as it is needs no expanding"
        expanded = expand(checked_values(self._stored, self._slices, expert))
        expected = self._stored.shape[0 if expert is Ellipsis else 1 :]
        assert tuple(expanded.shape) == expected, f"{tuple(expanded.shape)} is not the shape {expected} of the tensor"
        return expanded.to(self._dtype)


def checked_values(stored: StoredTensor, slices: Mapping[str, Any], expert: Any = ...) -> dict[str, torch.Tensor]:
    """The parts' values of a tensor, by name, as weights can have them.

    Args:
        stored: what the tensor is made of.
        slices: the files' tensors, by name.
        expert: number of one of a stack, whose parts are then without that dimension; `...` for anything else.

    Raises:
        CheckpointError: a part is missing, or has values that none can be; names it.
    """
    parts = stored.parts
    if absent := [part.name for part in parts.values() if part.name not in slices]:
        raise CheckpointError(f"{len(absent)} weight(s) missing: {', '.join(absent)}")
    if expert is Ellipsis:
        values = {name: slices[part.name][...] for name, part in parts.items()}
    else:
        one = slice(expert, expert + 1)
        values = {name: slices[part.name][(one,)][0] for name, part in parts.items()}
    try:
        if stored.check is not None:
            stored.check(values)
    except BadPart as bad:
        of_expert = "" if expert is Ellipsis else f" of expert {expert}"
        raise CheckpointError(f"{parts[bad.part].name}{of_expert} {bad.what}") from bad
    return values
