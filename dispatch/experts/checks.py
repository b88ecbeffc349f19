"""What kernels on Hugging Face's expert weights ask of a layer, found on its module, be it on the meta device."""

import torch

from ..errors import ConfigError


def unsupported_traits(experts: torch.nn.Module) -> tuple[str, ...]:
    """Why kernels for gated SiLU experts cannot compute these; empty where they can.

    They read `gate_up_proj` `[E, 2I, H]`, gate first, and `down_proj` `[E, H, I]`, as they are.
    """
    projections = (getattr(experts, "gate_up_proj", None), getattr(experts, "down_proj", None))
    reasons = {
        "their projections are not stacked over experts": any(
            not isinstance(weights, torch.Tensor) or weights.dim() != 3 for weights in projections
        ),
        "they have biases": bool(getattr(experts, "has_bias", False)),
        "their weights are stored transposed": bool(getattr(experts, "is_transposed", False)),
        "their gate and up projections are interleaved": not getattr(experts, "is_concatenated", True),
        "they have no gate": not getattr(experts, "has_gate", True),
        "their activation is not SiLU": "silu" not in type(getattr(experts, "act_fn", None)).__name__.lower(),
    }
    return tuple(reason for reason, applies in reasons.items() if applies)


def refuse_unsupported(experts: torch.nn.Module, name: str, setting: str, instead: str) -> None:
    """Refuse a layer's experts that a bf16 kernel does not compute, with the reason.

    Args:
        experts: the model's own experts module.
        name: of the layer.
        setting: what asks for the kernel.
        instead: what to set it to.

    Raises:
        ConfigError: another dtype, or one of `unsupported_traits`.
    """
    reasons = list(unsupported_traits(experts))
    if not reasons and experts.get_parameter("gate_up_proj").dtype != torch.bfloat16:
        reasons.append("they are not in bfloat16")
    if reasons:
        raise ConfigError(f"{setting} cannot run {name}: {' and '.join(reasons)}; use {instead}")
