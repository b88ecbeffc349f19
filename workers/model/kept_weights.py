"""Experts that stay in the bytes of their checkpoint: which tensors make which stack, and reading this rank's own.

How files' tensors become the stacks of a family's experts is Transformers' own conversion, as its loader would apply
it; what is converted otherwise than by stacking experts, and gate above up, is not kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    dot_natural_key,
)

from ...dispatch.budgets.stored_coding import StoredCoding
from ...dispatch.errors import CheckpointError
from ...dispatch.experts.expert_weights import stacked_parameters
from ...dispatch.experts.kept_experts import KeptExperts, KeptStack
from ...dispatch.moe import MoeExchange
from .formats.contract import CheckpointFormat, Header, Part, StoredTensor
from .formats.expanded import checked_values
from .renaming import Renaming
from .spec import MoeShape


@dataclass(frozen=True)
class StackSource:
    """What files have for one stacked projection of a layer.

    Attributes:
        pieces: tensors of a plain checkpoint, by name: those of each piece, one an expert, in order; or one of which
            the first dimension counts experts.
    """

    pieces: tuple[tuple[str, ...], ...]


class StackSources:
    """How Transformers makes the stacked projections of a model's experts.

    Args:
        model: of which names are those of the whole model; on the meta device.
    """

    def __init__(self, model: PreTrainedModel):
        self._renamed = Renaming(model)

    def find(self, names: Sequence[str], stacks: Sequence[str]) -> dict[str, StackSource]:
        """What each stack is made of, of those that anything is made of.

        Args:
            names: of a plain checkpoint's tensors.
            stacks: names of stacked projections in the model.

        Raises:
            CheckpointError: one is made otherwise than by stacking.
        """
        wanted, found = set(stacks), dict[str, dict[str | None, list[str]]]()
        for name in sorted(names, key=dot_natural_key):
            target, pattern = self._renamed(name)
            if target in wanted:
                found.setdefault(target, {}).setdefault(pattern, []).append(name)
        return {target: self._source_of(target, by_pattern) for target, by_pattern in found.items()}

    def _source_of(self, target: str, by_pattern: Mapping[str | None, list[str]]) -> StackSource:
        if None in by_pattern:
            return StackSource(tuple((name,) for name in by_pattern[None]))
        # As the loader looks converters up.
        by_source = {pattern: one for one in self._renamed.converters for pattern in one.source_patterns}
        converter = by_source[next(pattern for pattern in by_pattern if pattern is not None)]
        ways = [(type(one), one.dim) for one in converter.operations if isinstance(one, MergeModulelist | Concatenate)]
        is_whole = len(ways) == len(converter.operations)
        if not is_whole or ways not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
            raise CheckpointError(
                f"Transformers makes {target} of the files' tensors by "
                f"{', '.join(type(one).__name__ for one in converter.operations)}, not by stacking them"
            )
        return StackSource(tuple(tuple(by_pattern.get(pattern, ())) for pattern in converter.source_patterns))


def stacks_of(model: PreTrainedModel, moe: Sequence[MoeShape]) -> dict[str, dict[str, str]]:
    """Names of the stacked projections in the model of each experts module, by the names of `PLAIN`."""
    return {
        shape.name: {
            name: f"{shape.name}.{parameter}"
            for name, parameter in stacked_parameters(model.get_submodule(shape.name)).items()
        }
        for shape in moe
    }


def kept_or_reason(
    checkpoint_format: CheckpointFormat, model: PreTrainedModel, moe: Sequence[MoeShape]
) -> StoredCoding | str:
    """What a model's experts are kept as where they stay in their bytes, or why they cannot be.

    Where no weights are there, as far as declarations tell.

    Args:
        checkpoint_format: of the folder.
        model: on the meta device.
        moe: its layers.
    """
    coding = checkpoint_format.kept()
    if isinstance(coding, str):
        return coding
    stacks = stacks_of(model, moe)
    if apart := [source for source, names in stacks.items() if len(names) < 2]:
        return f"projections of {apart[0]} are not stacked over experts"
    try:
        stored = checkpoint_format.tensors(checkpoint_format.folder.headers)
    except CheckpointError:  # only planned with
        return coding
    wanted = [name for names in stacks.values() for name in names.values()]
    try:
        sources = StackSources(model).find(list(stored), wanted)
    except CheckpointError as error:
        return str(error)
    tensors = [stored[name] for source in sources.values() for piece in source.pieces for name in piece]
    if len(sources) < len(wanted) or any(one.expand is None for one in tensors):
        return "not all of its experts are quantised"
    return _unlike(sources, stored, checkpoint_format.folder.headers) or coding


def _unlike(
    sources: Mapping[str, StackSource], stored: Mapping[str, StoredTensor], headers: Mapping[str, Header]
) -> str | None:
    """Why the experts of a layer do not stack as they are stored, if they do not: a stack has one dtype and shape."""
    for source in sources.values():
        seen: dict[str, Part] = {}
        for name in (name for piece in source.pieces for name in piece):
            for label, part in stored[name].parts.items():
                other = seen.setdefault(label, part)
                first, own = headers.get(other.name), headers.get(part.name)  # one that is missing is said elsewhere
                if part.is_kept and first is not None and own is not None and first != own:
                    return (
                        f"experts of a layer are not stored alike: {other.name} is {first.dtype} {list(first.shape)}, "
                        f"{part.name} {own.dtype} {list(own.shape)}"
                    )
    return None


class KeptWeights:
    """What is kept of a checkpoint, as one rank reads it.

    Args:
        coding: of experts; equal on every rank, as the rest is.
        stored: tensors as a plain checkpoint has them, by name.
        sources: of each stack, by its name in the model.
        stacks: of each experts module; see `stacks_of`.
    """

    def __init__(
        self,
        coding: StoredCoding,
        stored: Mapping[str, StoredTensor],
        sources: Mapping[str, StackSource],
        stacks: Mapping[str, Mapping[str, str]],
    ):
        self._coding, self._stored, self._sources, self._stacks = coding, stored, sources, stacks
        self.parameters = frozenset(name for names in stacks.values() for name in names.values())
        self.tensors = frozenset(name for source in sources.values() for piece in source.pieces for name in piece)

    def read_into(
        self, exchange: MoeExchange, model: PreTrainedModel, slices: Mapping[str, Any], dtype: torch.dtype
    ) -> None:
        """Read the experts that this rank owns, expert by expert, and hand each module its own.

        Args:
            exchange: whose layers are not described yet; of a rank.
            model: bound to it, with everything else in place, on its device.
            slices: the files' tensors, by name.
            dtype: of the model.

        Raises:
            CheckpointError: a part is missing, or has values that none can be.
        """
        by_module = {id(bound.module): bound for bound in exchange.bound}
        for source, names in self._stacks.items():
            module = model.get_submodule(source)
            bound = by_module[id(module)]
            if bound.kept is not None:  # a model may run one module twice
                continue
            device = next((one.device for one in model.parameters()), torch.device("cpu"))
            first = exchange.rank * bound.num_local_experts
            experts = range(first, first + bound.num_local_experts)
            stacks = {name: self._read(self._sources[stack], experts, slices, device) for name, stack in names.items()}
            bound.kept = KeptExperts(module, source, self._coding, stacks, dtype)

    def _read(self, source: StackSource, experts: range, slices: Mapping[str, Any], device: torch.device) -> KeptStack:
        first = self._stored[source.pieces[0][0]]
        assert first.expand is not None, "what is kept is quantised"
        parts: dict[str, torch.Tensor] = {}
        for at, expert in enumerate(experts):
            for piece, names in enumerate(source.pieces):
                values = self._values(names, expert, slices)
                for name, value in values.items():
                    if name not in parts:
                        shape = len(experts), len(source.pieces), *value.shape
                        parts[name] = torch.empty(shape, dtype=value.dtype, device=device)
                    parts[name][at, piece].copy_(value)
        return KeptStack(parts, first.expand)

    def _values(self, names: Sequence[str], expert: int, slices: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        stored = self._stored[names[0] if len(names) == 1 else names[expert]]
        values = checked_values(stored, slices, expert if stored.is_stacked else ...)
        return {name: value for name, value in values.items() if stored.parts[name].is_kept}
