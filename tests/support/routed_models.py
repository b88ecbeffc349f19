"""Random checkpoints of the families whose routing has a margin far above the rounding of bfloat16.

A plain random router puts two experts so close, in a few of a hundred positions, that any rounding swaps them, and what
follows differs wholly. Here the rows of each layer's router are orthonormal directions of the residual stream, in an
order of its own a layer. Each token's embedding carries every direction with a level of its own, levels a step apart,
which experts get which drawn anew for each token. Whatever writes into the stream later (attention, experts, shared
experts, dense layers, and their biases) is projected so that a twentieth is left of it along these directions: it moves
routing weights a little with the context, and never the order of two experts. All else stays random.

With groups of experts (deepseek_v3) the levels are dealt group by group, so that groups are as far apart.
"""

from pathlib import Path
from typing import Any

import torch
from models import FAMILIES
from transformers import AutoModelForCausalLM, PreTrainedModel

# A twentieth of what is written along the routers' directions stays.
_LEFT = 0.05
_NOISE = 0.5
_STEP = 0.55
# Of biases that choose experts (deepseek_v3's correction, gpt_oss's router): small against a step, but there.
_CHOOSING_STD = 0.03


def save_routed_model(family: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> None:
    """Write a checkpoint of a family whose routing has a margin.

    Args:
        family: one of `FAMILIES`.
        folder: where to.
        dtype: of the weights.
        sizes: settings of the family's configuration.
    """
    torch.manual_seed(len(family))
    model = AutoModelForCausalLM.from_config(FAMILIES[family](**sizes), dtype=torch.float32)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "bias" in name or "sinks" in name:
            chooses = "correction" in name or name.endswith("router.bias")
            torch.nn.init.normal_(tensor, std=_CHOOSING_STD if chooses else 0.2)
    give_margin(model)
    model.to(dtype).save_pretrained(folder, max_shard_size="4MB")


@torch.no_grad()
def give_margin(model: PreTrainedModel) -> None:
    """Change a random model in place, as the module says."""
    routers = [tensor for name, tensor in model.named_parameters() if name.endswith(("gate.weight", "router.weight"))]
    num_experts, hidden_size = routers[0].shape
    num_groups = getattr(model.config, "n_group", None) or 1
    directions_EH = torch.linalg.qr(torch.randn(hidden_size, num_experts)).Q.T
    embedding = model.get_input_embeddings().weight
    noise = torch.randn(embedding.shape) * _NOISE
    noise -= noise @ directions_EH.T @ directions_EH
    embedding.copy_(noise + _levels(len(embedding), num_experts, num_groups) @ directions_EH)
    for router in routers:
        router.copy_(directions_EH[_order(num_experts, num_groups)])
    keep_HH = torch.eye(hidden_size) - (1 - _LEFT) * directions_EH.T @ directions_EH
    for name, tensor in model.named_parameters():
        if name.endswith(("o_proj.bias", "down_proj_bias")):
            tensor.copy_(tensor @ keep_HH)
        elif "o_proj" in name or "down_proj" in name:
            # Writes into the stream along its first dimension of hidden size; gpt_oss stores experts the other way.
            is_transposed = name.endswith("experts.down_proj") and model.config.model_type == "gpt_oss"
            tensor.copy_(tensor @ keep_HH if is_transposed else keep_HH @ tensor)


def _order(num_experts: int, num_groups: int) -> torch.Tensor:
    """Experts in a random order that keeps groups together."""
    experts = torch.arange(num_experts).view(num_groups, -1)
    inside = torch.stack([torch.randperm(experts.shape[1]) for _ in range(num_groups)])
    return experts.gather(1, inside)[torch.randperm(num_groups)].flatten()


def _levels(num_tokens: int, num_experts: int, num_groups: int) -> torch.Tensor:
    """`[V, E]` levels, a step apart, dealt to experts at random; with groups, neighbouring levels to one group."""
    levels = (torch.arange(num_experts - 1, -1, -1) - (num_experts - 1) / 2) * _STEP
    dealt = torch.empty(num_tokens, num_experts)
    for token in range(num_tokens):
        dealt[token, _order(num_experts, num_groups)] = levels
    return dealt
