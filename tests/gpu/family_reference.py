"""Transformers on a checkpoint, what its parts contribute, and how close others come; for check_families.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

DECODED = 4
RELATIVE_BOUND, SAME_BOUND = 3e-2, 0.99
# Of one position a sequence: a share of 0.01 gives more than these in one of 200 runs.
FEW_OTHERS = 3
TIE = 2.0**-7
# A swapped pair of experts has to move logits by more than three times the bound, or the bound would say little.
SWAP_BOUND = 0.1

# Positions routed elsewhere, over those that Transformers' own rounding routes elsewhere: two roundings, not one.
ELSEWHERE_BOUND = 2.0

COLUMNS = ("model", "part", "relative", "routed alike", "worst", "same", "ours to f32", "HF to f32")
COLUMNS += ("same as f32: ours", "HF", "elsewhere", "HF elsewhere", "")


@dataclass
class Reference:
    """Logits `[length, V]` float32 and experts `[length, layers x top-k]`, sorted in each layer, of each sequence."""

    logits: list[torch.Tensor]
    experts: list[torch.Tensor]

    def picked(self, positions: slice) -> "Reference":
        """The same of some positions of each sequence."""
        return Reference([one[positions] for one in self.logits], [one[positions] for one in self.experts])


def load(path: str, dtype: torch.dtype, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()


def experts_modules(model: Any) -> dict[str, torch.nn.Module]:
    """By name, the modules that compute the experts of each MoE layer."""
    from expert_pool.workers.model.inspection import expert_parallel_plan

    modules = dict(model.named_modules())
    plan = expert_parallel_plan(model)
    return {name: modules[name] for name, style in plan.items() if style == "ep_dispatch_experts"}


@torch.inference_mode()
def reference(model: Any, batch: list[list[int]]) -> Reference:
    """Each sequence run alone."""
    chosen: list[torch.Tensor] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs: chosen.append(_experts_of(args, kwargs)), with_kwargs=True
        )
        for module in experts_modules(model).values()
    ]
    found = Reference([], [])
    device = next(model.parameters()).device
    for tokens in batch:
        chosen.clear()
        found.logits.append(model(torch.tensor([tokens], device=device)).logits[0].float().cpu())
        found.experts.append(torch.cat(chosen, dim=1).cpu())
    for hook in hooks:
        hook.remove()
    return found


def _experts_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    indices = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
    return indices.sort(dim=-1).values


def relative(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Relative error of each position's logits, `[N, V]` twice -> `[N]`."""
    return (a - b).norm(dim=-1) / b.norm(dim=-1)


def same_argmax(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Share of positions with the same most likely token, or with one that lies within the rounding of the largest."""
    best = theirs.max(dim=-1).values
    chosen = theirs.gather(1, ours.argmax(dim=-1, keepdim=True))[:, 0]
    return float((best - chosen <= TIE * best.abs()).float().mean())


PREFILLED, DECODED_ONES, LAST_PREFILLED = slice(None, -DECODED), slice(-DECODED, None), slice(-DECODED - 1, -DECODED)


def compare(name: str, ours: dict[str, Reference], half: Reference, full: Reference) -> list[tuple[str, ...]]:
    """Rows of the table: what was prefilled, the last of it in graphs, and what was decoded in graphs."""
    rows = []
    parts = (("prefill", "all", PREFILLED), ("prefill graphs", "prefill graphs", LAST_PREFILLED))
    for part, of, pick in (*parts, ("replay", "all", DECODED_ONES)):
        own_half, own_full = half.picked(pick), full.picked(pick)
        own_ours = ours[of] if pick == LAST_PREFILLED else ours[of].picked(pick)
        mine, theirs, exact = (torch.cat(one.logits) for one in (own_ours, own_half, own_full))
        elsewhere, own = _flips(own_ours, own_half), _flips(own_half, own_full)
        alike, error = ~elsewhere, relative(mine, theirs)
        overall, steady = (float((mine[of] - theirs[of]).norm() / theirs[of].norm()) for of in (slice(None), alike))
        same = same_argmax(mine, theirs)
        most_others = FEW_OTHERS if pick == LAST_PREFILLED else len(mine) * (1 - SAME_BOUND)
        good = steady <= RELATIVE_BOUND and len(mine) * (1 - same) <= most_others
        good = good and float(elsewhere.float().mean()) <= ELSEWHERE_BOUND * float(own.float().mean())
        rows.append(
            (
                name,
                part,
                f"{overall:.4f}",
                f"{steady:.4f}",
                f"{float(error[alike].max()):.4f}",
                f"{same:.4f}",
                f"{float(relative(mine, exact).mean()):.4f}",
                f"{float(relative(theirs, exact).mean()):.4f}",
                f"{same_argmax(mine, exact):.4f}",
                f"{same_argmax(theirs, exact):.4f}",
                f"{float(elsewhere.float().mean()):.4f}",
                f"{float(own.float().mean()):.4f}",
                "ok" if good else "ABOVE",
            )
        )
    return rows


def _flips(half: Reference, full: Reference) -> torch.Tensor:
    """Positions that go to other experts in some layer."""
    return torch.cat([(a != b).any(dim=1) for a, b in zip(half.experts, full.experts, strict=True)])


@contextmanager
def without(modules: list[torch.nn.Module]) -> Iterator[None]:
    """These modules give zeros meanwhile."""
    hooks = [module.register_forward_hook(lambda _, args, output: torch.zeros_like(output)) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def swapped_experts(experts: torch.nn.Module) -> Iterator[None]:
    """The first two experts of a layer change places meanwhile, all their weights and biases."""
    order = [1, 0]

    def swap() -> None:
        for tensor in experts.parameters():
            tensor.data[:2] = tensor.data[order].clone()

    swap()
    try:
        yield
    finally:
        swap()


MARGIN_COLUMNS = ("model", "flips", "relative", "same", "share of experts", "of attention", "two swapped", "")


def margins(name: str, path: str, device: str, batch: list[list[int]]) -> tuple[str, ...]:
    """What Transformers alone says of a checkpoint: a row of `MARGIN_COLUMNS`.

    Positions with other experts in bf16 than in float32; relative error and same most likely token of bf16 to float32;
    share of the logits' squared norm that changes where experts, or attention, give zero; relative change where two
    experts of one layer are swapped, the smallest over layers.
    """
    half = reference(load(path, torch.bfloat16, device), batch)
    model = load(path, torch.float32, device)
    full = reference(model, batch)
    exact = torch.cat(full.logits)
    experts = list(experts_modules(model).values())
    attention = [module for name, module in model.named_modules() if name.endswith("o_proj")]

    def change() -> float:
        return float((torch.cat(reference(model, batch).logits) - exact).norm() / exact.norm())

    changes = []
    for modules in (experts, attention):
        with without(modules):
            changes.append(change())
    swaps = []
    for module in experts:
        with swapped_experts(module):
            swaps.append(change())
    ours = torch.cat(half.logits)
    flips, error = float(_flips(half, full).float().mean()), float((ours - exact).norm() / exact.norm())
    same, used = same_argmax(ours, exact), torch.cat(full.experts).unique().numel()
    good = flips == 0 and error <= RELATIVE_BOUND and same >= SAME_BOUND and min(swaps) >= SWAP_BOUND
    good = good and used == next(experts[0].parameters()).shape[0]
    numbers = (f"{flips:.4f}", f"{error:.4f}", f"{same:.4f}", *(f"{value**2:.3f}" for value in changes))
    return (name, *numbers, f"{min(swaps):.3f}", "ok" if good else "NO MARGIN")
