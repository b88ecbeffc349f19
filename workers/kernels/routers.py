"""The choice of experts as one kernel on GPUs, where model code spells it out: softmax, top-k, division, casts.

In compiled layers too: it masks padding as well, and takes 2.4 us on an H200 (docs/gpu-results.md). What the compiler
makes of top-k was not measured beside it. A router's stand-in is tried first, on the model's own weights, and takes its
place only where both choose the same.
"""

import logging

import torch
from torch import nn
from torch.nn import functional

from ...dispatch.moe import MoeExchange

logger = logging.getLogger(__name__)

_TRIED_ROWS = 64
_SEED = 0
# What code raises that has to be called otherwise: with other arguments, or others' shapes.
_CALLED_OTHERWISE = (TypeError, ValueError, IndexError, RuntimeError)


class FusedRouter(nn.Module):
    """A router whose choice is one kernel. It becomes the class of a module, so that all layers run one code.

    Attributes:
        weight: `[E, H]`, the router's own.
        top_k: experts a token.
        is_normalised: divide the chosen weights by their sum.
        weights_dtype: of the weights.
        num_valid: see `MoeExchange.num_valid`; `None`: padding is routed like any row.
    """

    weight: nn.Parameter
    top_k: int
    is_normalised: bool
    weights_dtype: torch.dtype
    num_valid: torch.Tensor | None

    @classmethod
    def like(cls, router: nn.Module, is_normalised: bool, dtype: torch.dtype) -> "FusedRouter":
        """A new one over the weight of a router; it keeps no other state."""
        stand_in = cls()
        stand_in.weight = router.get_parameter("weight")
        stand_in._take(router.top_k, is_normalised, dtype)  # type: ignore[arg-type]
        return stand_in

    def take_place_of(self, router: nn.Module) -> None:
        """Have a module run as this one does."""
        router.__class__ = type(self)
        assert isinstance(router, FusedRouter)
        router._take(self.top_k, self.is_normalised, self.weights_dtype)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`[..., H]` -> `[T, E]` logits, `[T, K]` weights and int64 ids."""
        from .choose_experts import choose_experts

        logits_TE = functional.linear(hidden_states.reshape(-1, self.weight.shape[1]), self.weight)
        return logits_TE, *choose_experts(logits_TE, self.top_k, self.is_normalised, self.weights_dtype, self.num_valid)

    def _take(self, top_k: int, is_normalised: bool, dtype: torch.dtype) -> None:
        self.top_k, self.is_normalised, self.weights_dtype, self.num_valid = top_k, is_normalised, dtype, None


def mask_padding_in_routers(model: nn.Module, exchange: MoeExchange, device: torch.device) -> bool:
    """Have routers send padding to no expert, if all of them are fused; else layers do, in a kernel of their own.

    Args:
        model: its routers fused where they can be.
        exchange: that its experts are bound to.
        device: of the model.
    """
    fused = [module for module in model.modules() if isinstance(module, FusedRouter)]
    if not fused or len(fused) != len(exchange.bound):
        return False
    exchange.num_valid = torch.full((1,), torch.iinfo(torch.int32).max, dtype=torch.int32, device=device)
    for router in fused:
        router.num_valid = exchange.num_valid
    return True


@torch.inference_mode()
def fuse_routers(model: nn.Module, dtype: torch.dtype) -> int:
    """Replace every router that takes the most likely experts of a softmax, as the kernel does.

    The routers of a model are the same on every rank, so all ranks replace the same ones.

    Args:
        model: its weights in place.
        dtype: of what its layers hand each other, equal on every rank; a router whose weight is in another stays.

    Returns:
        How many were replaced.
    """
    num_replaced, differing = 0, set()
    for module in model.modules():
        weight, top_k = module._parameters.get("weight"), getattr(module, "top_k", None)
        if not type(module).__name__.endswith("Router") or weight is None or not isinstance(top_k, int):
            continue
        stand_in = _router_like(module, weight, top_k, dtype)
        if stand_in is not None:
            stand_in.take_place_of(module)
            num_replaced += 1
        else:
            differing.add(type(module).__name__)
    if differing:
        logger.info("routers left as they are, the kernel chooses otherwise: %s", ", ".join(sorted(differing)))
    return num_replaced


def _router_like(module: nn.Module, weight_EH: torch.Tensor, top_k: int, dtype: torch.dtype) -> FusedRouter | None:
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
        stand_in = FusedRouter.like(module, is_normalised, weights_TK.dtype)
        found_logits_TE, found_weights_TK, found_ids_TK = stand_in(rows)
        # Experts of equal logits may change places.
        alike = torch.equal(logits_TE.gather(1, ids_TK), found_logits_TE.gather(1, found_ids_TK))
        if alike and torch.allclose(weights_TK.float(), found_weights_TK.float(), rtol=2.0**-7, atol=1e-6):
            return stand_in
    return None
