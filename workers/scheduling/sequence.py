"""One request as a DP rank runs it: its tokens, how many of them are cached, and when it is over.

A step is launched before the tokens of the one before it have come back from the device, so a sequence may own tokens
that are sampled and not yet known: they count, and only their values are missing.
"""

from ..request import Completion, FinishReason, Generated, GeneratedSoFar, Progress, Request
from .continued_text import ContinuedText, Decode


class TokenSequence:
    """A request under way.

    Args:
        request: what was asked, with what it resumes from.
        max_length: prompt and completion tokens together, at most.
        decode: the tokenizer's decoding, `None` where the model folder carries no tokenizer.

    Attributes:
        token_ids: prompt and completion, as far as their values are known.
        num_computed: tokens whose keys and values are cached, by the steps launched so far.
        num_to_prefill: tokens that it had when it was admitted, 0 while it waits; it decodes once they are computed.
        num_pending: tokens that steps under way sample.
        pending_row: where the last of them is among the tokens that its step samples.
        blocks: KV blocks that it holds.
        is_over: finished or dropped; what steps under way still sample for it is of no use.
    """

    def __init__(self, request: Request, max_length: int, decode: Decode | None):
        self.request = request
        self.token_ids = [*request.prompt_token_ids, *request.resume_from.token_ids]
        self.num_computed = 0
        self.num_to_prefill = 0
        self.num_pending = 0
        self.pending_row = 0
        self.is_over = False
        self.blocks: list[int] = []
        self._generated = GeneratedSoFar(request.resume_from)
        self._num_reported = len(self._generated)
        self._max_length = max_length
        self._text = None if decode is None else ContinuedText(decode, request.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens, those under way included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def is_admitted(self) -> bool:
        return self.num_to_prefill > 0

    @property
    def is_prefilling(self) -> bool:
        return self.num_computed < self.num_to_prefill

    @property
    def is_full(self) -> bool:
        """Whether it has all tokens it may have, those under way included: nothing is left to run for it."""
        return self.num_generated >= self.request.sampling.max_new_tokens or self.num_tokens >= self._max_length

    def launch(self, num_tokens: int, row: int | None) -> None:
        """A step that computes the next `num_tokens` was launched; it samples one more as its `row`, if it does."""
        self.num_computed += num_tokens
        if row is not None:
            self.num_pending += 1
            self.pending_row = row

    def append(self, generated: Generated, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """The oldest token under way has become known; returns the reason if it ends the request."""
        [token_id] = generated.token_ids
        self.num_pending -= 1
        self.token_ids.append(token_id)
        self._generated.extend(generated)
        num_known = len(self.token_ids)
        sampling = self.request.sampling
        if token_id in eos_token_ids and not sampling.ignore_eos:
            return "stop"
        if sampling.stop:
            assert self._text is not None, "stop texts are refused without a tokenizer"
            if self._text.stops_here(self.token_ids[self.num_prompt_tokens :], sampling.stop):
                return "stop"
        if num_known - self.num_prompt_tokens >= sampling.max_new_tokens or num_known >= self._max_length:
            return "length"
        return None

    def progress(self) -> Progress | None:
        """What has become known since the last call, if there is anything."""
        if len(self._generated) == self._num_reported:
            return None
        new = self._generated.since(self._num_reported)
        self._num_reported = len(self._generated)
        return Progress(self.request.key, new)

    def completion(self, finish_reason: FinishReason, error: str | None = None) -> Completion:
        generated, sampling = self._generated.since(0), self.request.sampling
        text = None
        if self._text is not None:
            text = self._text.before_stop(generated.token_ids, sampling.stop, sampling.skip_special_tokens)
        return Completion(
            key=self.request.key,
            generated=generated,
            text=text,
            finish_reason=finish_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            error=error,
        )
