"""What kernels on Hugging Face's expert weights ask of a layer: of a model's shapes, and of weights that are loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..budgets.path_settings import PathSettings
from ..errors import ConfigError
from .expert_weights import PLAIN

if TYPE_CHECKING:
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


def unsupported_layer(layers: Sequence[MoeLayer], refuse: Callable[[MoeLayer], None]) -> str | None:
    """Why one of these layers is refused, as `refuse` says; `None` where none is."""
    try:
        for layer in layers:
            refuse(layer)
    except ConfigError as error:
        return str(error)
    return None


def gated_silu_problems(settings: PathSettings, kind: str, dtypes: Sequence[str]) -> list[str]:
    """What of a model experts behind a dispatcher cannot compute that are for gated SiLU on plain weights.

    Args:
        settings: everything resolved.
        kind: of the experts.
        dtypes: that they compute in.
    """
    spec, setting = settings.spec, f"experts={kind!r}"
    problems: list[str] = []
    if spec.dtype not in dtypes:
        computes = " or ".join(dtypes)
        to = "it" if len(dtypes) == 1 else "one of them"
        problems.append(f"{setting} computes in {computes}, the pool's dtype is {spec.dtype}: set dtype to {to}")
    for reasons in dict.fromkeys(layer.unsupported_traits for layer in spec.moe if layer.unsupported_traits):
        why = " and ".join(reasons)
        problems.append(f"{setting} cannot run {spec.model_type}'s experts: {why}; set experts to 'torch'")
    return problems


def refuse_unsupported(layer: MoeLayer, setting: str, instead: str, dtypes: Sequence[str] = ("bfloat16",)) -> None:
    """Refuse a layer that a kernel for gated SiLU experts on plain weights does not compute, with the reason.

    Args:
        layer: with its weights.
        setting: what asks for the kernel.
        instead: what to set it to.
        dtypes: of weights that it reads.

    Raises:
        ConfigError: another format or dtype, or one of its shape's `unsupported_traits`.
    """
    import torch

    weights, reasons = layer.weights, list(layer.shape.unsupported_traits)
    if not reasons and weights.format != PLAIN:
        reasons.append(f"their weights are stored as {weights.format}")
    if not reasons and weights.dtype not in [getattr(torch, dtype) for dtype in dtypes]:
        reasons.append(f"they are not in {' or '.join(dtypes)}")
    if reasons:
        raise ConfigError(f"{setting} cannot run {layer.name}: {' and '.join(reasons)}; use {instead}")
