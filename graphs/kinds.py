"""The kinds of step that have graphs. All are one graph runner with different declarations."""

from dataclasses import dataclass
from typing import Literal

from ..dispatch.budgets.limits import Limits, step_widths

KindName = Literal[
    "decode",
    "piecewise",
    "target_verify",
    "eagle_draft",
    "eagle_draft_extend",
    "frozen_kv_mtp",
    "multi_layer_eagle_draft_extend",
]


@dataclass(frozen=True)
class GraphKind:
    """One kind of step.

    Attributes:
        name: its key in plans and records.
        model: whose layers it runs; target and draft graphs never share a memory pool.
        unit: what a bucket counts: requests of a fixed width, or tokens.
        attends_by: what has a block table of its own: a request, or each of its tokens (branches of a draft).
    """

    name: KindName
    model: Literal["target", "draft"]
    unit: Literal["requests", "tokens"] = "requests"
    attends_by: Literal["request", "token"] = "request"


KINDS: dict[str, GraphKind] = {
    kind.name: kind
    for kind in (
        GraphKind("decode", "target"),
        GraphKind("piecewise", "target", unit="tokens"),
        GraphKind("target_verify", "target"),
        GraphKind("eagle_draft", "draft", attends_by="token"),
        GraphKind("eagle_draft_extend", "draft"),
        GraphKind("frozen_kv_mtp", "draft", attends_by="token"),
        GraphKind("multi_layer_eagle_draft_extend", "draft"),
    )
}


# Kinds whose attention FlashInfer's wrappers are planned for; others have no graphs on GPUs.
PLANNED_ON_GPUS: tuple[KindName, ...] = ("decode", "piecewise")


def configured_kinds(limits: Limits) -> list[tuple[GraphKind, int]]:
    """The kinds for which these limits ask for graphs, with their tokens per request; the same on every rank."""
    if limits.disable_cuda_graph:
        return []
    kinds = [(KINDS[width.kind], width.tokens_per_request) for width in step_widths(limits)]
    if limits.piecewise_tokens:
        kinds.append((KINDS["piecewise"], 1))
    return kinds
