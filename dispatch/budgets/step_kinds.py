"""The kinds of step that there are, and all that is said of each: the one list of budgets, plans and graphs.

All are one graph runner with different declarations. A running pool replays the kinds that `serve` a step. The others
are speculation's: they are recorded and rehearsed where settings ask for them, and no pool replays them yet.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from .buckets import decode_buckets, piecewise_buckets
from .limits import Limits

OfLimits = Callable[[Limits], int]


@dataclass(frozen=True)
class StepKind:
    """One kind of step; equal on every rank.

    Attributes:
        name: its key in plans and records.
        model: whose layers it runs; target and draft graphs never share a memory pool.
        width: tokens that it runs for each request under given limits; 0 where they do not ask for this kind.
        buckets: of its graphs under given limits, ascending; none without graphs.
        unit: what a bucket counts: requests of that width, or tokens of any requests.
        attends_by: what has a block table of its own: a request, or each of its tokens (branches of a draft).
        layers: graphs of one bucket, one for each draft layer.
        serves: which steps of a running pool replay it: those in which no rank prefills (`decode`), or some rank does
            (`prefill`). `None`: none does yet.
    """

    name: str
    model: Literal["target", "draft"]
    width: OfLimits
    buckets: Callable[[Limits], tuple[int, ...]] = decode_buckets
    unit: Literal["requests", "tokens"] = "requests"
    attends_by: Literal["request", "token"] = "request"
    layers: OfLimits = lambda limits: 1
    serves: Literal["decode", "prefill"] | None = None

    def num_requests(self, bucket: int, max_requests: int) -> int:
        """Requests that a graph has room for: its bucket's, or as many as its tokens may belong to.

        Args:
            bucket: of the graph.
            max_requests: in any step.
        """
        return bucket if self.unit == "requests" else min(bucket, max_requests)

    def num_due(self, bucket: int, width: int, max_requests: int) -> int:
        """Rows whose output is due: all of a graph that counts requests, of tokens each request's last."""
        return bucket * width if self.unit == "requests" else self.num_requests(bucket, max_requests)


def num_draft_layers(limits: Limits) -> int:
    """Draft layers of the multi-layer kind: one a draft step."""
    return limits.speculative_num_steps or 1


def _drafted(limits: Limits) -> int:
    return limits.speculative_num_draft_tokens or 1


def _branches(limits: Limits) -> int:
    return limits.speculative_eagle_topk or 1


def _drafted_behind_front(limits: Limits) -> int:
    return _drafted(limits) + limits.speculative_num_front_tokens


def _under(width: OfLimits, *algorithms: str) -> OfLimits:
    """The width of a kind that is there under these algorithms alone."""
    return lambda limits: width(limits) if limits.speculative_algorithm in algorithms else 0


KINDS: dict[str, StepKind] = {
    kind.name: kind
    for kind in (
        StepKind("decode", "target", lambda limits: 1, serves="decode"),
        StepKind("piecewise", "target", lambda limits: 1, piecewise_buckets, unit="tokens", serves="prefill"),
        StepKind("target_verify", "target", _under(_drafted, "EAGLE", "FROZEN_KV_MTP", "MULTI_LAYER_EAGLE")),
        StepKind("eagle_draft", "draft", _under(_branches, "EAGLE"), attends_by="token"),
        StepKind("eagle_draft_extend", "draft", _under(_drafted, "EAGLE")),
        StepKind("frozen_kv_mtp", "draft", _under(_branches, "FROZEN_KV_MTP"), attends_by="token"),
        StepKind(
            "multi_layer_eagle_draft_extend",
            "draft",
            _under(_drafted_behind_front, "MULTI_LAYER_EAGLE"),
            layers=num_draft_layers,
        ),
    )
}


def kinds_of(limits: Limits) -> list[StepKind]:
    """The kinds of step that run under these limits, with graphs or without, plain decode first."""
    return [kind for kind in KINDS.values() if kind.width(limits)]


def recorded_kinds(limits: Limits) -> list[StepKind]:
    """Those that these limits ask for graphs of."""
    return [kind for kind in kinds_of(limits) if kind.buckets(limits)]


def tokens_per_request(limits: Limits) -> int:
    """Tokens of one request in the widest kind of step that is configured; 1 without speculation."""
    return max(kind.width(limits) for kind in kinds_of(limits))


def graph_tokens(limits: Limits) -> set[int]:
    """Tokens of a DP rank in every graph."""
    return {bucket * kind.width(limits) for kind in recorded_kinds(limits) for bucket in kind.buckets(limits)}
