"""One run of a rank's model without other ranks, cache or experts: to see which layers it calls, and what they compute.

Attention and experts are no part of what is compiled. Here something small stands in their place, a function of all
that they are given, so that whatever a compiled region computes otherwise changes what comes out.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...dispatch.moe import MoeExchange
from ..attention.backend import StepAttention

_SEED = 0


class TrialBatch:
    """Stands in for attention: each token attends to itself alone."""

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """`[1, Hq, T, D]`, `[1, Hkv, T, D]`, `[1, Hkv, T, Dv]` -> `[1, T, Hq, Dv]`."""
        groups = query.shape[1] // key.shape[1]
        keys, values = (one.repeat_interleave(groups, dim=1) for one in (key, value))
        scores = scaling * (query.float() * keys.float()).sum(-1, keepdim=True)
        attended = (values * torch.sigmoid(scores).to(values.dtype)).transpose(1, 2)
        # Strides as attention gives them, also of one token, whose rows would count as contiguous with any.
        return torch.empty(attended.shape, dtype=attended.dtype, device=attended.device).copy_(attended)


def trial_experts(hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Stands in for experts: `[T, H]` rows times the sum of their weights, whichever experts they were."""
    return hidden_states * top_k_weights.sum(dim=-1, keepdim=True).to(hidden_states.dtype)


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module.

    Attributes:
        name: of the module in its model.
        module: that was called.
        args: with which.
        kwargs: likewise.
        outputs: that it gave, a row a token.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[torch.Tensor, ...]

    @property
    def rows(self) -> torch.Tensor:
        """`[1, T, H]` that it got."""
        rows: torch.Tensor = self.args[0] if self.args else self.kwargs["hidden_states"]
        return rows


class Trial:
    """A model and rows to run it on.

    Args:
        model: this rank's, its weights in place.
        exchange: that its experts are bound to.
        vocab_size: token ids are below it.
        device: of the model.
    """

    def __init__(self, model: nn.Module, exchange: MoeExchange, vocab_size: int, device: torch.device):
        self._model = model
        self._exchange = exchange
        self._vocab_size = vocab_size
        self._device = device

    @torch.inference_mode()
    def run(self, num_tokens: int) -> torch.Tensor:
        """`[T, V]` logits of as many tokens, which are the same at every call and on every rank."""
        generator = torch.Generator().manual_seed(_SEED)
        ids = torch.randint(self._vocab_size, (1, num_tokens), generator=generator).to(self._device)
        positions = torch.arange(num_tokens, device=self._device).unsqueeze(0)
        with self._exchange.tried_with(trial_experts):
            output = self._model(
                input_ids=ids, position_ids=positions, use_cache=False, paged=StepAttention(TrialBatch())
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def calls(self, modules: list[nn.Module], num_tokens: int) -> list[ModuleCall]:
        """What each module is called with in a run of as many tokens, and what it gives."""
        names = {module: name for name, module in self._model.named_modules()}
        calls: list[ModuleCall] = []

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls.append(ModuleCall(names[module], module, args, kwargs, _tensors_of(output)))

        hooks = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
        try:
            self.run(num_tokens)
        finally:
            for hook in hooks:
                hook.remove()
        return calls

    @torch.inference_mode()
    def again(self, call: ModuleCall) -> tuple[torch.Tensor, ...]:
        """What the module gives now."""
        with self._exchange.tried_with(trial_experts):
            return _tensors_of(call.module(*call.args, **call.kwargs))


def _tensors_of(output: Any) -> tuple[torch.Tensor, ...]:
    outputs = output if isinstance(output, tuple) else (output,)
    return tuple(one for one in outputs if isinstance(one, torch.Tensor))
