"""The training text: the documentation topics that every Python installation carries."""

import re
from dataclasses import dataclass
from pydoc_data.topics import topics

WRAP_WIDTH = 70
SHARED_PARAGRAPH_LENGTH = 60
HELD_OUT_MAXIMUM_LENGTH = 10000
HELD_OUT_STRIDE = 4

LIST_MARKER = re.compile(r"^ *(?:\* |\d+\. )?")
UNDERLINE = re.compile(r"\n(?:\*{3,}|={3,}|-{3,}|~{3,})(?=\n|$)")


@dataclass(frozen=True)
class Corpus:
    """Documents by topic name, split by whole topics."""

    training: dict[str, str]
    held_out: dict[str, str]


def load_corpus() -> Corpus:
    """Read, tidy and split the topics; the result depends only on the Python version."""
    cleaned = {name: clean_topic(topics[name]) for name in sorted(topics)}
    held_out_names = choose_held_out_topics(cleaned)
    training = {name: text for name, text in cleaned.items() if name not in held_out_names}
    held_out = {name: cleaned[name] for name in held_out_names}
    return Corpus(training=remove_repeated_paragraphs(training), held_out=held_out)


def clean_topic(text: str) -> str:
    """Drop the underlines of headings and put each prose paragraph on one line."""
    text = UNDERLINE.sub("", text.replace("\r\n", "\n"))
    # Sphinx writes keyboard quotes as typographic ones, which people do not type into prompts.
    text = text.translate(str.maketrans("‘’“”", "''\"\""))
    paragraphs = [unwrap_lines(paragraph) for paragraph in text.split("\n\n")]
    return "\n\n".join(paragraph for paragraph in paragraphs if paragraph.strip()).strip("\n")


def unwrap_lines(paragraph: str) -> str:
    """Join the lines that Sphinx broke only because the next word would not fit."""
    joined: list[str] = []
    previous = ""
    text_column = 0
    for line in paragraph.split("\n"):
        indentation = len(line) - len(line.lstrip(" "))
        words = line.split()
        is_prose = bool(words) and not words[0].startswith(("|", "+", "#", ">>>"))
        is_full = is_prose and len(previous) + 1 + len(words[0]) > WRAP_WIDTH
        if joined and is_full and indentation == text_column:
            joined[-1] += " " + line.strip()
        else:
            joined.append(line.rstrip())
            text_column = LIST_MARKER.match(line).end()
        previous = line
    return "\n".join(joined)


def long_paragraphs(text: str) -> list[str]:
    """The paragraphs of a document that are long enough to tell documents apart."""
    return [paragraph for paragraph in text.split("\n\n") if len(paragraph) > SHARED_PARAGRAPH_LENGTH]


def choose_held_out_topics(documents: dict[str, str]) -> list[str]:
    """Every few topics of those that share no paragraph with another topic.

    Many topics are extracts of longer ones, so a blind choice would measure memory instead of generalisation.
    """
    owners: dict[str, set[str]] = {}
    for name, text in documents.items():
        for paragraph in long_paragraphs(text):
            owners.setdefault(paragraph.strip(), set()).add(name)
    shared = {name for names in owners.values() if len(names) > 1 for name in names}
    eligible = [name for name, text in documents.items() if name not in shared and len(text) <= HELD_OUT_MAXIMUM_LENGTH]
    return eligible[HELD_OUT_STRIDE // 2 :: HELD_OUT_STRIDE]


def remove_repeated_paragraphs(documents: dict[str, str]) -> dict[str, str]:
    """Keep each long paragraph once, in the shortest topic that has it."""
    seen: set[str] = set()
    unique: dict[str, str] = {}
    for name in sorted(documents, key=lambda name: (len(documents[name]), name)):
        kept = [paragraph for paragraph in documents[name].split("\n\n") if paragraph not in seen]
        seen.update(long_paragraphs(documents[name]))
        unique[name] = "\n\n".join(kept)
    return {name: unique[name] for name in sorted(unique) if unique[name].strip()}
