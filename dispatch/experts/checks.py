"""What kernels on Hugging Face's expert weights ask of a layer: from a model's shapes, and of its modules.

The modules may be on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..budgets.path_settings import PathSettings
from ..errors import ConfigError

if TYPE_CHECKING:
    import torch

    from ..moe_layer import MoeLayer


def shape_problems(settings: PathSettings, multiples: tuple[int, int]) -> list[str]:
    """What of a model a bf16 kernel for gated SiLU experts cannot compute; the GPU itself is looked at by its rank.

    Args:
        settings: everything resolved.
        multiples: see `width_problem`.
    """
    spec, problems = settings.spec, []
    setting = f"dispatch={settings.dispatch!r} with quantisation={settings.quantisation!r}"
    if spec.dtype != "bfloat16":
        problems.append(f"{setting} takes bfloat16, the pool's dtype is {spec.dtype}: set dtype to it")
    for layer in spec.moe:
        width = width_problem(layer.hidden_size, layer.intermediate_size, multiples, settings.quantisation)
        reasons = layer.unsupported_traits or ((width,) if width is not None else ())
        if reasons:
            instead = "use dispatch='flashinfer' or 'allgather' with quantisation='none'"
            return [*problems, f"{setting} cannot run {layer.name}: {' and '.join(reasons)}; {instead}"]
    return problems


def width_problem(
    hidden_size: int, intermediate_size: int, multiples: tuple[int, int], quantisation: str
) -> str | None:
    """Which width a kernel does not take, if any.

    Args:
        hidden_size, intermediate_size: of a layer.
        multiples: that the kernel takes of them.
        quantisation: that asks for the kernel, for messages.
    """
    widths = (("hidden size", hidden_size), ("intermediate size", intermediate_size))
    for (what, size), multiple in zip(widths, multiples, strict=True):
        if size % multiple:
            return f"{what} {size} is no multiple of {multiple}, as quantisation={quantisation!r} needs"
    return None


def unsupported_traits(experts: torch.nn.Module) -> tuple[str, ...]:
    """Why kernels for gated SiLU experts cannot compute these; empty where they can.

    They read `gate_up_proj` `[E, 2I, H]`, gate first, and `down_proj` `[E, H, I]`, as they are.
    """
    import torch

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


def unsupported_layer(layers: Sequence[MoeLayer], refuse: Callable[[torch.nn.Module, str], None]) -> str | None:
    """Why one of these layers is refused, as `refuse` says of its module and name; `None` where none is."""
    try:
        for layer in layers:
            refuse(layer.experts.module, layer.name)
    except ConfigError as error:
        return str(error)
    return None


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
    import torch

    reasons = list(unsupported_traits(experts))
    if not reasons and experts.get_parameter("gate_up_proj").dtype != torch.bfloat16:
        reasons.append("they are not in bfloat16")
    if reasons:
        raise ConfigError(f"{setting} cannot run {name}: {' and '.join(reasons)}; use {instead}")
