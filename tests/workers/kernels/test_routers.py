"""The choice of experts as one kernel, in Triton's interpreter, against what Transformers has.

In float16: the interpreter does not round to bfloat16 as GPUs do.
"""

import os

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

pytest.importorskip("triton", reason="Triton is not installed; `make test-kernels` runs these")
# Triton looks when it is imported, and PyTorch has imported it by now.
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted with TRITON_INTERPRET=1: `make test-kernels`", allow_module_level=True)

from expert_pool.workers.kernels.choose_experts import choose_experts
from expert_pool.workers.kernels.routers import FusedRouter, fuse_routers

ROUTER_FAMILIES = {"qwen3_moe": True, "mixtral": True, "olmoe": True, "gpt_oss": False, "deepseek_v3": False}


def model_of(path: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16).eval()


@torch.inference_mode()
def logits_of(model: nn.Module) -> torch.Tensor:
    ids = torch.randint(2, model.config.vocab_size, (1, 23), generator=torch.Generator().manual_seed(5))
    return model(ids, use_cache=False).logits


@pytest.mark.parametrize(("family", "is_fused"), ROUTER_FAMILIES.items())
def test_routers_are_replaced_where_they_choose_the_same(family, is_fused, random_models):
    model = model_of(random_models[family])
    before = logits_of(model)
    num_replaced = fuse_routers(model, torch.float16)
    assert num_replaced == (model.config.num_hidden_layers if is_fused else 0)
    assert sum(isinstance(module, FusedRouter) for module in model.modules()) == num_replaced
    torch.testing.assert_close(logits_of(model), before, rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.parametrize(("num_experts", "top_k"), [(128, 8), (60, 6), (8, 8), (4, 1)])
@pytest.mark.parametrize("is_normalised", [True, False])
def test_the_most_likely_experts_are_chosen_with_their_weights(num_experts, top_k, is_normalised):
    logits = torch.randn(9, num_experts, generator=torch.Generator().manual_seed(2))
    weights, ids = choose_experts(logits, top_k, is_normalised, torch.float32)
    expected = torch.softmax(logits, dim=-1).topk(top_k)
    shares = expected.values / (expected.values.sum(-1, keepdim=True) if is_normalised else 1)
    assert torch.equal(ids, expected.indices)
    torch.testing.assert_close(weights, shares)


def test_equal_logits_give_the_lower_experts_and_bad_ones_give_experts_all_the_same():
    logits = torch.zeros(4, 6)
    logits[1, 4] = float("nan")
    logits[2, 3] = float("inf")
    logits[3] = float("-inf")
    weights, ids = choose_experts(logits, 3, True, torch.float32)
    assert ids[0].tolist() == [0, 1, 2]
    torch.testing.assert_close(weights[0], torch.full((3,), 1 / 3))
    for row in (1, 2, 3):
        assert sorted(set(ids[row].tolist())) == sorted(ids[row].tolist())
        assert all(0 <= expert < 6 for expert in ids[row].tolist())
        assert weights[row].isnan().all()


def test_a_router_of_another_kind_stays(random_models):
    model = model_of(random_models["qwen3_moe"])

    class ScaledRouter(nn.Module):
        def __init__(self, router: nn.Module):
            super().__init__()
            self.weight, self.top_k = router.weight, router.top_k

        def forward(self, hidden_states: torch.Tensor):
            logits = nn.functional.linear(hidden_states, self.weight)
            weights, ids = torch.sigmoid(logits.float()).topk(self.top_k)
            return logits, weights, ids

    router = ScaledRouter(model.model.layers[0].mlp.gate)
    rows = torch.randn(3, router.weight.shape[1]).half()
    expected = router(rows)
    assert fuse_routers(router, torch.float16) == 0
    assert all(map(torch.equal, router(rows), expected))
