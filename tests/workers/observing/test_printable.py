"""Text of others on a terminal: it is shown, and does nothing else."""

import unicodedata

from expert_pool.workers.observing.printable import printable, told
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=()) | st.sampled_from("\x1b\x9b\u202e\ud800\r\n\t")))
def test_what_is_shown_commands_no_terminal_and_has_a_form_in_utf_8(text):
    shown = printable(text)
    shown.encode()
    assert not any(unicodedata.category(char) == "Cc" for char in shown if char not in "\n\t")
    assert printable(shown) == shown


def test_ordinary_text_of_every_script_stays_as_it_is():
    text = "tab\tline\nÅngström 日本語 עברית हिन्दी 👩\u200d👩\u200d👧 C:\\path"
    assert printable(text) == text


def test_what_a_library_raised_is_one_line_without_the_frames_of_another_language():
    error = RuntimeError("it is\n  \x1b[31mred\x1b[0m\nException raised from check at file.cpp:5\nframe #0")
    assert told(error) == "RuntimeError: it is \\x1b[31mred\\x1b[0m"
    assert told(MemoryError()) == "MemoryError"
    assert len(told(ValueError("x" * 10_000))) < 500
