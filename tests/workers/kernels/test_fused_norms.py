"""Which norms PyTorch's own stands in for: those that compute the same, of every family, and no other."""

import pytest
import torch
from expert_pool.workers.kernels.fused_norms import fuse_norms
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

FAMILIES = ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss"]


class OnePlusWeightRMSNorm(nn.Module):
    """As Gemma has it: one is added to the weight."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 0.5, dtype=torch.bfloat16))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float()
        return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight.float())).bfloat16()


class _NearlyRMSNorm(nn.Module):
    """Off by a share that two roundings to bfloat16 could explain, and none to a finer dtype."""

    def __init__(self, dtype: torch.dtype, off_by: float):
        super().__init__()
        self.weight = nn.Parameter(torch.full((256,), 0.5, dtype=dtype))
        self.eps, self._off_by = 1e-6, off_by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.double()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.double()
        return (normed * (1 + self._off_by)).to(x.dtype)


@pytest.mark.parametrize(
    ("dtype", "off_by", "is_replaced"),
    [
        (torch.bfloat16, 2.0**-9, True),
        (torch.float16, 0.0, True),
        (torch.float16, 2.0**-7, False),
        (torch.float32, 0.0, True),
        (torch.float32, 1e-5, False),
    ],
)
def test_how_near_is_alike_depends_on_the_dtype(dtype, off_by, is_replaced):
    assert fuse_norms(nn.Sequential(_NearlyRMSNorm(dtype, off_by)), dtype) == is_replaced


@pytest.mark.parametrize("family", FAMILIES)
def test_every_norm_of_a_family_is_replaced_and_is_no_further_from_exact(family, random_models):
    """Norm by norm: a whole model in bfloat16 routes a token elsewhere for any rounding."""
    model = AutoModelForCausalLM.from_pretrained(random_models[family], dtype=torch.bfloat16).eval()
    norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    generator = torch.Generator().manual_seed(3)
    rows, before, exact = [], [], []
    for norm in norms:
        norm.weight.data = 1 + 0.3 * torch.randn(norm.weight.shape, generator=generator).bfloat16()
        rows.append(2 * torch.randn(50, norm.weight.shape[0], generator=generator).bfloat16())
        before.append(norm(rows[-1]).double())
        wide = rows[-1].double()
        exact.append(wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight.double())
    assert fuse_norms(model, torch.bfloat16) == len(norms) > 0
    for index, norm in enumerate(norms):
        found = norm(rows[index]).double()
        assert not torch.equal(found, rows[index].double())
        assert (found - exact[index]).norm() <= 1.01 * (before[index] - exact[index]).norm()


def test_a_norm_that_computes_otherwise_is_left_alone():
    model = nn.Sequential(OnePlusWeightRMSNorm(32), nn.LayerNorm(32))
    rows = torch.randn(4, 32).bfloat16()
    expected = model[0](rows)
    assert fuse_norms(model, torch.bfloat16) == 0
    assert torch.equal(model[0](rows), expected)


def test_a_norm_whose_weight_is_kept_in_float32_is_left_alone():
    """Its rows come in the model's dtype, for which PyTorch's own has no mixed kernel."""
    norm = Qwen3MoeRMSNorm(32)
    assert norm.weight.dtype is torch.float32
    rows = torch.randn(4, 32).bfloat16()
    expected = norm(rows)
    assert fuse_norms(norm, torch.bfloat16) == 0
    assert torch.equal(norm(rows), expected)
    assert fuse_norms(norm, torch.float32) == 1
