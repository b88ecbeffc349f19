"""What became of a prompt, as its caller sees it."""

from typing import Any

import msgspec

from ..workers.request import Completion, FinishReason


class PoolCompletion(msgspec.Struct, frozen=True, eq=False):
    """A rank's completion, seen from the call of `generate` that it belongs to.

    Two are equal where all of their attributes are, in whichever call.

    Attributes:
        index: the prompt's place in what `generate` was given.
        prompt_token_ids: the prompt, tokenised.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    _completion: Completion

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Generated tokens, the end-of-sequence token included where one ended the request."""
        return self._completion.token_ids

    @property
    def text(self) -> str | None:
        """What the tokens add to the prompt's text, without special tokens unless they were asked for, cut before a
        stop text; `None` where the model folder carries no tokenizer."""
        return self._completion.text

    @property
    def finish_reason(self) -> FinishReason:
        """`stop`, `length`, or `error`: a request that fails fails alone."""
        return self._completion.finish_reason

    @property
    def error(self) -> str | None:
        """What went wrong, where `finish_reason` is `error`."""
        return self._completion.error

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        return self._seen() == other._seen() if isinstance(other, PoolCompletion) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._seen().values()))

    def __repr__(self) -> str:
        return f"PoolCompletion({', '.join(f'{name}={value!r}' for name, value in self._seen().items())})"

    def _seen(self) -> dict[str, Any]:
        """What is shown and compared: all attributes but the counts. The completion's key is of the pool's own."""
        properties = [name for name, one in vars(PoolCompletion).items() if isinstance(one, property)]
        names = [name for name in properties if not name.startswith("num_")]
        return {name: getattr(self, name) for name in ("index", "prompt_token_ids", *names)}
