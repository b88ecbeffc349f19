"""What a DP rank runs next: continuous batching with chunked prefill over a bounded KV cache.

Policy with mixed steps: every running request decodes by one token, and prompts get what that leaves of the tokens
that a step prefills. Where it leaves too little for the next of them, prompts and decoding requests take turns, a step
each. So no running request waits more than one step for another's prompt, and no prompt for more than one step of
decoding. Without mixed steps: prefill whenever a request has tokens to prefill, otherwise decode.

A waiting request is admitted, first come first served, when fewer than `max_running_requests` run and the cache has
blocks for all its tokens. When a decoding request needs a block and none is free, the youngest running request gives up
its blocks, in the middle of its prompt too, and goes back to the head of the queue with the tokens it has; they are
prefilled again, nothing is lost. It is not admitted again in the same step: the blocks that it gave up are fewer now.

A batch may be launched before the one before it has come back: requests then go on with tokens whose values are not
known yet, and one that turns out to have ended is dropped from what comes back later.

The scheduler is a function of the requests it was given and the tokens that came back: ranks that share a batch run
identical ones.
"""

import enum
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ...dispatch.budgets.limits import Limits
from ..attention.kv_cache import BlockAllocator
from ..request import Completion, Progress, Request
from .continued_text import Decode
from .rows import Row
from .sequence import TokenSequence


class BatchKind(enum.IntEnum):
    """What a batch holds: chunks of prompts, rows that decode, both or neither."""

    IDLE = 0
    PREFILL = 1
    DECODE = 2
    MIXED = 3

    @property
    def prefills(self) -> bool:
        return self in (BatchKind.PREFILL, BatchKind.MIXED)


@dataclass(frozen=True)
class Slice:
    """The next `num_tokens` uncomputed tokens of a sequence.

    Attributes:
        sequence: whose.
        num_tokens: how many.
        reaches_end: whether the step yields the sequence's next token; a chunk in the middle of a prompt does not.
    """

    sequence: TokenSequence
    num_tokens: int
    reaches_end: bool

    @classmethod
    def of(cls, sequence: TokenSequence, num_tokens: int) -> "Slice":
        return cls(sequence, num_tokens, num_tokens == sequence.num_uncomputed)


@dataclass(frozen=True)
class ScheduledBatch:
    """What one DP rank wants to run in one step; empty when idle.

    Attributes:
        kind: what it holds.
        slices: of a mixed step, those that decode come first.
        num_prompt_tokens: of its tokens, those of prompts.
    """

    kind: BatchKind
    slices: tuple[Slice, ...] = ()
    num_prompt_tokens: int = 0

    @classmethod
    def of(cls, decoding: Sequence[Slice], prompts: Sequence[Slice]) -> "ScheduledBatch":
        kind = BatchKind((BatchKind.DECODE if decoding else 0) + (BatchKind.PREFILL if prompts else 0))
        return cls(kind, (*decoding, *prompts), sum([piece.num_tokens for piece in prompts]))

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.slices)

    @property
    def num_due(self) -> int:
        """Sequences whose next token this batch yields."""
        return sum(piece.reaches_end for piece in self.slices)

    @property
    def digest(self) -> int:
        """One signed 64-bit number for which tokens of which requests these are, in order; the same in every process,
        as Python's hash of integers is."""
        return hash(tuple([(p.sequence.request.key, p.sequence.num_computed, p.num_tokens) for p in self.slices]))


class Scheduler:
    """Requests of one DP rank.

    Args:
        limits: bounds of a step.
        allocator: blocks of this DP rank's KV cache.
        context_length: the most tokens of a request.
        vocab_size: token ids are below it.
        eos_token_ids: tokens that end a request.
        decode: the tokenizer's decoding, if there is one.
    """

    def __init__(
        self,
        limits: Limits,
        allocator: BlockAllocator,
        context_length: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        decode: Decode | None,
    ):
        self._limits = limits
        self._allocator = allocator
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._decode = decode
        self._prefills_whole = limits.chunked_prefill_size == 0
        self._mixes = limits.mixes_steps
        self._last_kind = BatchKind.IDLE
        self._max_cached_tokens = allocator.num_free * allocator.block_size
        self._waiting: deque[TokenSequence] = deque()
        self._running: list[TokenSequence] = []
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free_blocks(self) -> int:
        return self._allocator.num_free

    @property
    def num_blocks(self) -> int:
        return self._allocator.num_blocks

    def add(self, request: Request) -> Completion | None:
        """Queue a request; one that can never run is answered at once with an error."""
        problem = self._problem(request)
        sequence = TokenSequence(request, self._max_length(request), self._decode)
        if problem is not None:
            return sequence.completion("error", problem)
        self._waiting.append(sequence)
        return None

    def abort(self, key: int) -> None:
        """Drop a request whose caller is gone; unknown keys (it may just have finished) are ignored."""
        for sequence in [*self._running, *self._waiting]:
            if sequence.request.key == key:
                self._remove(sequence)
                return

    def progress(self) -> list[Progress]:
        """Tokens of unfinished requests that have become known since the last call."""
        news = (sequence.progress() for sequence in itertools.chain(self._running, self._waiting))
        return [new for new in news if new is not None]

    def schedule(self) -> ScheduledBatch:
        """The next batch; its blocks are allocated.

        Until it is launched, what was scheduled is scheduled again, not necessarily in one batch.
        """
        budget = self._limits.prefill_tokens_per_step
        if not self._mixes:
            prompts = self._prompts_within(budget)
            return ScheduledBatch.of([] if prompts else self._decoding(), prompts)
        decoding = self._decoding()
        prompts = self._prompts_within(budget - len(decoding))
        if decoding and not prompts and self._last_kind is BatchKind.DECODE:
            prompts = self._prompts_within(budget)
            decoding = [] if prompts else decoding
        return ScheduledBatch.of(decoding, prompts)

    def launch(self, batch: ScheduledBatch) -> None:
        """The batch is under way: the next `schedule` goes on from where it will end.

        Args:
            batch: what `schedule` returned; batches come back through `resolve` in the order they are launched.
        """
        self._last_kind = batch.kind
        rows = itertools.count()
        for piece in batch.slices:
            piece.sequence.launch(piece.num_tokens, next(rows) if piece.reaches_end else None)

    def resolve(self, batch: ScheduledBatch, rows: list[Row]) -> list[Completion]:
        """Take the results of the oldest batch under way in.

        Args:
            batch: what was launched.
            rows: for each slice that reaches the end of its sequence, in order, what the step yields for it; where a
                row failed, its request fails alone.

        Returns:
            Completions of the requests that ended.
        """
        due = [piece.sequence for piece in batch.slices if piece.reaches_end]
        completions = []
        for sequence, row in zip(due, rows, strict=True):
            if sequence.is_over:
                continue
            if row.failure is not None:
                completions.append(sequence.completion("error", row.failure.told(len(sequence.token_ids))))
                self._remove(sequence)
                continue
            reason = sequence.append(row.generated, self._eos_token_ids)
            if reason is not None:
                completions.append(sequence.completion(reason))
                self._remove(sequence)
        return completions

    def _prompts_within(self, budget: int) -> list[Slice]:
        """Chunks of prompts, of so many tokens at most, those of requests that are admitted for it included."""
        slices: list[Slice] = []
        for sequence in [one for one in self._running if one.is_prefilling]:
            if not self._has_room(sequence, budget):
                return slices
            slices.append(Slice.of(sequence, min(budget, sequence.num_uncomputed)))
            budget -= slices[-1].num_tokens
        while self._waiting and len(self._running) < self._limits.max_running_requests:
            sequence = self._waiting[0]
            if not self._has_room(sequence, budget) or not self._allocator.grow(sequence.blocks, sequence.num_tokens):
                break
            self._running.append(self._waiting.popleft())
            sequence.num_to_prefill = sequence.num_tokens
            slices.append(Slice.of(sequence, min(budget, sequence.num_uncomputed)))
            budget -= slices[-1].num_tokens
        return slices

    def _has_room(self, sequence: TokenSequence, budget: int) -> bool:
        """Whether so many tokens of a step are enough for the next chunk of a prompt."""
        return budget >= (sequence.num_uncomputed if self._prefills_whole else 1)

    def _decoding(self) -> list[Slice]:
        """The next token of all that decode; where blocks are short, the youngest give way, prompts among them."""
        wanted = [one for one in self._running if not (one.is_prefilling or one.is_full)]
        for sequence in wanted:
            while sequence.is_admitted and not self._allocator.grow(sequence.blocks, sequence.num_tokens):
                self._preempt(self._running[-1])
        return [Slice(sequence, 1, True) for sequence in wanted if sequence.is_admitted]

    def _preempt(self, sequence: TokenSequence) -> None:
        self._withdraw(sequence)
        sequence.num_computed = 0
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _remove(self, sequence: TokenSequence) -> None:
        self._withdraw(sequence)
        sequence.is_over = True

    def _withdraw(self, sequence: TokenSequence) -> None:
        """Out of its queue and its blocks: steps under way still write these, but before any step that is to come."""
        self._allocator.release(sequence.blocks)
        (self._running if sequence.is_admitted else self._waiting).remove(sequence)
        sequence.num_to_prefill = 0

    def _max_length(self, request: Request) -> int:
        return min(self._context_length, len(request.prompt_token_ids) + request.sampling.max_new_tokens)

    def _problem(self, request: Request) -> str | None:
        num_tokens = len(request.prompt_token_ids)
        if num_tokens == 0:
            return "the prompt is empty"
        if num_tokens >= self._context_length:
            return (
                f"the prompt has {num_tokens} tokens; the model's context of {self._context_length} holds a prompt of "
                f"at most {self._context_length - 1}"
            )
        if not all(0 <= token_id < self._vocab_size for token_id in request.prompt_token_ids):
            worst = max(request.prompt_token_ids, key=lambda token_id: abs(token_id - self._vocab_size // 2))
            return f"token id {worst} is outside the vocabulary of {self._vocab_size}"
        if request.sampling.stop and self._decode is None:
            return "stop texts need a tokenizer, and the model folder carries none"
        needed = self._max_length(request) - 1
        if needed > self._max_cached_tokens:
            return (
                f"the request may grow to {needed} cached tokens, the KV cache holds {self._max_cached_tokens}: "
                "raise cache.num_tokens or lower max_new_tokens"
            )
        bound = self._limits.prefill_tokens_per_step
        if self._prefills_whole and needed > bound:
            return (
                f"the request may grow to {needed} tokens, and without chunking a step prefills at most {bound}: raise "
                "limits.max_prefill_tokens, set limits.chunked_prefill_size, or lower max_new_tokens"
            )
        return None
