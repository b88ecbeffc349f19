"""One request as a DP rank runs it: its tokens, how many of them are cached, and when it is over."""

from collections.abc import Callable

from .request import Completion, FinishReason, Request

Decode = Callable[[list[int]], str]
"""From token ids to text without special tokens."""


class Sequence:
    """A request under way.

    Args:
        request: what was asked.
        max_length: prompt and completion tokens together, at most.
        decode: the tokenizer's decoding, `None` where the model folder carries no tokenizer.
    """

    def __init__(self, request: Request, max_length: int, decode: Decode | None):
        self.request = request
        self.token_ids = list(request.prompt_token_ids)
        self.num_computed = 0
        self.blocks: list[int] = []
        self._max_length = max_length
        self._decode = decode

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    def append(self, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Add a generated token; returns the reason if it ends the request."""
        self.token_ids.append(token_id)
        sampling = self.request.sampling
        if token_id in eos_token_ids and not sampling.ignore_eos:
            return "stop"
        if sampling.stop and self._stop_position(self._text()) is not None:
            return "stop"
        if self.num_generated >= sampling.max_new_tokens or len(self.token_ids) >= self._max_length:
            return "length"
        return None

    def completion(self, finish_reason: FinishReason, error: str | None = None) -> Completion:
        text = None
        if self._decode is not None:
            text = self._text()
            text = text[: self._stop_position(text)]
        return Completion(
            key=self.request.key,
            token_ids=tuple(self.token_ids[self.num_prompt_tokens :]),
            text=text,
            finish_reason=finish_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            error=error,
        )

    def _text(self) -> str:
        assert self._decode is not None
        return self._decode(self.token_ids[self.num_prompt_tokens :])

    def _stop_position(self, text: str) -> int | None:
        found = [text.find(stop) for stop in self.request.sampling.stop]
        return min((position for position in found if position >= 0), default=None)
