"""The dense part of every layer through torch.compile: norms, projections, rotary embeddings, routers, residual sums.

What is compiled is Transformers' own code, a decoder layer at a time. Attention and experts are called, not compiled,
so a layer falls into regions between them. Layers of one kind share what was compiled for the first, since weights are
arguments. Two sizes are compiled: one token, and any number above. CUDA graphs record what was compiled here.

All of it happens on this rank alone, before any step, and each module is held to what it computes uncompiled.
"""

import time
from collections import Counter
from dataclasses import dataclass

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from transformers import AttentionInterface, PreTrainedModel

from ...dispatch.errors import ConfigError
from ...dispatch.moe import MoeExchange
from ..attention.paged import ATTENTION_NAME
from .shared_products import share_products
from .trial import ModuleCall, Trial

_SIZES = (1, 64)
"""Tokens of the trials: one alone is compiled for itself, 64 for all other numbers."""
# Bounds what a process compiles, and is far above what a model has: one variant a kind of layer and size.
_MOST_RECOMPILATIONS = 64
# Rows of a module that may go elsewhere because rounding broke a router's tie.
_SHARE_ALIKE = 15 / 16
_SUMS = 2.0**-16  # by which sums of float32 in another order may differ


@dataclass(frozen=True)
class CompiledRegions:
    """What was compiled on this rank.

    Attributes:
        modules: how many modules of each class run compiled.
        num_graphs: regions, each size counted.
        num_products: GEMMs that several projections share.
        seconds: that compiling and trying took.
        num_cached: graphs that PyTorch found in its cache on disk.
    """

    modules: Counter[str]
    num_graphs: int
    num_products: int
    seconds: float
    num_cached: int

    @property
    def held(self) -> str:
        """What ranks compare; where a graph came from, and how long it took, may differ between them."""
        modules = ", ".join(f"{count} {name}" for name, count in self.modules.items())
        return f"{modules} compiled in {self.num_graphs} regions; {self.num_products} GEMMs shared by projections"

    def __str__(self) -> str:
        return f"{self.held} ({self.seconds:.1f} s, {self.num_cached} regions from the cache)"


def compile_regions(
    model: PreTrainedModel, exchange: MoeExchange, vocab_size: int, device: torch.device, backend: str = "inductor"
) -> CompiledRegions:
    """Compile the layers of a model, and what it runs before and after them.

    Args:
        model: this rank's, its weights in place; nobody else runs it meanwhile.
        exchange: that its experts are bound to, its layers described.
        vocab_size: token ids are below it.
        device: of the model.
        backend: torch.compile's.

    Raises:
        ConfigError: a module cannot be compiled, or computes otherwise; says which. The model then runs uncompiled.
    """
    modules = compiled_modules(model)
    trial = Trial(model, exchange, vocab_size, device)
    num_products = share_products(model, lambda: trial.run(_SIZES[-1]))
    calls = [call for size in _SIZES for call in trial.calls(modules, size)]
    began, (graphs_before, cached_before) = time.perf_counter(), _counted()
    _leave_alone(exchange)
    torch._dynamo.config.recompile_limit = _MOST_RECOMPILATIONS
    for module in modules:
        module.compile(backend=backend, dynamic=True)
    try:
        for call in calls:
            _hold(call, trial.again(call))
        for size in _SIZES:
            trial.run(size)  # as steps run it: above each module was called by itself
    except Exception as error:
        run_uncompiled(model)
        if isinstance(error, ConfigError):
            raise
        reason = " ".join(str(error).split("\n\n")[0].split())  # behind it PyTorch says how to find out more
        raise ConfigError(f"{type(model).__name__} cannot be compiled: {reason}") from error
    num_graphs, num_cached = _counted()
    return CompiledRegions(
        modules=Counter(type(module).__name__ for module in modules),
        num_graphs=num_graphs - graphs_before,
        num_products=num_products,
        seconds=time.perf_counter() - began,
        num_cached=num_cached - cached_before,
    )


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """In order; Transformers names their classes for those who must not part them."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def compiled_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Its layers and what runs before and after them, but for embeddings: looking rows up is one kernel already."""
    found = decoder_layers(model)
    beside = [child for child in model.base_model.children() if not isinstance(child, (nn.ModuleList, nn.Embedding))]
    return found + [child for child in beside if child not in found]


def run_uncompiled(model: PreTrainedModel) -> None:
    """Undo `compile` of all modules."""
    for module in compiled_modules(model):
        module._compiled_call_impl = None


def graphs_so_far() -> int:
    """Graphs that this process has compiled; it does not grow once a rank is ready."""
    return _counted()[0]


def _counted() -> tuple[int, int]:
    """Graphs compiled so far, and those of them that came from the cache on disk."""
    return counters["stats"]["unique_graphs"], counters["inductor"]["fxgraph_cache_hit"]


def _leave_alone(exchange: MoeExchange) -> None:
    """Keep the compiler out of attention and experts, which plan, wait, and look at the step that they are in."""
    attend = AttentionInterface()[ATTENTION_NAME]
    if not _is_left_alone(attend):
        AttentionInterface.register(ATTENTION_NAME, torch.compiler.disable(attend))
    for bound in exchange.bound:
        if not _is_left_alone(bound.module.forward):
            bound.module.forward = torch.compiler.disable(bound.module.forward)


def _is_left_alone(function: object) -> bool:
    return bool(getattr(function, "_torchdynamo_disable", False))


def _hold(call: ModuleCall, found: tuple[torch.Tensor, ...]) -> None:
    """Refuse a module that gives something else than before."""
    for expected, got in zip(call.outputs, found, strict=True):
        eps, rows = torch.finfo(expected.dtype).eps, call.rows
        # Of a layer, what it adds to its rows is rounded several times, their sum once or twice.
        change = expected - rows if rows.shape == expected.shape else expected
        bound = eps / 2 * expected.float().norm(dim=-1) + (4 * eps + _SUMS) * change.float().norm(dim=-1)
        off = (got.float() - expected.float()).norm(dim=-1)
        share = (off <= bound).float().mean().item()
        if not share >= _SHARE_ALIKE:
            raise ConfigError(
                f"{call.name} computes otherwise when compiled: {(1 - share) * off.numel():.0f} of {off.numel()} rows "
                f"are off, by up to {(off / bound).max().item():.1f} times what rounding explains"
            )
