"""Whether a stop text has come up in what a request generates, found without decoding all of it for every token."""

from collections.abc import Callable, Sequence

TextOf = Callable[[list[int]], str]
"""From token ids to text."""

_FIRST_TAIL = 16
CUT = "\ufffd"  # stands for bytes that are no character, such as a character's that was cut in two
# Characters at the head of a decoded tail that may not be those of the whole text, cut bytes aside: a space that only
# the first token loses, a mark of continuation that only the first token keeps.
HEAD = 8


def stop_position(text: str, stops: Sequence[str]) -> int | None:
    """Where the first stop text begins; `None` where there is none."""
    found = [text.find(stop) for stop in stops]
    return min((position for position in found if position >= 0), default=None)


def stops_here(decode: TextOf, token_ids: Sequence[int], stops: Sequence[str], whole: TextOf | None = None) -> bool:
    """Whether the text of all tokens holds a stop text, if that of all but the last holds none.

    What is new at the end of a text reaches back no further than the last token's own characters and the one that it
    completes. So a tail is decoded that holds those behind the longest stop text, and the whole only to confirm.

    Args:
        decode: of the tokenizer.
        token_ids: all that the request generated.
        stops: the stop texts, at least one.
        whole: the text of all that it generated, where that is not what `decode` makes of these tokens alone.
    """
    needed = max(map(len, stops)) + len(decode([token_ids[-1]])) + 2
    num_tokens = _FIRST_TAIL
    while num_tokens < len(token_ids):
        tail = decode(list(token_ids[-num_tokens:]))
        # A tail that begins inside a run of bytes may be cut all through it.
        head = len(tail) - len(tail.lstrip(CUT)) + HEAD
        if len(tail) - head >= needed:
            if stop_position(tail, stops) is None:
                return False
            break
        num_tokens *= 2
    return stop_position((whole or decode)(list(token_ids)), stops) is not None
