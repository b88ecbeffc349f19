"""The weights of a layer's experts on one rank, in the format that they are stored in.

What experts are computed from is a value with the name of its format: a backend refuses formats that it does not read
before any step, and finds tensors by the names that the format gives them. Names of parameters in a model's own modules
are read here alone. PyTorch is imported inside functions: what checks models is read without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..budgets.moe_shape import Gating
from ..budgets.stored_coding import PLAIN as PLAIN
from ..budgets.stored_coding import StoredCoding
from ..errors import ConfigError

if TYPE_CHECKING:
    import torch

GATE_UP, DOWN = "gate_up", "down"
"""The tensors of `PLAIN`, as Transformers stacks them: `[E, 2I, H]`, gate first, and `[E, H, I]`, but for what the
layer's `unsupported_traits` say. Kept tensors have these names before those of their parts: `gate_up.codes`."""
BIAS = "bias"
_PARAMETERS = {GATE_UP: "gate_up_proj", DOWN: "down_proj"}
_BIASES = {GATE_UP: "gate_up_proj_bias", DOWN: "down_proj_bias"}


@dataclass(frozen=True)
class ExpertWeights:
    """This rank's weights of one layer; the format and the names of tensors are equal on every rank.

    Attributes:
        source: where they come from: the model's module of this name.
        format: that they are stored in, `PLAIN` or another; gives the tensors their names.
        stored: the tensors by name, stacked over this rank's experts. They are the model's own: a backend reads them
            through `tensor`.
        coding: what kept tensors stand for; `None` where they are `PLAIN`.
    """

    source: str
    format: str
    stored: Mapping[str, torch.Tensor]
    coding: StoredCoding | None = None

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


def gating_of(experts: torch.nn.Module) -> Gating | None:
    """What gated experts do between their projections, as tried on numbers; `None` where `Gating` cannot say it.

    The module may be on the meta device.
    """
    import torch

    if any(_stacked(experts, name) is None for name in _PARAMETERS) or not getattr(experts, "has_gate", True):
        return None
    has_bias, is_interleaved = bool(getattr(experts, "has_bias", False)), not getattr(experts, "is_concatenated", True)
    alpha, limit = getattr(experts, "alpha", None), getattr(experts, "limit", None)
    tried = [Gating(is_interleaved=is_interleaved, has_bias=has_bias)]
    if isinstance(alpha, int | float) and isinstance(limit, int | float):
        tried.append(Gating(float(alpha), 1.0, float(limit), is_interleaved, has_bias))
    with torch.device("cpu"), torch.no_grad():
        gate_up = torch.linspace(-20, 20, 64).repeat(2, 1) * torch.tensor([[1.0], [-0.3]])
        try:
            found = experts._apply_gate(gate_up)  # type: ignore[operator]
        except Exception:  # it takes another kind of rows, or has parameters of its own
            return None
        return next((one for one in tried if torch.allclose(gated(one, gate_up), found, 1e-5, 1e-6)), None)


def gated(gating: Gating, gate_up_RN: torch.Tensor) -> torch.Tensor:
    """`[R, 2I]` results of the first projection -> `[R, I]`, in PyTorch."""
    half = gate_up_RN.shape[-1] // 2
    if gating.is_interleaved:
        gate, up = gate_up_RN[..., ::2], gate_up_RN[..., 1::2]
    else:
        gate, up = gate_up_RN[..., :half], gate_up_RN[..., half:]
    if gating.limit is not None:
        gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    return (up + gating.plus) * gate * (gate * gating.alpha).sigmoid()


def stacked_parameters(experts: torch.nn.Module) -> dict[str, str]:
    """Names of the stacked projections in an experts module, by those of `PLAIN`; no biases."""
    return {name: parameter for name, parameter in _PARAMETERS.items() if _stacked(experts, name) is not None}


def biases_of(experts: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Biases of both projections, by their names among kept tensors; as the model has them."""
    import torch

    found = {f"{name}.{BIAS}": getattr(experts, parameter, None) for name, parameter in _BIASES.items()}
    return {name: one for name, one in found.items() if isinstance(one, torch.Tensor)}


def _stacked(experts: torch.nn.Module, name: str) -> torch.Tensor | None:
    import torch

    weights = getattr(experts, _PARAMETERS[name], None)
    return weights if isinstance(weights, torch.Tensor) and weights.dim() == 3 else None
