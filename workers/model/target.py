"""One forward of the target model on one rank: from input tensors to the logits of the rows that are due."""

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from ...dispatch.budgets.geometry import StepGeometry
from ...dispatch.moe import MoeExchange
from ...graphs.plan import CaptureEntry
from ..attention.backend import AttentionBackend, PagedCache, StepAttention
from ..scheduling.inputs import StepInputs


class TargetModel:
    """The model of a rank with its KV cache.

    Args:
        model: loaded with our attention and dispatch.
        exchange: the one its experts are bound to.
        cache: keys and values of this rank's requests.
        attention: over that cache.
        device: of all three.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        exchange: MoeExchange,
        cache: PagedCache,
        attention: AttentionBackend,
        device: torch.device,
    ):
        self.model = model
        self.cache = cache
        self.attention = attention
        self.device = device
        self._exchange = exchange

    def forward(
        self,
        inputs: StepInputs,
        geometry: StepGeometry,
        entry: CaptureEntry | None = None,
        on_host: StepInputs | None = None,
    ) -> torch.Tensor:
        """Run the step. Every rank calls it in every step, an idle one with a dummy token or on padding alone.

        Args:
            inputs: of this rank's batch; as many tokens as the geometry says.
            geometry: of the step, equal on every rank.
            entry: the graph that the step belongs to, whose static buffers the inputs are; `None` for an eager step.
            on_host: the same inputs on the host, where attention plans an eager step; unset: `inputs` are there.

        Returns:
            `[N, V]` logits of the due rows, in order.
        """
        host_inputs = inputs if on_host is None else on_host
        inputs = inputs.to(self.device)
        paged = self.attention.batch(host_inputs, entry, inputs.slots)
        self._exchange.begin_step(geometry, inputs.num_valid_tokens)
        # Compiled code is made for tensors of inference mode; views of a graph's buffers are none.
        positions_T = inputs.positions.clone()
        # `paged` comes back in `_paged_attention` (attention/paged.py), the experts' turn is in dispatch/moe.py.
        output = self.model(
            input_ids=inputs.input_ids.unsqueeze(0),
            position_ids=positions_T.unsqueeze(0),
            use_cache=False,
            logits_to_keep=inputs.due_rows,
            paged=StepAttention(paged),
        )
        return output.logits[0]

    def graph_step(
        self, views: Mapping[str, torch.Tensor], geometry: StepGeometry, entry: CaptureEntry
    ) -> torch.Tensor:
        """The same step on static buffers, as graph runners call it."""
        return self.forward(StepInputs(**views), geometry, entry)
