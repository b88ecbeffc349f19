"""Blocks of the KV cache and what each layer stores in one, from a rank's configuration; free of PyTorch."""

from ...dispatch.budgets.step_kinds import num_draft_layers, recorded_kinds
from ..attention.registry import chosen
from ..model.spec import AttentionShape, ModelSpec
from ..rank_config import RankConfig

PADDING_BLOCK = 0
PADDING_SLOT = 0  # the first place of the padding block, whatever the size of a block


def least_blocks(config: RankConfig) -> int:
    """Blocks without which no request of full context length could run, the padding block included."""
    return blocks_of_context(config) + 1


def blocks_of_context(config: RankConfig) -> int:
    """Blocks of one request of full context length."""
    return -(-config.spec.context_length // config.block_size)


def block_bytes(config: RankConfig) -> int:
    """Bytes of one block over all layers, the draft's included."""
    return (bytes_per_token(config) + draft_bytes_per_token(config)) * config.block_size


def bytes_per_token(config: RankConfig) -> int:
    """Bytes that the model's own cache stores for a token."""
    return chosen(config).token_bytes(config)


def draft_bytes_per_token(config: RankConfig) -> int:
    """Bytes that the draft's own cache stores for a token."""
    return sum(shape.width for shape in draft_cache(config)) * config.spec.dtype_bytes


def draft_layers(spec: ModelSpec, num_layers: int) -> tuple[int, ...]:
    """Decoder layers that draft, last first; as many as asked for, as far as there are MoE layers."""
    layers = sorted({int(part) for moe in spec.moe for part in moe.name.split(".") if part.isdigit()}, reverse=True)
    return tuple(layers[index % len(layers)] for index in range(num_layers))


def draft_cache_shapes(spec: ModelSpec, num_layers: int) -> list[AttentionShape]:
    """What each draft layer caches for a token."""
    return [spec.attention[layer] for layer in draft_layers(spec, num_layers)]


def draft_cache(config: RankConfig) -> list[AttentionShape]:
    """What the draft's own cache stores for a token, a layer each; nothing where it only reads the target's."""
    kinds = {kind.name for kind in recorded_kinds(config.limits)}
    if "multi_layer_eagle_draft_extend" in kinds:
        return draft_cache_shapes(config.spec, num_draft_layers(config.limits))
    return draft_cache_shapes(config.spec, 1) if "eagle_draft" in kinds else []
