"""What travels between the driver and the ranks: requests, completions, and a rank's state of affairs."""

import operator
from typing import Literal

import msgspec

from ..dispatch.errors import ConfigError

FinishReason = Literal["stop", "length", "error"]


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen. The default is greedy.

    Attributes:
        max_new_tokens: the most tokens to generate, at least 1.
        temperature: 0 takes the most likely token; above 0 samples from logits divided by it.
        top_p: sample among the most likely tokens whose probabilities sum to this share, in (0, 1].
        top_k: sample among this many most likely tokens, of equally likely ones those of the lowest ids; 0 means all,
            and 1 takes the token that greedy takes.
        seed: makes sampling repeatable; one is drawn for a request that has none.
        stop: a text or several that end the generation, special tokens among them as they are written; looked for in
            what is generated. The completion's text ends before the first of them.
        ignore_eos: go on after an end-of-sequence token.
        skip_special_tokens: leave special tokens out of the completion's text.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._settle_types()
        refuse = _refuse_setting
        if not 1 <= self.max_new_tokens < 2**31:
            refuse("max_new_tokens", self.max_new_tokens, "between 1 and 2**31 - 1")
        if not 0.0 <= self.temperature < float("inf"):
            refuse("temperature", self.temperature, "0 (greedy) or more, and finite")
        if not 0.0 < self.top_p <= 1.0:
            refuse("top_p", self.top_p, "above 0 and at most 1")
        if not 0 <= self.top_k < 2**31:
            refuse("top_k", self.top_k, "0 (all tokens) or more, below 2**31")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            refuse("seed", self.seed, "between 0 and 2**64 - 1")
        if any(not text for text in self.stop):
            refuse("stop", self.stop, "texts of at least one character")

    def _settle_types(self) -> None:
        """Plain numbers and a tuple of texts, also from what else a caller may hold: a NumPy integer, one text."""
        refuse, settle = _refuse_setting, msgspec.structs.force_setattr
        for name in ("max_new_tokens", "top_k", "seed"):
            value = getattr(self, name)
            try:
                settle(self, name, value if name == "seed" and value is None else operator.index(value))
            except TypeError:
                refuse(name, value, "an integer")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            try:
                settle(self, name, float(value))
            except (TypeError, ValueError, OverflowError):
                refuse(name, value, "a number")
        for name in ("ignore_eos", "skip_special_tokens"):
            value = getattr(self, name)
            if value not in (True, False):
                refuse(name, value, "true or false")
            settle(self, name, bool(value))
        if isinstance(self.stop, str):
            settle(self, "stop", (self.stop,))
        try:
            settle(self, "stop", tuple(self.stop))
        except TypeError:
            refuse("stop", self.stop, "a text or several")
        if not all(isinstance(text, str) for text in self.stop):
            refuse("stop", self.stop, "a text or several")
        try:
            "".join(self.stop).encode()
        except UnicodeEncodeError as error:  # half of a surrogate pair: ranks could not tell each other
            refuse("stop", self.stop, f"texts that have a UTF-8 form ({error.reason})")


def _refuse_setting(name: str, value: object, bound: str) -> None:
    raise ConfigError(f"{name}={value!r:.60}: set {name} to {bound}")


class Request(msgspec.Struct, frozen=True):
    """One prompt on its way through the pool.

    Attributes:
        key: unique within the pool, given by the driver.
        prompt_token_ids: at least one token.
        sampling: with a seed wherever the temperature is above 0.
        resume_token_ids: tokens generated for it before, by ranks that are no more; the completion begins with them.
    """

    key: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    resume_token_ids: tuple[int, ...] = ()


class Completion(msgspec.Struct, frozen=True):
    """What became of one request.

    Attributes:
        key: the request's key.
        token_ids: generated tokens, the end-of-sequence token included where one ended the request.
        text: what the tokens add to the prompt's text, cut before a stop text; `None` without a tokenizer.
        finish_reason: `stop` (end of sequence or stop text), `length` (max_new_tokens or the context), `error`.
        num_prompt_tokens: tokens of the prompt.
        error: what went wrong, where `finish_reason` is `error`.
    """

    key: int
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    num_prompt_tokens: int
    error: str | None = None

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids)


STEP_TIME_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class RankStats(msgspec.Struct, frozen=True):
    """Counters of one DP rank since its start, and its present load. Times are in seconds.

    Attributes:
        dp_rank: which DP rank.
        running: requests being prefilled or decoded.
        waiting: requests not yet admitted, preempted ones included.
        steps: steps run, idle ones included.
        replayed_steps: of these, steps that replayed a graph.
        decode_steps: steps in which this DP rank decoded.
        idle_steps: steps in which this DP rank ran a dummy token.
        preemptions: requests sent back to wait because KV blocks ran out.
        generated_tokens: tokens sampled.
        prompt_tokens: tokens prefilled, those that are prefilled again after a preemption included.
        free_kv_blocks: KV blocks not in use, of
        num_kv_blocks: that there are.
        decode_seconds: time of the decode steps, of which
        decode_model_seconds: was spent inside the model; 0 where steps overlap, as the host then sees only the launch.
        step_seconds: time of all steps, idle ones included, of which
        agree_seconds: was spent in the agreement.
        step_times: steps by the time they took: up to each of `STEP_TIME_BOUNDS_S`, and beyond the last.
        dispatched_rows: rows that each rank of this DP rank handed to every MoE layer, padding included.
    """

    dp_rank: int
    running: int = 0
    waiting: int = 0
    steps: int = 0
    replayed_steps: int = 0
    decode_steps: int = 0
    idle_steps: int = 0
    preemptions: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    free_kv_blocks: int = 0
    num_kv_blocks: int = 0
    decode_seconds: float = 0.0
    decode_model_seconds: float = 0.0
    step_seconds: float = 0.0
    agree_seconds: float = 0.0
    step_times: tuple[int, ...] = ()
    dispatched_rows: tuple[int, ...] = ()


class Progress(msgspec.Struct, frozen=True):
    """Tokens that an unfinished request has gained since its last report."""

    key: int
    token_ids: tuple[int, ...]


class RankOutput(msgspec.Struct, frozen=True):
    """A DP rank's report to the driver: what finished since the last one, and how it stands.

    Attributes:
        completions: of requests that finished.
        stats: counters.
        progress: of requests that had not, about once a second; reports of one request follow each other without gaps.
        is_last: whether nothing follows, since the rank has left its loop for good.
    """

    completions: tuple[Completion, ...]
    stats: RankStats
    progress: tuple[Progress, ...] = ()
    is_last: bool = False


class ExpertCounts(msgspec.Struct, frozen=True):
    """Routed (token, expert) pairs of one DP rank's batches since its start, padding not counted.

    Attributes:
        num_experts: of each layer, over all ranks.
        counts: int64 in native order, for every expert of the first layer, then of the next.
    """

    num_experts: tuple[int, ...]
    counts: bytes
