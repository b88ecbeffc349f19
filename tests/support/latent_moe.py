"""A model family of Transformers' parts whose MoE layers differ in all that an exchange depends on.

Odd layers are Qwen3-MoE's. The experts of even ones, the first included, work on a narrower row (a latent), are of
another number and size, and a token goes to another number of them: what is sized for the first layer fits no other.
Importing this module makes the family known to Transformers.
"""

import copy

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock


class LatentMoeConfig(Qwen3MoeConfig):
    """Qwen3-MoE's fields, and those of even layers: width of the latent, experts, their size, experts a token."""

    model_type = "test_latent_moe"

    latent_size: int = 32
    latent_num_experts: int = 16
    latent_intermediate_size: int = 48
    latent_experts_per_tok: int = 3

    def of_latent(self) -> Qwen3MoeConfig:
        latent = copy.deepcopy(self)
        latent.hidden_size, latent.num_experts = self.latent_size, self.latent_num_experts
        latent.moe_intermediate_size = self.latent_intermediate_size
        latent.num_experts_per_tok = self.latent_experts_per_tok
        return latent


class LatentMoeBlock(Qwen3MoeSparseMoeBlock):
    """Down to the latent, its experts, and up again."""

    def __init__(self, config: LatentMoeConfig):
        super().__init__(config.of_latent())
        self.down = torch.nn.Linear(config.hidden_size, config.latent_size, bias=False)
        self.up = torch.nn.Linear(config.latent_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.up(super().forward(self.down(hidden_states)))


class LatentMoeForCausalLM(Qwen3MoeForCausalLM):
    config_class = LatentMoeConfig

    def __init__(self, config: LatentMoeConfig):
        super().__init__(config)
        for layer in self.model.layers[0::2]:
            layer.mlp = LatentMoeBlock(config)
        self.post_init()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Transformers looks for their decorator in this module's source; the experts are Qwen3-MoE's own."""
        return True


AutoConfig.register(LatentMoeConfig.model_type, LatentMoeConfig)
AutoModelForCausalLM.register(LatentMoeConfig, LatentMoeForCausalLM)
