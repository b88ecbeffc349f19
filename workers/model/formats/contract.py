"""What a checkpoint format says of itself: one class a format, looked up in `formats.registry`.

A format stands between weight files and Transformers' loader, which sees a plain checkpoint: tensors by the names that
a plain one has. Everything else that looks at weights goes through it too: whether a folder can be served, the check of
headers, the bytes that plans count, and what a rank reads, whose digest is over the files' own tensors.

- **From the folder's declarations** (`recognises`, `problems`): before anything starts; weights may not be there.
- **From headers** (`tensors`, `header_problems`): before anything starts, and again on every rank; equal on every rank,
  since ranks compare headers. Nothing is read.
- **Values** (`StoredTensor.check`, `expand`) of one tensor at a time, of stacks one expert at a time: those alone that
  the rank owns. Each is cast to the model's dtype before the next is read.
- **Kept as they are** (`kept`): with `stored_weights: keep` a rank holds the parts of its own experts, checked, and
  what computes them reads codes and scales, or has them expanded on its device in each call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from ....dispatch.budgets.stored_coding import StoredCoding
    from .folder import ModelFolder

FLOATS = ("F64", "F32", "F16", "BF16")
"""What is cast to the model's dtype where a tensor is stored as it is."""

Expand = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
Check = Callable[[Mapping[str, torch.Tensor]], None]


class BadPart(Exception):
    """Raised by `Check`: no weights can be made of the values of a part. Whoever reads it names the tensor.

    Args:
        part: its name in `StoredTensor.parts`.
        what: is wrong, as it follows the name of the tensor.
    """

    def __init__(self, part: str, what: str):
        super().__init__(part, what)
        self.part = part
        self.what = what


@dataclass(frozen=True)
class Header:
    """What a file says of one of its tensors.

    Attributes:
        dtype: as safetensors names it.
        shape: of the whole tensor.
    """

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A tensor of the files that a tensor of the model comes from.

    Attributes:
        name: in the files.
        dtypes: of which it has to have one, as safetensors names them.
        shape: that it has to have.
        is_kept: whether `expand` needs it; what does not, `check` alone looks at.
    """

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    is_kept: bool = True


@dataclass(frozen=True)
class StoredTensor:
    """What files have in the place of one tensor of a plain checkpoint.

    Attributes:
        shape: of that tensor, which is held to the model's.
        parts: what it comes from, by the names that `expand` knows them by.
        expand: from the parts' values to the tensor's, in any float; `None`: the only part is read as it is. It takes
            tensors of any device, reads no value back to the host, and keeps none of them.
        is_stacked: whether the first dimension of the tensor, and of every part, counts experts. `expand` and `check`
            get the parts of one expert then, without it.
        check: called before, on a loading rank, on CPU tensors; raises `BadPart`.
    """

    shape: tuple[int, ...]
    parts: Mapping[str, Part]
    expand: Expand | None = None
    is_stacked: bool = False
    check: Check | None = None

    @property
    def as_it_is(self) -> str | None:
        """The name of the tensor that is read as it is, if one is."""
        return next(iter(self.parts.values())).name if self.expand is None else None


def stored_as_it_is(name: str, header: Header) -> StoredTensor:
    """A tensor that is stored plainly, as those of modules are that a format leaves alone."""
    return StoredTensor(header.shape, {name: Part(name, FLOATS, header.shape)})


class CheckpointFormat(ABC):
    """How the weights of a model folder are stored.

    Args:
        folder: whose weights these are.

    Attributes:
        name: of the format; it travels to the ranks.
        is_plain: whether it is what a folder is read as that no other format recognises.
    """

    name: ClassVar[str]
    is_plain: ClassVar[bool] = False

    def __init__(self, folder: ModelFolder):
        self.folder = folder

    @classmethod
    @abstractmethod
    def recognises(cls, folder: ModelFolder) -> bool:
        """Whether a folder is of this format, supported or not; no two formats recognise the same one.

        What tells may be its declarations, or names and dtypes in headers, which are not there where a model is only
        planned with.
        """

    def problems(self) -> list[str]:
        """What of the declarations cannot be served, each with the reason; which modules are left alone included."""
        return []

    def tensors(self, headers: Mapping[str, Header]) -> dict[str, StoredTensor]:
        """Tensors as a plain checkpoint has them, by their names there.

        Args:
            headers: of all tensors of the files, by name. A tensor that belongs to another is named as a part of it
                alone, and one that is of no use is left out. Parts may be missing or wrong: the check finds it.
        """
        raise NotImplementedError

    def header_problems(self, headers: Mapping[str, Header], taken: Mapping[str, bool]) -> list[str]:
        """What else of the files cannot be served: a module, say, that is declared to be left alone, and is not.

        Args:
            headers: as for `tensors`, whose parts are there and right.
            taken: tensors that the model takes, by their names in a plain checkpoint; whether each is the weight of a
                linear module or of experts, which a quantisation is about.
        """
        return []

    def kept(self) -> StoredCoding | str:
        """What experts are kept as where they stay in their bytes, or why they cannot be.

        Parts of a tensor of experts are then `codes` and `scales`, and `scale` where a weight has one more factor; see
        `StoredCoding`. Equal on every rank.
        """
        return f"weights stored as {self.name} are expanded as they are read"

    def held_bytes(self, name: str, parameter: torch.Tensor) -> int:
        """Bytes that a parameter takes on the ranks, all together where it is divided over them.

        Args:
            name: in the model.
            parameter: of the model's dtype, on the meta device.
        """
        return parameter.nbytes
