"""RMS norms as one kernel each on GPUs, where model code spells them out as six: a small decode step is all launches.

PyTorch's own `rms_norm` stands in for a module that computes the same, which is tried before it is replaced: model
families differ in where they round and in whether they add one to the weight.
"""

import logging

import torch
from torch import nn
from torch.nn import functional

logger = logging.getLogger(__name__)

_TRIED_ROWS = 64
_SUMS = 2.0**-19  # by which float32 sums of a row in another order may differ; two roundings to the dtype come on top
_SEED = 0


@torch.inference_mode()
def fuse_norms(model: nn.Module, dtype: torch.dtype) -> int:
    """Replace the forward of every RMS norm that PyTorch's computes alike, but for where it rounds.

    The norms of a model are the same on every rank, so all ranks replace the same ones.

    Args:
        model: its weights in place, in any float dtype.
        dtype: of what its layers hand each other, equal on every rank; a norm whose weight is in another stays.

    Returns:
        How many were replaced.
    """
    replaced, differing = 0, set()
    for module in model.modules():
        eps = _eps_of(module)
        if eps is None:
            continue
        weight = module.get_parameter("weight")
        fused = _FusedNorm(weight, eps)
        if weight.dtype == dtype and _computes_alike(module, fused, weight):
            module.forward = fused
            replaced += 1
        else:
            differing.add(type(module).__name__)
    if differing:
        logger.info("norms left as they are, PyTorch's rms_norm computes otherwise: %s", ", ".join(sorted(differing)))
    return replaced


class _FusedNorm:
    """Stands in for a norm's forward."""

    def __init__(self, weight: torch.Tensor, eps: float):
        self._weight = weight
        self._eps = eps

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden_states, self._weight.shape, self._weight, self._eps)


def _eps_of(module: nn.Module) -> float | None:
    """The epsilon of an RMS norm with a weight for each number of a row; `None` for any other module."""
    weight = module._parameters.get("weight")
    if not type(module).__name__.endswith("RMSNorm") or weight is None or weight.dim() != 1:
        return None
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _computes_alike(module: nn.Module, fused: _FusedNorm, weight: torch.Tensor) -> bool:
    generator = torch.Generator().manual_seed(_SEED)
    rows = 3 * torch.randn(_TRIED_ROWS, weight.shape[0], generator=generator)
    rows = rows.to(device=weight.device, dtype=weight.dtype)  # which is the model's
    expected, found = module(rows).float(), fused(rows).float()
    tolerance = 2 * torch.finfo(weight.dtype).eps + _SUMS
    return bool(((found - expected).abs() <= tolerance * expected.abs()).all())
