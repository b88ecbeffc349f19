"""The text of a completion: what its tokens add to the text of the prompt that they continue."""

from collections.abc import Callable, Sequence
from itertools import takewhile

from .stop_texts import CUT, HEAD, stop_position, stops_here

Decode = Callable[[list[int], bool], str]
"""From token ids to text, and whether special tokens are left out of it."""

_FIRST_CONTEXT = 16
_MAX_BYTES_OF_CHARACTER = 4


class ContinuedText:
    """The text behind one prompt.

    Tokens alone decode to less than they add: many tokenizers drop the space that a text begins with, and bytes may
    complete a character that the prompt began. So they are decoded together with the end of the prompt, whose text is
    then cut off.

    Args:
        decode: of the tokenizer.
        prompt_token_ids: all of them; as much of their end is decoded as the text behind it depends on.
    """

    def __init__(self, decode: Decode, prompt_token_ids: Sequence[int]):
        self._decode = decode
        self._prompt_token_ids = prompt_token_ids
        self._contexts: dict[bool, list[int]] = {}

    def of(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """What these tokens add to the prompt; a character that both have bytes of counts as theirs."""
        if not token_ids:
            return ""  # of a request that was refused for its prompt, which may not decode
        context = self._context(skip_special_tokens)
        text = self._decode([*context, *token_ids], skip_special_tokens)
        # With bytes behind them, the last bytes of the prompt may read otherwise.
        whole = self._decode(context, skip_special_tokens)
        head, num_left_out = whole, 0
        while not text.startswith(head) and num_left_out < min(_MAX_BYTES_OF_CHARACTER, len(context)):
            num_left_out += 1
            head = self._decode(context[: len(context) - num_left_out], skip_special_tokens)
        if text.startswith(head):
            return text[len(head) :]
        return text[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(whole, text, strict=False))) :]

    def stops_here(self, token_ids: Sequence[int], stops: Sequence[str]) -> bool:
        """Whether these tokens hold a stop text, if all but the last hold none; special tokens are text here."""
        return stops_here(
            lambda tail: self._decode(tail, False), token_ids, stops, lambda everything: self.of(everything, False)
        )

    def before_stop(self, token_ids: Sequence[int], stops: Sequence[str], skip_special_tokens: bool) -> str:
        """The text before the first stop text, or all of it, with special tokens or without."""
        text = self.of(token_ids, skip_special_tokens)
        if not stops:
            return text
        marked = self.of(token_ids, False) if skip_special_tokens else text
        position = stop_position(marked, stops)
        if position is None or marked == text:
            return text[:position]
        return self._unmarked(token_ids, marked[:position])

    def _unmarked(self, token_ids: Sequence[int], marked: str) -> str:
        """A beginning of the text with special tokens, without them."""
        num_whole = next(n for n in range(len(token_ids), -1, -1) if marked.startswith(self.of(token_ids[:n], False)))
        # What is left is the beginning of one token, which is left out whole if it is a special one.
        begun = marked[len(self.of(token_ids[:num_whole], False)) :]
        is_special = not self._decode(list(token_ids[num_whole : num_whole + 1]), True)
        return self.of(token_ids[:num_whole], True) + ("" if is_special else begun)

    def _context(self, skip_special_tokens: bool) -> list[int]:
        """The end of the prompt, behind which tokens decode as behind all of it."""
        if skip_special_tokens not in self._contexts:
            num_tokens = _FIRST_CONTEXT
            while num_tokens < len(self._prompt_token_ids):
                text = self._decode(list(self._prompt_token_ids[-num_tokens:]), skip_special_tokens)
                if len(text.lstrip(CUT)) > HEAD:
                    break
                num_tokens *= 2
            self._contexts[skip_special_tokens] = list(self._prompt_token_ids[-num_tokens:])
        return self._contexts[skip_special_tokens]
