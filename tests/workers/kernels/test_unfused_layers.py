"""Rotary functions and routers that no kernel stands in for stay as they are: they are found out before one is run.

Needs no Triton; what kernels compute is in `test_fused_layers`.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_pool.workers.kernels.fused_layers import fuse_rotary, fuse_routers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.ernie4_5_moe.configuration_ernie4_5_moe import Ernie4_5_MoeConfig
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb as rotary_of_one_tensor
from transformers.models.minimax_m2.configuration_minimax_m2 import MiniMaxM2Config
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

HIDDEN, EXPERTS, TOP_K = 16, 8, 2


def drawn(router: nn.Module) -> nn.Module:
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(3)))
    return router


def assert_stays(router: nn.Module, dtype: torch.dtype, *others: torch.Tensor) -> None:
    rows = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(4)).to(dtype)
    with torch.inference_mode():
        expected = router(rows, *others)
        assert fuse_routers(nn.ModuleList([router]), dtype) == 0
        assert "forward" not in vars(router)
        assert all(map(torch.equal, router(rows, *others), expected))


def test_a_router_that_is_called_with_more_than_rows_stays():
    config = MiniMaxM2Config(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K)
    assert_stays(drawn(MiniMaxM2TopKRouter(config)).half(), torch.float16, torch.zeros(EXPERTS))


def test_a_router_whose_bias_is_in_a_child_stays():
    """Its rows come in bfloat16, while its weight is kept in float32."""
    config = Ernie4_5_MoeConfig(hidden_size=HIDDEN, moe_num_experts=EXPERTS, moe_k=TOP_K)
    router = drawn(Ernie4_5_MoeTopKRouter(config))
    assert router.weight.dtype is torch.float32
    assert_stays(router, torch.bfloat16)
    assert_stays(router, torch.float32)


def test_a_router_whose_weight_is_in_another_dtype_stays():
    class WideRouter(Qwen3MoeTopKRouter):
        def forward(self, hidden_states: torch.Tensor) -> Any:
            return super().forward(hidden_states.float())

    config = Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=TOP_K)
    assert_stays(drawn(WideRouter(config)), torch.bfloat16)


def one_tensor_for_both(q, k, cos, sin):
    return torch.cat((q, k), dim=1)


def three_tensors(q, k, cos, sin):
    return q, k, cos


@pytest.mark.parametrize("rotary", [rotary_of_one_tensor, one_tensor_for_both, three_tensors])
def test_a_rotary_function_that_takes_or_gives_something_else_stays(
    rotary: Callable[..., Any], random_models, monkeypatch
):
    model = AutoModelForCausalLM.from_pretrained(random_models["qwen3_moe"], dtype=torch.float16).eval()
    monkeypatch.setattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", rotary)
    assert fuse_rotary(model, torch.float16) == 0
    assert not any("forward" in vars(module) for module in model.modules())
