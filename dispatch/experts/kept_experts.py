"""Experts of a layer that stay in the bytes of their checkpoint: what is held of them, and the family's own module on
them, expanded for each call."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..budgets.stored_coding import StoredCoding
from .expert_weights import ExpertWeights, biases_of, stacked_parameters

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class KeptStack:
    """One projection of this rank's experts of a layer.

    Attributes:
        parts: by name, `[E, P, ...]`: of each expert the pieces that files have apart, such as gate and up.
        expand: from the parts of one piece to its weight; reads nothing back to the host.
    """

    parts: Mapping[str, torch.Tensor]
    expand: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]

    def expanded(self, dtype: torch.dtype) -> torch.Tensor:
        """As the family's own module has it: pieces one below the other, `[E, ...]`."""
        num_experts, num_pieces = next(iter(self.parts.values())).shape[:2]
        experts: torch.Tensor | None = None
        for expert in range(num_experts):
            pieces = [self._piece(expert, piece) for piece in range(num_pieces)]
            whole = pieces[0] if num_pieces == 1 else torch.cat(pieces)
            if experts is None:
                experts = torch.empty(num_experts, *whole.shape, dtype=dtype, device=whole.device)
            experts[expert].copy_(whole)
        assert experts is not None, "a rank owns experts"
        return experts

    def _piece(self, expert: int, piece: int) -> torch.Tensor:
        return self.expand({name: part[expert, piece] for name, part in self.parts.items()})


class KeptExperts:
    """The experts of one layer on one rank.

    Args:
        module: the family's own, without its stacked projections: those are empty. On the device of the stacks.
        source: its name in the model.
        coding: of the stacks; equal on every rank.
        stacks: by the names of `PLAIN`.
        dtype: of the model.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        source: str,
        coding: StoredCoding,
        stacks: Mapping[str, KeptStack],
        dtype: torch.dtype,
    ):
        self._module = module
        self._stacks = dict(stacks)
        self._dtype = dtype
        parts = {f"{name}.{part}": one for name, stack in stacks.items() for part, one in stack.parts.items()}
        self.weights = ExpertWeights(source, coding.format, {**parts, **biases_of(module)}, coding)

    @property
    def num_bytes(self) -> int:
        """Of what is kept; biases are the module's."""
        return sum(part.nbytes for stack in self._stacks.values() for part in stack.parts.values())

    def forward_of(self, experts_forward: Forward) -> Forward:
        """The family's own forward, for which the layer's weights are expanded in each call."""

        def forward(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            with self._expanded():
                return experts_forward(x, ids, weights)

        return forward

    @contextmanager
    def _expanded(self) -> Iterator[None]:
        parameters, names = self._module._parameters, stacked_parameters(self._module)
        empty = {name: parameters[names[name]] for name in self._stacks}
        try:
            for name, stack in self._stacks.items():
                parameters[names[name]] = torch.nn.Parameter(stack.expanded(self._dtype), requires_grad=False)
            yield
        finally:
            for name, parameter in empty.items():
                parameters[names[name]] = parameter


def empty_stacks(module: torch.nn.Module) -> None:
    """Take a module's stacked projections away, which may be on the meta device, sharded or not."""
    for name in stacked_parameters(module).values():
        held = module._parameters[name]
        assert held is not None, "a stacked projection is a parameter"
        nothing = torch.empty(0, 0, 0, dtype=held.dtype, device=held.device)
        module._parameters[name] = torch.nn.Parameter(nothing, requires_grad=False)
