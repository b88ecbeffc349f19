"""One forward of one rank: from a scheduled batch to the logits of the tokens that are due."""

import torch
from transformers import PreTrainedModel

from ..dispatch.geometry import StepGeometry
from ..dispatch.moe import MoeExchange
from .attention import PagedBatch, SequenceSlice
from .kv_cache import PADDING_BLOCK, KvCache
from .scheduler import ScheduledBatch


class ModelRunner:
    """The model of a rank with its KV cache.

    Args:
        model: loaded with our attention and dispatch.
        exchange: the one its experts are bound to.
        cache: keys and values of this rank's requests.
        device: where both live.
    """

    def __init__(self, model: PreTrainedModel, exchange: MoeExchange, cache: KvCache, device: torch.device):
        self._model = model
        self._exchange = exchange
        self._cache = cache
        self._device = device

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch, geometry: StepGeometry) -> torch.Tensor:
        """Run the step. Every rank calls it in every step, an idle one with an empty batch and a dummy token.

        Args:
            batch: what this DP rank runs.
            geometry: of the step, equal on every rank.

        Returns:
            `[N, V]` logits of the `N` slices that reach the end of their sequence, in order.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        due: list[int] = []
        sequences: list[SequenceSlice] = []
        block_size = self._cache.block_size
        for piece in batch.slices:
            sequence = piece.sequence
            start, end = sequence.num_computed, sequence.num_computed + piece.num_tokens
            table = torch.tensor(sequence.blocks, dtype=torch.int64, device=self._device)
            sequences.append(SequenceSlice(len(token_ids), piece.num_tokens, start, table))
            token_ids += sequence.token_ids[start:end]
            positions += range(start, end)
            slots += [sequence.blocks[p // block_size] * block_size + p % block_size for p in range(start, end)]
            if piece.reaches_end:
                due.append(len(token_ids) - 1)
        if not token_ids:
            token_ids, positions, slots = [0], [0], [PADDING_BLOCK * block_size]

        self._exchange.begin_step(geometry)
        output = self._model(
            input_ids=self._tensor(token_ids).unsqueeze(0),
            position_ids=self._tensor(positions).unsqueeze(0),
            use_cache=False,
            logits_to_keep=self._tensor(due or [0]),
            paged=PagedBatch(self._cache, self._tensor(slots), sequences),
        )
        return output.logits[0, : len(due)]

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
