"""Linear layers that read the same rows as one product: their weights lie behind each other and are views of one.

Which layers those are is seen in a run of the model, not told by their names. Nothing is added or copied in a step, and
the model's parameters keep their names, shapes and values.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional


class _Product:
    """Rows of the last call of the first layer, until the last layer has taken its part.

    Args:
        weight_NH: weights of all layers, behind each other.
        bias_N: their biases; `None` where they have none.
    """

    def __init__(self, weight_NH: torch.Tensor, bias_N: torch.Tensor | None):
        self.weight_NH = weight_NH
        self.bias_N = bias_N
        self.rows: torch.Tensor | None = None
        self.result: torch.Tensor | None = None


class SharedLinear(nn.Linear):
    """A linear layer that computes its part as one of several; `share_products` makes them.

    Attributes:
        product: what it shares.
        is_first: it computes for all.
        is_last: it takes the last part.
        start: where its part begins.
    """

    product: _Product
    is_first: bool
    is_last: bool
    start: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`[..., H]` -> `[..., N]`, a view. Rows that the first layer did not have are multiplied by themselves."""
        product = self.product
        if self.is_first:
            product.rows, product.result = input, functional.linear(input, product.weight_NH, product.bias_N)
        result = product.result
        if result is None or product.rows is not input:
            return functional.linear(input, self.weight, self.bias)
        if self.is_last:
            product.rows = product.result = None
        return result[..., self.start : self.start + self.out_features]


@torch.no_grad()
def share_products(model: nn.Module, run: Callable[[], object]) -> int:
    """Have linear layers of one module that get the same rows share a product.

    Args:
        model: its weights in place; the same on every rank, and so is what is found.
        run: runs the model once, uncompiled.

    Returns:
        How many products there are.
    """
    groups = _read_together(model, run)
    for group in groups:
        _share(group)
    return len(groups)


def _read_together(model: nn.Module, run: Callable[[], object]) -> list[list[nn.Linear]]:
    """Plain linear layers of one module, in the order of their calls, whose input was one and the same tensor."""
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    seen: dict[tuple[int, int], list[nn.Linear]] = {}
    calls: dict[int, int] = {}
    rows: list[torch.Tensor] = []

    def note(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(module, nn.Linear)
        rows.append(args[0])  # so that no other tensor gets its place in memory
        calls[id(module)] = calls.get(id(module), 0) + 1
        seen.setdefault((id(parents[id(module)]), id(args[0])), []).append(module)

    linears = [module for module in model.modules() if type(module) is nn.Linear and module.weight.is_floating_point()]
    hooks = [module.register_forward_pre_hook(note) for module in linears if owners[id(module.weight)] == 1]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    groups = []
    for group in seen.values():
        alike = all(
            one.weight.dtype == two.weight.dtype and (one.bias is None) == (two.bias is None)
            for one, two in pairwise(group)
        )
        if len(group) > 1 and alike and all(calls[id(module)] == 1 for module in group):
            groups.append(group)
    return groups


def _share(group: list[nn.Linear]) -> None:
    weights, biases = [one.weight for one in group], [one.bias for one in group if one.bias is not None]
    product = _Product(
        torch.cat([one.data for one in weights]), torch.cat([b.data for b in biases]) if biases else None
    )
    start = 0
    for linear in group:
        end = start + linear.out_features
        linear.weight.data = product.weight_NH[start:end]
        if product.bias_N is not None:
            linear.bias.data = product.bias_N[start:end]
        linear.__class__ = SharedLinear
        assert isinstance(linear, SharedLinear)
        linear.product, linear.start = product, start
        linear.is_first, linear.is_last = linear is group[0], linear is group[-1]
        start = end
