"""Text that others wrote, as it may be shown: nothing in it commands a terminal or changes what stands beside it."""

import re

# Control characters but for tabs and line feeds; marks that turn the direction of text; line separators, which are no
# line feeds; halves of surrogate pairs, which no terminal can be sent.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)
_LONGEST_ERROR = 400


def printable(text: str) -> str:
    """The text with what would not be shown, or would change how the rest is shown, written as its escape.

    Names of files, errors of chat templates and ids of prompts come from others. Letters of every script, emoji, tabs
    and line feeds stay.
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str, longest: int) -> str:
    """The text as it may stand inside a line, cut where it is longer."""
    line = printable(text).replace("\n", "\\n")
    return f"{line[:longest]}..." if len(line) > longest else line


def told(error: BaseException) -> str:
    """What a library raised, in one printable line: its type, and its message without the frames of C++ that PyTorch
    appends."""
    message = str(error).partition("\nException raised from ")[0]
    line = " ".join(printable(message).split())
    if len(line) > _LONGEST_ERROR:
        line = f"{line[:_LONGEST_ERROR]}..."
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
