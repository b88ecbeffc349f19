"""What travels between the driver and the ranks: requests, completions, and a rank's state of affairs."""

import operator
from typing import Any, Literal, NoReturn, get_args

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
        for name, kind in _KINDS.items():
            msgspec.structs.force_setattr(self, name, _settled(name, getattr(self, name), kind))
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

    @classmethod
    def widest(cls, vocab_size: int) -> "SamplingParams":
        """Settings whose draw takes the most memory: no limit is one that leaves a step of it out."""
        return cls(temperature=1.0, top_k=max(1, vocab_size - 1), top_p=0.9, seed=0)


_KINDS = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}


def _settled(name: str, value: Any, kind: Any) -> Any:
    """A plain number, truth value or tuple of texts, also from what else a caller may hold: a NumPy integer, one text.

    Raises:
        ConfigError: it is not of this kind.
    """
    if kind is bool:
        if not isinstance(value, bool) and str(getattr(value, "dtype", "")) != "bool":
            _refuse_setting(name, value, "true or false")
        return bool(value)
    if kind == tuple[str, ...]:
        return _settled_texts(name, value)
    if value is None and type(None) in get_args(kind):
        return None
    if isinstance(value, (bool, str, bytes)):  # numbers to Python alone
        _refuse_setting(name, value, "a number" if float in (kind, *get_args(kind)) else "an integer")
    if float in (kind, *get_args(kind)):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            _refuse_setting(name, value, "a number")
    try:
        return operator.index(value)
    except TypeError:
        _refuse_setting(name, value, "an integer")


def _settled_texts(name: str, value: Any) -> tuple[str, ...]:
    try:
        texts = (value,) if isinstance(value, str) else tuple(value)
    except TypeError:
        _refuse_setting(name, value, "a text or several")
    if not all(isinstance(text, str) for text in texts):
        _refuse_setting(name, texts, "a text or several")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair: ranks could not tell each other
        _refuse_setting(name, texts, f"texts that have a UTF-8 form ({error.reason})")
    return texts


def _refuse_setting(name: str, value: object, bound: str) -> NoReturn:
    raise ConfigError(f"{name}={value!r:.60}: set {name} to {bound}")


class Generated(msgspec.Struct, frozen=True):
    """What steps have yielded for a request: columns, each with one value a generated token.

    What a step yields beyond the token is one column more here, and a tensor of its name in `StepRows`.

    Attributes:
        token_ids: the tokens.
    """

    token_ids: tuple[int, ...] = ()


class GeneratedSoFar:
    """The same while it grows.

    Args:
        begun: what there is already.
    """

    def __init__(self, begun: Generated):
        self._columns: list[list[Any]] = [list(column) for column in msgspec.structs.astuple(begun)]

    def __len__(self) -> int:
        return len(self._columns[0])

    def extend(self, more: Generated) -> None:
        for column, values in zip(self._columns, msgspec.structs.astuple(more), strict=True):
            column.extend(values)

    def since(self, num_tokens: int) -> Generated:
        """All but what belongs to the first `num_tokens` tokens."""
        return Generated(*(tuple(column[num_tokens:]) for column in self._columns))


class Request(msgspec.Struct, frozen=True):
    """One prompt on its way through the pool.

    Attributes:
        key: unique within the pool, given by the driver.
        prompt_token_ids: at least one token.
        sampling: with a seed wherever the temperature is above 0.
        resume_from: what was generated for it before, by ranks that are no more; the completion begins with it.
    """

    key: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    resume_from: Generated = Generated()


class Completion(msgspec.Struct, frozen=True):
    """What became of one request.

    Attributes:
        key: the request's key.
        generated: its tokens and what came with them, the end-of-sequence token included where one ended the request.
        text: what the tokens add to the prompt's text, cut before a stop text; `None` without a tokenizer.
        finish_reason: `stop` (end of sequence or stop text), `length` (max_new_tokens or the context), `error`.
        num_prompt_tokens: tokens of the prompt.
        error: what went wrong, where `finish_reason` is `error`.
    """

    key: int
    generated: Generated
    text: str | None
    finish_reason: FinishReason
    num_prompt_tokens: int
    error: str | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.generated.token_ids

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
        decode_steps: steps in which this DP rank decoded and did nothing else.
        mixed_steps: steps in which this DP rank decoded and prefilled.
        idle_steps: steps in which this DP rank ran a dummy token.
        preemptions: requests sent back to wait because KV blocks ran out.
        generated_tokens: tokens sampled.
        prompt_tokens: tokens prefilled, those that are prefilled again after a preemption included.
        free_kv_blocks: KV blocks not in use, of
        num_kv_blocks: that there are.
        decode_seconds: time of those `decode_steps`, of which
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
    mixed_steps: int = 0
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
    """What an unfinished request has gained since its last report."""

    key: int
    generated: Generated


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
