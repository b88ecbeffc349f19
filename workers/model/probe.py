"""What a model does with a batch, found by runs on the meta device with recorders in the place of its parts.

It runs twice. The first run has Transformers build the family's own attention masks, and finds from each which keys a
position sees: that, not an argument of the attention, is what a family attends to. The second runs as ranks will,
without masks, and notes the shapes that attention and experts are handed.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ...dispatch.errors import CheckpointError
from ...dispatch.experts.expert_weights import gating_of, intermediate_size_of, unsupported_traits
from ..attention.paged import ATTENTION_NAME, layer_index, refuse_unknown_arguments
from ..attention.registry import noted_of
from .spec import AttentionShape, MoeShape

_MASKS_NAME = "expert_pool_masks"
_CAUSAL = DynamicLayer, DynamicSlidingWindowLayer
Sees = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A mask of Transformers: whether a query sees a key, by indices of batch, head, query and key."""


def refuse_other_state(config: PreTrainedConfig) -> None:
    """Refuse a family whose layers keep more than keys and values for a request, by the cache that Transformers makes.

    Args:
        config: of a model that was built: families register their kinds of cache when their code is imported.

    Raises:
        CheckpointError: names the layers and what they keep.
    """
    kinds = [type(layer) for layer in DynamicCache(config=config).layers]
    others = [index for index, kind in enumerate(kinds) if kind not in _CAUSAL]
    if others:
        names = ", ".join(sorted({kinds[index].__name__ for index in others}))
        raise CheckpointError(
            f"layers {others} keep a state of requests that the paged KV cache has no place for ({names} in "
            "Transformers): such layers would mix the requests of a packed batch"
        )


class ModelProbe:
    """Stands in for attention, masks and experts, and notes what they are handed.

    Args:
        model: on the meta device, with our attention. It is of no use afterwards.
        expert_modules: names of its experts modules.
        context_length: positions that a request may have, over which windows count.

    Attributes:
        attention: by layer.
        moe: each experts module, in the order in which the model runs them.
    """

    def __init__(self, model: PreTrainedModel, expert_modules: list[str], context_length: int):
        self._context_length = context_length
        self.attention: dict[int, AttentionShape] = {}
        self.moe: list[MoeShape] = []
        self._model = model.eval()
        self._windows: dict[int, int | None] = {}
        modules = dict(model.named_modules())
        for name in expert_modules:
            modules[name].forward = self._experts_forward(name, modules[name])

    def run(self) -> None:
        """Run the model; what it raises itself is passed on.

        Raises:
            CheckpointError: attention is neither causal nor a sliding window, or takes what ours does not know.
        """
        AttentionInterface.register(_MASKS_NAME, _note_window)
        masks = functools.partial(_mask_with_window, num_positions=self._context_length)
        AttentionMaskInterface.register(_MASKS_NAME, masks)
        self._model.set_attn_implementation(_MASKS_NAME)
        # A mask for the tokens, though all are there: without one Transformers would look for packed requests. Some
        # families read it, so it is not on the meta device.
        self._forward(attention_mask=torch.ones(1, 2, dtype=torch.long, device="cpu"))
        self._model.set_attn_implementation(ATTENTION_NAME)
        self.moe.clear()
        self._forward()

    def _forward(self, **arguments: Any) -> None:
        ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
        last = torch.ones(1, dtype=torch.long, device="meta")
        with torch.device("meta"), torch.inference_mode():
            self._model(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=last, paged=self, **arguments)

    def note_window(self, module: torch.nn.Module, mask: torch.Tensor | None, argument: int | None) -> None:
        """Which keys a layer sees.

        Args:
            module: the layer's attention.
            mask: that it is handed.
            argument: the window that it is handed beside it; families without one leave it to the mask.

        Raises:
            CheckpointError: the mask is not one that Transformers built, or says another window than the argument.
        """
        layer = layer_index(module)
        if not hasattr(mask, "window"):
            raise CheckpointError(f"layer {layer} attends by a mask of its own, which packed batches cannot have")
        window, num_positions = mask.window, mask.num_positions  # type: ignore[union-attr]
        if argument is not None and (argument if argument < num_positions else None) != window:
            raise CheckpointError(
                f"the mask of layer {layer} has a window of {window} keys and its attention one of {argument}: "
                "Transformers itself would attend by one or the other, as it computes"
            )
        self._windows[layer] = window

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        layer = layer_index(module)
        self.attention[layer] = AttentionShape(
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            num_heads=query.shape[1],
            scaling=scaling,
            sliding_window=self._windows[layer],
            has_sinks=sinks is not None,
            noted=noted_of(module),
        )
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    def _experts_forward(self, name: str, experts: torch.nn.Module) -> Any:
        num_experts: int = experts.num_experts  # type: ignore[assignment]
        traits, gating = unsupported_traits(experts), gating_of(experts)

        def forward(
            hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
        ) -> torch.Tensor:
            dtype = str(top_k_weights.dtype).removeprefix("torch.")
            hidden_size = hidden_states.shape[1]
            intermediate_size = intermediate_size_of(experts, hidden_size)
            top_k = top_k_index.shape[1]
            sizes = num_experts, hidden_size, top_k, dtype, intermediate_size
            self.moe.append(MoeShape(name, *sizes, traits, gating))
            return torch.empty_like(hidden_states)

        return forward


def _note_window(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: ModelProbe,
    scaling: float,
    s_aux: torch.Tensor | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of the first run."""
    refuse_unknown_arguments(arguments)
    paged.note_window(module, attention_mask, arguments.get("sliding_window"))
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3]), None


def _mask_with_window(
    *, num_positions: int, q_length: int, kv_length: int, mask_function: Sees, **_: Any
) -> torch.Tensor:
    """The masks of the first run: shaped as any, and with the window written on it."""
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    mask.num_positions = num_positions  # type: ignore[attr-defined]
    mask.window = window_of(mask_function, num_positions)  # type: ignore[attr-defined]
    return mask


def window_of(sees: Sees, num_positions: int) -> int | None:
    """Keys that a position sees, itself included; `None`: all before it.

    Raises:
        CheckpointError: some position sees others.
    """
    with torch.device("cpu"):
        keys, first = torch.arange(num_positions), torch.zeros((), dtype=torch.long)

        def seen_by(query: int) -> torch.Tensor:
            return sees(first, first, torch.tensor(query), keys).expand(num_positions)

        last = num_positions - 1
        window = int(seen_by(last).sum())
        for query in {0, last // 2, last // 2 + 1, last - 1, last}:
            if not torch.equal(seen_by(query), (keys <= query) & (keys > query - window)):
                raise CheckpointError(
                    "its attention is neither causal nor a sliding window: which keys a token sees depends on more "
                    "than how far before it they are"
                )
    return None if window == num_positions else window
