"""Rotary embeddings and routers as one kernel each on GPUs; see `fused_norms` for norms.

Model code stays Transformers' own. What stands in for a function or a module is tried beside it first, on the model's
own weights where it has some, and replaces it only where both compute the same.
"""

import importlib.util
import inspect
import logging
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

logger = logging.getLogger(__name__)

_ROTARY = "apply_rotary_pos_emb"
_TRIED_ROWS, _TRIED_HEADS, _TRIED_WIDTH = 64, 2, 64
_SEED = 0
# What code raises that has to be called otherwise: with other arguments, or others' shapes.
_CALLED_OTHERWISE = (TypeError, ValueError, IndexError, RuntimeError)

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class _FusedRotary:
    """Stands in for the function that model code calls, and leaves to it what the kernel does not take."""

    def __init__(self, own: Rotary):
        self._own = own

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from .small_kernels import rotate

        dtypes = {q.dtype, k.dtype, cos.dtype, sin.dtype}
        is_row_of_angles = cos.shape[:-1] == (1, q.shape[2]) and cos.shape[-1] in (q.shape[-1], q.shape[-1] // 2)
        is_dense = q.shape[0] == 1 and q.stride(-1) == k.stride(-1) == 1
        if options or len(dtypes) > 1 or not (is_row_of_angles and is_dense):
            return self._own(q, k, cos, sin, **options)
        return rotate(q, k, cos.contiguous(), sin.contiguous())


class _FusedRouter:
    """Stands in for a router's forward."""

    def __init__(self, weight_EH: torch.Tensor, top_k: int, is_normalised: bool, dtype: torch.dtype):
        self._weight_EH = weight_EH
        self._top_k = top_k
        self._is_normalised = is_normalised
        self._dtype = dtype

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        from .small_kernels import choose_experts

        logits_TE = functional.linear(hidden_states.reshape(-1, self._weight_EH.shape[1]), self._weight_EH)
        return logits_TE, *choose_experts(logits_TE, self._top_k, self._is_normalised, self._dtype)


def fuse_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """All of this module's, where Triton is there; the same on every rank of one installation.

    Args:
        model: its weights in place.
        dtype: of what its layers hand each other, equal on every rank; some families keep single weights in another.
    """
    if importlib.util.find_spec("triton") is None:
        logger.warning("rotary embeddings and routers stay many small kernels each: Triton is not installed")
        return
    num_attentions, num_routers = fuse_rotary(model, dtype), fuse_routers(model, dtype)
    logger.info("%d attentions and %d routers run fused kernels", num_attentions, num_routers)


@torch.inference_mode()
def fuse_rotary(model: nn.Module, dtype: torch.dtype) -> int:
    """Have attention modules call one kernel in place of Transformers' rotary function, where both agree to the bit.

    The same on every rank, since it depends on the model's code alone.

    Args:
        model: its weights in place.
        dtype: as in `fuse_layers`.

    Returns:
        How many attention modules call it.
    """
    fused: dict[Rotary, _FusedRotary | None] = {}
    num_replaced = 0
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        if not isinstance(forward, types.FunctionType) or _ROTARY not in forward.__code__.co_names:
            continue
        own = forward.__globals__[_ROTARY]
        if own not in fused:
            stand_in = _FusedRotary(own)
            fused[own] = stand_in if _rotates_alike(own, stand_in, next(model.parameters()).device, dtype) else None
        if (replacement := fused[own]) is not None:
            module.forward = types.MethodType(_calling(forward, replacement), module)
            num_replaced += 1
    if None in fused.values():
        logger.info("rotary embeddings are left as they are: the kernel computes others")
    return num_replaced


@torch.inference_mode()
def fuse_routers(model: nn.Module, dtype: torch.dtype) -> int:
    """Replace the forward of every router that takes the most likely experts of a softmax, as the kernel does.

    The routers of a model are the same on every rank, so all ranks replace the same ones.

    Args:
        model: its weights in place.
        dtype: as in `fuse_layers`; a router whose weight is in another stays.

    Returns:
        How many were replaced.
    """
    num_replaced, differing = 0, set()
    for module in model.modules():
        weight, top_k = module._parameters.get("weight"), getattr(module, "top_k", None)
        if not type(module).__name__.endswith("Router") or weight is None or not isinstance(top_k, int):
            continue
        replacement = _router_like(module, weight, top_k, dtype)
        if replacement is not None:
            module.forward = replacement
            num_replaced += 1
        else:
            differing.add(type(module).__name__)
    if differing:
        logger.info("routers left as they are, the kernel chooses otherwise: %s", ", ".join(sorted(differing)))
    return num_replaced


def _calling(forward: types.FunctionType, rotary: _FusedRotary) -> types.FunctionType:
    """The same function, to which the name of the rotary function means another one; Transformers' own stays."""
    names = {**forward.__globals__, _ROTARY: rotary}
    copy = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def _rotates_alike(own: Rotary, stand_in: _FusedRotary, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether both compute the same for angles of each width that the function takes, and it takes one."""
    generator = torch.Generator().manual_seed(_SEED)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    q, k = (drawn(1, _TRIED_ROWS, heads, _TRIED_WIDTH).transpose(1, 2) for heads in (_TRIED_HEADS, 1))
    angles = 3 * torch.randn(1, _TRIED_ROWS, _TRIED_WIDTH // 2, generator=generator)
    is_compared = False
    for parts in (2, 1):
        cos, sin = (torch.cat([table] * parts, dim=-1).to(device, dtype) for table in (angles.cos(), angles.sin()))
        try:
            expected = own(q, k, cos, sin)
        except _CALLED_OTHERWISE:
            continue  # with angles of the other width, or never so
        is_pair = isinstance(expected, tuple) and len(expected) == 2
        if not is_pair or not all(map(torch.equal, expected, stand_in(q, k, cos, sin))):
            return False
        is_compared = True
    return is_compared


def _router_like(module: nn.Module, weight_EH: torch.Tensor, top_k: int, dtype: torch.dtype) -> _FusedRouter | None:
    """A stand-in that chooses alike and weighs alike but for rounding, on random rows; `None` where none does."""
    has_more = set(module._parameters) != {"weight"} or module._buffers or module._modules
    if has_more or weight_EH.dim() != 2 or weight_EH.dtype != dtype:
        return None
    generator = torch.Generator().manual_seed(_SEED)
    rows = torch.randn(_TRIED_ROWS, weight_EH.shape[1], generator=generator).to(weight_EH.device, dtype)
    try:
        expected = module(rows)
    except _CALLED_OTHERWISE:
        return None
    if not isinstance(expected, tuple) or len(expected) != 3:
        return None
    logits_TE, weights_TK, ids_TK = expected
    if weights_TK.shape != ids_TK.shape or ids_TK.shape != (_TRIED_ROWS, top_k):
        return None
    for is_normalised in (True, False):
        stand_in = _FusedRouter(weight_EH, top_k, is_normalised, weights_TK.dtype)
        found_logits_TE, found_weights_TK, found_ids_TK = stand_in(rows)
        # Experts of equal logits may change places.
        alike = torch.equal(logits_TE.gather(1, ids_TK), found_logits_TE.gather(1, found_ids_TK))
        if alike and torch.allclose(weights_TK.float(), found_weights_TK.float(), rtol=2.0**-7, atol=1e-6):
            return stand_in
    return None
