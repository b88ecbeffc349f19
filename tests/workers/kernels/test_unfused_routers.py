"""Routers that no kernel stands in for stay as they are: they are found out before one is run.

Needs no Triton; what the kernel computes is in `test_routers`.
"""

from typing import Any

import torch
from expert_pool.workers.kernels.routers import fuse_routers
from torch import nn
from transformers.models.ernie4_5_moe.configuration_ernie4_5_moe import Ernie4_5_MoeConfig
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
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
        expected, kind = router(rows, *others), type(router)
        assert fuse_routers(nn.ModuleList([router]), dtype) == 0
        assert type(router) is kind
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
