"""Rotary embeddings and routers as one kernel each, in Triton's interpreter, against what Transformers has.

In float16: the interpreter does not round to bfloat16 as GPUs do.
"""

import inspect
import os
import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

pytest.importorskip("triton", reason="Triton is not installed; `make test-kernels` runs these")
# Triton looks when it is imported, and PyTorch has imported it by now.
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are interpreted with TRITON_INTERPRET=1: `make test-kernels`", allow_module_level=True)

from expert_pool.workers.kernels.fused_layers import fuse_rotary, fuse_routers
from expert_pool.workers.kernels.small_kernels import choose_experts, rotate

FAMILIES = ["qwen3_moe", "mixtral", "olmoe", "gpt_oss", "deepseek_v3"]
ROUTER_FAMILIES = {"qwen3_moe": True, "mixtral": True, "olmoe": True, "gpt_oss": False, "deepseek_v3": False}


def model_of(path: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float16).eval()


@torch.inference_mode()
def logits_of(model: nn.Module) -> torch.Tensor:
    ids = torch.randint(2, model.config.vocab_size, (1, 23), generator=torch.Generator().manual_seed(5))
    return model(ids, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_is_one_kernel_and_the_model_computes_the_same_to_the_bit(family, random_models):
    model = model_of(random_models[family])
    module = sys.modules[type(model).__module__]
    before, own = logits_of(model), module.apply_rotary_pos_emb
    assert fuse_rotary(model, torch.float16) == model.config.num_hidden_layers
    assert torch.equal(logits_of(model), before)
    called = inspect.unwrap(model.model.layers[0].self_attn.forward).__globals__["apply_rotary_pos_emb"]
    assert called is not own
    assert module.apply_rotary_pos_emb is own, "Transformers keeps its own"


@pytest.mark.parametrize(("family", "is_fused"), ROUTER_FAMILIES.items())
def test_routers_are_replaced_where_they_choose_the_same(family, is_fused, random_models):
    model = model_of(random_models[family])
    before = logits_of(model)
    num_replaced = fuse_routers(model, torch.float16)
    assert num_replaced == (model.config.num_hidden_layers if is_fused else 0)
    torch.testing.assert_close(logits_of(model), before, rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.parametrize("width", [64, 96])
@pytest.mark.parametrize("parts", [1, 2])
def test_heads_with_any_strides_rotate_alike(width, parts):
    generator = torch.Generator().manual_seed(1)
    packed = torch.randn(1, 7, 5, width + 32, generator=generator).half()
    q, k = packed[:, :, :4, :width].transpose(1, 2), packed[:, :, 4:, 32:].transpose(1, 2)
    angles = torch.randn(1, 7, width // 2, generator=generator)
    cos, sin = (torch.cat([table] * parts, dim=-1).half() for table in (angles.cos(), angles.sin()))
    first_cos, first_sin = cos[:, None, :, : width // 2], sin[:, None, :, : width // 2]
    for x, found in zip((q, k), rotate(q, k, cos, sin), strict=True):
        first, second = x.chunk(2, dim=-1)
        expected = torch.cat((first * first_cos - second * first_sin, second * first_cos + first * first_sin), dim=-1)
        assert torch.equal(found, expected)


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


def test_a_rotary_function_of_another_kind_stays(random_models, monkeypatch):
    model = model_of(random_models["qwen3_moe"])
    module = sys.modules[type(model).__module__]
    own = module.apply_rotary_pos_emb
    monkeypatch.setattr(module, "apply_rotary_pos_emb", lambda q, k, cos, sin: own(q, k, cos, -sin))
    before = logits_of(model)
    assert fuse_rotary(model, torch.float16) == 0
    assert torch.equal(logits_of(model), before)


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
