"""What the user bounds: tokens of a step, requests at once, graphs, speculation, and how tokens reach their experts."""

from typing import Any, Literal, get_args

import msgspec

from ..errors import ConfigError

QuantisationKind = Literal["none", "fp8", "fp8_blockwise", "nvfp4"]
SpeculativeAlgorithm = Literal["EAGLE", "FROZEN_KV_MTP", "MULTI_LAYER_EAGLE"]
DisaggregationMode = Literal["none", "prefill", "decode"]

DEFAULT_PREFILL_TOKENS = 2048
# Beyond this a decode step of a MoE layer reads nearly every expert anyway and takes milliseconds, so what a replay
# saves in launches no longer shows, while each further bucket costs start-up time and buffers.
DEFAULT_GRAPH_BATCH_SIZE = 160

# Kernels count rows and tokens in 32 bits.
_HIGHEST = 2**31 - 1
_LOWEST = {
    "chunked_prefill_size": 0,
    "max_prefill_tokens": 0,
    "max_running_requests": 1,
    "cuda_graph_max_bs": 1,
    "piecewise_cuda_graph_max_tokens": 1,
    "max_dispatch_tokens_per_rank": 1,
    "speculative_num_draft_tokens": 1,
    "speculative_num_steps": 1,
    "speculative_eagle_topk": 1,
    "speculative_num_front_tokens": 0,
}


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one DP rank's step, the same on every rank.

    Fields hold what the user gave; the properties hold what follows from it, `None` resolved.

    Attributes:
        chunked_prefill_size: tokens a DP rank prefills in one step, over all its requests together; 0 turns chunking
            off, and a prompt is then prefilled whole.
        max_prefill_tokens: tokens of one prefill step where chunking is off, and a term of the largest forward in any
            case. Unset: `chunked_prefill_size`, or 2048 where chunking is off. 0 with chunking off: the pool never
            prefills, which only the role `decode` may do.
        max_running_requests: requests a DP rank decodes at once.
        mixed_steps: whether one step of a DP rank holds rows that decode and chunks of prompts together, within what a
            step prefills; else it prefills or decodes. Unset: where steps that prefill have graphs.
        cuda_graph_max_bs: the largest batch that has a graph. Unset: the largest of `cuda_graph_bs`, else
            `max_running_requests`, at most 160.
        cuda_graph_bs: batch sizes that have a graph, in any order. Unset: derived (`buckets.decode_buckets`).
        disable_cuda_graph: record no graph of any kind.
        piecewise_cuda_graph_max_tokens: the largest prefill step, in tokens, that has a graph. Unset: the most tokens a
            step prefills.
        disable_piecewise_cuda_graph: record no prefill graphs.
        max_dispatch_tokens_per_rank: capacity, the rows one rank may hand to an all-to-all in one step; per rank, never
            multiplied by `ep_size`. Unset: the environment's EXPERT_POOL_MAX_DISPATCH_TOKENS_PER_RANK, else what is
            needed, and for an all-to-all that is named at least 4096.
        speculative_algorithm: how tokens are drafted; `None` drafts none, and the other speculative settings rest.
        speculative_num_draft_tokens: tokens of a request that the target verifies in one step; unset counts as 1.
        speculative_num_steps: draft steps before a verification; does not widen a step.
        speculative_eagle_topk: branches of a draft step; unset counts as 1.
        speculative_num_front_tokens: tokens before the draft that each layer of MULTI_LAYER_EAGLE extends over.
        disaggregation_mode: the role of the pool where prefill and decode live in pools of their own.
    """

    chunked_prefill_size: int = DEFAULT_PREFILL_TOKENS
    max_prefill_tokens: int | None = None
    max_running_requests: int = 128
    mixed_steps: bool | None = None
    cuda_graph_max_bs: int | None = None
    cuda_graph_bs: tuple[int, ...] | None = None
    disable_cuda_graph: bool = False
    piecewise_cuda_graph_max_tokens: int | None = None
    disable_piecewise_cuda_graph: bool = False
    max_dispatch_tokens_per_rank: int | None = None
    speculative_algorithm: SpeculativeAlgorithm | None = None
    speculative_num_draft_tokens: int | None = None
    speculative_num_steps: int | None = None
    speculative_eagle_topk: int | None = None
    speculative_num_front_tokens: int = 1
    disaggregation_mode: DisaggregationMode = "none"

    def __post_init__(self) -> None:
        for name, lowest in _LOWEST.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ConfigError(f"limits.{name}={value} is below {lowest}: set limits.{name} to {lowest} or more")
            if value is not None and value > _HIGHEST:
                raise ConfigError(f"limits.{name}={value} is above {_HIGHEST}: set limits.{name} to {_HIGHEST} or less")
        if self.speculative_algorithm is not None:
            _require_one_of("speculative_algorithm", self.speculative_algorithm, SpeculativeAlgorithm)
        _require_one_of("disaggregation_mode", self.disaggregation_mode, DisaggregationMode)
        self._check_graph_batch_sizes()
        if self.prefill_tokens_per_step == 0 and self.disaggregation_mode != "decode":
            raise ConfigError(
                "limits.chunked_prefill_size=0 and limits.max_prefill_tokens=0 leave no room to prefill a prompt, and "
                f"limits.disaggregation_mode={self.disaggregation_mode!r} prefills: set limits.max_prefill_tokens to "
                "the tokens of the longest prompt, or limits.chunked_prefill_size to 1 or more"
            )

    def _check_graph_batch_sizes(self) -> None:
        if self.cuda_graph_bs is None:
            return
        sizes = tuple(sorted(set(self.cuda_graph_bs)))
        if not sizes or sizes[0] < 1 or sizes[-1] > _HIGHEST:
            raise ConfigError(
                f"limits.cuda_graph_bs={list(self.cuda_graph_bs)} has to list batch sizes of 1 to {_HIGHEST}: "
                "set limits.disable_cuda_graph for no graphs"
            )
        if self.cuda_graph_max_bs is not None and sizes[-1] > self.cuda_graph_max_bs:
            raise ConfigError(
                f"limits.cuda_graph_bs lists {sizes[-1]}, above limits.cuda_graph_max_bs={self.cuda_graph_max_bs}: "
                f"set limits.cuda_graph_max_bs to {sizes[-1]}, or leave it out"
            )
        # One form whatever the order given, so that configurations that mean the same have the same digest.
        msgspec.structs.force_setattr(self, "cuda_graph_bs", sizes)

    @property
    def prefill_tokens_per_step(self) -> int:
        """The most tokens one DP rank prefills in one step: the chunk, or `max_prefill_tokens` without chunking."""
        return self.chunked_prefill_size or self.resolved_max_prefill_tokens

    @property
    def resolved_max_prefill_tokens(self) -> int:
        """`max_prefill_tokens`, or its default."""
        if self.max_prefill_tokens is not None:
            return self.max_prefill_tokens
        return self.chunked_prefill_size or DEFAULT_PREFILL_TOKENS

    @property
    def graph_batch_size(self) -> int:
        """The largest batch that has a graph; 0 without graphs."""
        if self.disable_cuda_graph:
            return 0
        if self.cuda_graph_bs is not None:
            return self.cuda_graph_bs[-1]
        if self.cuda_graph_max_bs is not None:
            return self.cuda_graph_max_bs
        return min(self.max_running_requests, DEFAULT_GRAPH_BATCH_SIZE)

    @property
    def piecewise_tokens(self) -> int:
        """The largest prefill step, in tokens, that has a graph; 0 without prefill graphs."""
        if self.disable_cuda_graph or self.disable_piecewise_cuda_graph:
            return 0
        if self.piecewise_cuda_graph_max_tokens is not None:
            return self.piecewise_cuda_graph_max_tokens
        return self.prefill_tokens_per_step

    @property
    def mixes_steps(self) -> bool:
        """`mixed_steps`, or its default before it is known which graphs ranks record."""
        return self.piecewise_tokens > 0 if self.mixed_steps is None else self.mixed_steps

    @property
    def max_requests_per_step(self) -> int:
        """The largest batch that decodes in one step, padding to a graph's batch size included."""
        return max(self.graph_batch_size, self.max_running_requests)


def _require_one_of(name: str, value: Any, allowed: Any) -> None:
    if value not in get_args(allowed):
        raise ConfigError(f"limits.{name}={value!r} is not one of {', '.join(get_args(allowed))}")
