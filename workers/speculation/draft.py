"""Draft steps over the model's own decoder layers: what speculation runs between two steps of the target.

A draft step takes a token and the hidden state that led to it, normalises both, projects them to one hidden state, and
runs one MoE decoder layer over it. The layers are the target's last ones, experts included, so a draft costs no experts
of its own and its steps exchange tokens between ranks like any other. The projection averages its two inputs until
a trained one is loaded; nothing is accepted from these drafts yet.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from ...dispatch.budgets.geometry import StepGeometry
from ...dispatch.budgets.step_kinds import num_draft_layers
from ...dispatch.moe import MoeExchange
from ...graphs.plan import CaptureEntry
from ..attention.backend import StepAttention
from ..attention.kv_cache import KvCache
from ..attention.paged import AttendingRows, PagedBatch, attending_requests
from ..model.spec import ModelSpec
from ..model.target import TargetModel
from ..rank_config import RankConfig
from ..sizes.kv_blocks import draft_cache, draft_layers


class DraftModel:
    """Draft steps of one rank.

    Args:
        target: whose embedding, decoder layers, norm and head are used.
        spec: of the target.
        exchange: that its experts are bound to.
        num_steps: draft steps in one graph of `eagle_draft` or `frozen_kv_mtp`.
        num_layers: draft layers of `multi_layer_eagle_draft_extend`.
        cache: keys and values of the draft layers; `None` where drafting only reads the target's.
    """

    def __init__(
        self,
        target: TargetModel,
        spec: ModelSpec,
        exchange: MoeExchange,
        num_steps: int,
        num_layers: int,
        cache: KvCache | None,
    ):
        model: PreTrainedModel = target.model
        base: Any = model.base_model
        self.cache = cache
        self._target_cache = target.cache
        self._exchange = exchange
        self._num_steps = num_steps
        self._embed = model.get_input_embeddings()
        self._head = model.get_output_embeddings()
        self._rotary, self._norm = base.rotary_emb, base.norm
        self._layer_numbers = draft_layers(spec, num_layers)
        self._layers = [base.layers[number] for number in self._layer_numbers]
        dtype = getattr(torch, spec.dtype)
        self._projection = (
            torch.eye(spec.hidden_size, dtype=dtype, device=self._embed.weight.device).repeat(1, 2).div_(2)
        )

    @property
    def num_cache_bytes(self) -> int:
        return 0 if self.cache is None else self.cache.num_bytes

    def graph_step(
        self, views: Mapping[str, torch.Tensor], geometry: StepGeometry, entry: CaptureEntry
    ) -> torch.Tensor:
        """One step of a draft kind, on static buffers or on tensors of the same names; collective over all ranks.

        Args:
            views: the inputs; see `draft_buffer_specs`.
            geometry: of the step, equal on every rank.
            entry: which kind, and which draft layer.

        Returns:
            `[T, S, H]` hidden states of each draft step (`S` steps), or `[T, H]` of a kind that extends.
        """
        self._exchange.begin_step(geometry, views["num_valid_tokens"])
        if entry.kind in ("eagle_draft", "frozen_kv_mtp"):
            return self._draft(views, frozen=entry.kind == "frozen_kv_mtp")
        return self._extend(views, entry.layer)

    def tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The most likely token after each hidden state, `[..., H] -> [...]`."""
        return cast(torch.Tensor, self._head(self._norm(hidden_states))).argmax(dim=-1)

    def _draft(self, views: Mapping[str, torch.Tensor], frozen: bool) -> torch.Tensor:
        """Several steps in a row: each row is a branch that goes on with its own most likely token.

        A branch attends to the cached tokens of its request and to its own drafts; a frozen one to the target's cached
        tokens alone, and adds nothing to any cache.
        """
        ids, hidden, drafted = views["input_ids"], views["hidden_states"], []
        starts, lens, contexts = (views[name].tolist() for name in ("query_starts", "query_lens", "context_lens"))
        for step in range(self._num_steps):
            attending = [
                AttendingRows(
                    slice(start, start + 1), context if frozen else context + step + 1, views["block_tables"][branch]
                )
                for branch, (start, query_len, context) in enumerate(zip(starts, lens, contexts, strict=True))
                if query_len > 0 and (context > 0 or not frozen)
            ]
            if frozen:
                paged = PagedBatch(self._target_cache, None, attending, self._layer_numbers[0])
            else:
                assert self.cache is not None
                paged = PagedBatch(self.cache, views["slots"][:, step], attending, cache_layer=0)
            hidden = self._layer(0, ids, hidden, views["positions"] + step, paged)
            drafted.append(hidden)
            ids = self.tokens(hidden)
        return torch.stack(drafted, dim=1)

    def _extend(self, views: Mapping[str, torch.Tensor], layer: int) -> torch.Tensor:
        """Add the tokens that the target accepted to the draft's cache."""
        assert self.cache is not None
        attending = attending_requests(
            views["query_starts"], views["query_lens"], views["context_lens"], views["block_tables"]
        )
        paged = PagedBatch(self.cache, views["slots"][:, 0], attending, cache_layer=layer)
        return self._layer(layer, views["input_ids"], views["hidden_states"], views["positions"], paged)

    def _layer(
        self, layer: int, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, paged: PagedBatch
    ) -> torch.Tensor:
        """Normalise, concatenate, project, one decoder layer: `[T]`, `[T, H]` -> `[T, H]`."""
        both = torch.cat((self._norm(self._embed(ids)), self._norm(hidden)), dim=-1)
        states = torch.nn.functional.linear(both, self._projection).unsqueeze(0)
        position_ids = positions.unsqueeze(0)
        output = self._layers[layer](
            states,
            attention_mask=None,
            position_ids=position_ids,
            position_embeddings=self._rotary(states, position_ids),
            use_cache=False,
            paged=StepAttention(paged),
        )
        return cast(torch.Tensor, output)[0]


def make_draft(
    config: RankConfig, target: TargetModel, exchange: MoeExchange, device: torch.device
) -> DraftModel | None:
    """The draft of a rank, with the cache that its kinds write; `None` without speculation."""
    limits, spec = config.limits, config.spec
    if limits.speculative_algorithm is None:
        return None
    shapes = draft_cache(config)
    cache = None
    if shapes:
        with torch.inference_mode(False):
            dtype = getattr(torch, spec.dtype)
            cache = KvCache(shapes, config.num_blocks, config.block_size, dtype, device)
    return DraftModel(target, spec, exchange, limits.speculative_num_steps or 1, num_draft_layers(limits), cache)
