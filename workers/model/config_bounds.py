"""Numbers of a `config.json` that no model can have, refused by arithmetic: building such a model would take hours, or
the memory of the host, though it is built without weights."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedConfig

from ...dispatch.errors import CheckpointError
from .spec import AttentionShape, MoeShape

EXPERT_COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

# More than twice what the largest models have, and built in seconds.
MAX_LAYERS, MAX_EXPERTS = 256, 2**20
# Which keys a position sees is looked at over all positions.
MAX_POSITIONS = 2**26


def refuse_sizes(config: PreTrainedConfig) -> None:
    """Refuse sizes out of bounds.

    Raises:
        CheckpointError: names key, value and bound.
    """
    text_config = config.get_text_config()
    num_layers = _between(text_config, "num_hidden_layers", MAX_LAYERS)
    _between(text_config, "max_position_embeddings", MAX_POSITIONS)
    _between(text_config, "vocab_size", 2**31 - 1)
    for name in EXPERT_COUNT_NAMES:
        if isinstance(getattr(text_config, name, None), int):
            num_experts = _between(text_config, name, MAX_EXPERTS)
            if num_layers * num_experts > MAX_EXPERTS:
                raise CheckpointError(
                    f"its config.json has num_hidden_layers={num_layers} with {name}={num_experts}: "
                    f"{num_layers * num_experts:,} experts, more than {MAX_EXPERTS:,}; correct one of the two"
                )
            if isinstance(getattr(text_config, "num_experts_per_tok", None), int):
                _between(text_config, "num_experts_per_tok", num_experts)


def refuse_numbers(config: PreTrainedConfig) -> None:
    """Refuse numbers with which every logit would be none: such a model loads, and its first step fails.

    Raises:
        CheckpointError: names key and value.
    """
    settings = config.get_text_config().to_dict()
    rope = settings.get("rope_parameters") or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    for mapping in (settings, *(nested or [rope])):
        for name, value in mapping.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            lowest = 0.0 if name.endswith(("_eps", "_epsilon")) else -math.inf
            # Angles are powers of the base, divided by the factor.
            is_scale = name == "rope_theta" or (name == "factor" and mapping is not settings)
            if (isinstance(value, float) and not math.isfinite(value)) or value < lowest or (is_scale and value <= 0):
                wanted = "a number above 0" if is_scale else "0 or more" if lowest == 0.0 else "a finite number"
                key = name if mapping is settings else f"rope_parameters.{name}"
                raise CheckpointError(f"its config.json has {key}={value!r:.60}: set {key} to {wanted}")


def refuse_heads(layers: Iterable[AttentionShape]) -> None:
    """Refuse layers whose queries do not divide into groups, one for each head of keys and values.

    Raises:
        CheckpointError: names both numbers.
    """
    for layer in layers:
        if layer.num_heads % layer.num_kv_heads:
            raise CheckpointError(
                f"its config.json has num_attention_heads={layer.num_heads} with num_key_value_heads="
                f"{layer.num_kv_heads}: set num_key_value_heads to a divisor of num_attention_heads"
            )


def refuse_routing(layers: Sequence[MoeShape]) -> None:
    """Refuse layers that send a token to no expert, or to more than there are.

    Raises:
        CheckpointError: names the layer, both numbers and the key.
    """
    for layer in layers:
        if not 1 <= layer.top_k <= layer.num_experts:
            raise CheckpointError(
                f"{layer.name} sends a token to {layer.top_k} of {layer.num_experts} experts: set num_experts_per_tok "
                f"in its config.json to between 1 and {layer.num_experts}"
            )


def _between(config: Any, name: str, highest: int) -> int:
    value = getattr(config, name, None)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= highest:
        raise CheckpointError(
            f"its config.json has {name}={value!r:.60}: set {name} to an integer between 1 and {highest:,}"
        )
    return value
