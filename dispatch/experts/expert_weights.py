"""The weights of a layer's experts on one rank, in the format that they are stored in.

What experts are computed from is a value with the name of its format: a backend refuses formats that it does not read
before any step, and finds tensors by the names that the format gives them. Names of parameters in a model's own modules
are read here alone. PyTorch is imported inside functions: what checks models is read without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    import torch

PLAIN = "plain"
"""Floating-point numbers as Transformers stacks them: `gate_up` `[E, 2I, H]`, gate first, and `down` `[E, H, I]`, but
for what the layer's `unsupported_traits` say."""
GATE_UP, DOWN = "gate_up", "down"
_PARAMETERS = {GATE_UP: "gate_up_proj", DOWN: "down_proj"}


@dataclass(frozen=True)
class ExpertWeights:
    """This rank's weights of one layer; the format and the names of tensors are equal on every rank.

    Attributes:
        source: where they come from: the model's module of this name.
        format: that they are stored in, `PLAIN` or another; gives the tensors their names.
        stored: the tensors by name, stacked over this rank's experts. They are the model's own: a backend reads them
            through `tensor`.
    """

    source: str
    format: str
    stored: Mapping[str, torch.Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """Of what is stored, the first tensor's."""
        return next(iter(self.stored.values())).dtype

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as it is stored; whoever keeps it has it still after `release`.

        Raises:
            ConfigError: the format has no tensor of this name.
        """
        if name not in self.stored:
            there = ", ".join(self.stored) or "nothing"
            raise ConfigError(
                f"the experts of {self.source} are stored as {self.format}, with {there}: what asks for {name!r} reads "
                "another format; set experts and dispatch to ways that read this one"
            )
        return self.stored[name].detach()

    def release(self) -> None:
        """Drop the model's own tensors, which something else holds now."""
        for tensor in self.stored.values():
            tensor.data = tensor.data.new_empty(0)


def plain_weights(experts: torch.nn.Module, source: str) -> ExpertWeights:
    """The weights of a model's own experts module, sharded; other projections than the two are the module's business.

    Args:
        experts: the module, once it is loaded: its parameters are taken as they are.
        source: its name in the model.
    """
    import torch

    found = {name: getattr(experts, parameter, None) for name, parameter in _PARAMETERS.items()}
    stored = {name: weights for name, weights in found.items() if isinstance(weights, torch.Tensor)}
    return ExpertWeights(source, PLAIN, stored)


def intermediate_size_of(experts: torch.nn.Module, hidden_size: int) -> int:
    """The width between the projections of an experts module, which may be on the meta device.

    Whichever way round a projection is stored, it is as wide as the hidden state on one side; 0 where it is not stacked
    over experts.
    """
    down = _stacked(experts, DOWN)
    return 0 if down is None else down[0].numel() // hidden_size


def unsupported_traits(experts: torch.nn.Module) -> tuple[str, ...]:
    """Why kernels for gated SiLU experts cannot compute these; empty where they can.

    They read the two tensors of `PLAIN` as they are. The module may be on the meta device.
    """
    reasons = {
        "their projections are not stacked over experts": any(_stacked(experts, name) is None for name in _PARAMETERS),
        "they have biases": bool(getattr(experts, "has_bias", False)),
        "their weights are stored transposed": bool(getattr(experts, "is_transposed", False)),
        "their gate and up projections are interleaved": not getattr(experts, "is_concatenated", True),
        "they have no gate": not getattr(experts, "has_gate", True),
        "their activation is not SiLU": "silu" not in type(getattr(experts, "act_fn", None)).__name__.lower(),
    }
    return tuple(reason for reason, applies in reasons.items() if applies)


def _stacked(experts: torch.nn.Module, name: str) -> torch.Tensor | None:
    import torch

    weights = getattr(experts, _PARAMETERS[name], None)
    return weights if isinstance(weights, torch.Tensor) and weights.dim() == 3 else None
