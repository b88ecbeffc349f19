"""A stop text is found at the token that completes it, and long completions cost a token no more than short ones."""

import random

import pytest
from expert_pool.workers.request import Generated, Request, SamplingParams
from expert_pool.workers.scheduling.sequence import TokenSequence
from expert_pool.workers.scheduling.stop_texts import TextOf, stop_position, stops_here
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LETTERS = "abcdé你🙂\n ."


def pieces_of_text() -> list[str]:
    chosen = random.Random(7)
    return ["".join(chosen.choice(LETTERS) for _ in range(chosen.randint(1, 4))) for _ in range(120)]


def byte_level() -> TextOf:
    """Tokens are any bytes: whole words, single bytes, characters cut in two."""
    to_symbol = dict(zip(range(256), sorted(pre_tokenizers.ByteLevel.alphabet()), strict=True))
    symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = {symbols.pre_tokenize_str(text)[0][0] for text in pieces_of_text()}
    cut = {word[:-1] for word in words} | {word[1:] for word in words}
    vocab = sorted((words | cut | set(to_symbol.values())) - {""})
    return decoding(Tokenizer(models.BPE({word: n for n, word in enumerate(vocab)}, [])), decoders.ByteLevel())


def byte_fallback() -> TextOf:
    """As Llama's: a run of byte tokens is one text, or all of it is not; the first space is dropped."""
    words = {text.replace(" ", "▁") for text in pieces_of_text()}
    vocab = [f"<0x{byte:02X}>" for byte in range(256)] + sorted(words)
    decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return decoding(Tokenizer(models.BPE({word: n for n, word in enumerate(vocab)}, [])), decoder)


def decoding(tokenizer: Tokenizer, decoder: object) -> TextOf:
    tokenizer.decoder = decoder
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    return lambda token_ids: fast.decode(token_ids, skip_special_tokens=True)


DECODERS = {"byte level": byte_level(), "byte fallback": byte_fallback()}


def tokens_of_text(name: str, chosen: random.Random, length: int) -> list[int]:
    """Words, whole characters as single bytes, and now and then bytes of none."""
    tokens: list[int] = []
    first_word = 256 if name == "byte fallback" else 0
    last = 256 + 80 if name == "byte fallback" else 300
    while len(tokens) < length:
        kind = chosen.random()
        if kind < 0.5 or name == "byte level":
            tokens.append(chosen.randrange(first_word, last))
        elif kind < 0.95:
            tokens += list(chosen.choice(LETTERS * 3).encode())
        else:
            tokens.append(chosen.randrange(256))
    return tokens[:length]


def first_stop(decode: TextOf, tokens: list[int], stops: tuple[str, ...]) -> int | None:
    """By decoding everything for every token."""
    return next((n for n in range(1, len(tokens) + 1) if stop_position(decode(tokens[:n]), stops) is not None), None)


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 150), size=st.integers(1, 30))
def test_it_is_found_where_decoding_everything_finds_it(name, seed, length, size):
    decode, chosen = DECODERS[name], random.Random(seed)
    tokens = tokens_of_text(name, chosen, length)
    text = decode(tokens)
    place = chosen.randrange(max(1, len(text)))
    stops = (text[place : place + size] or "a", "no such text in it")
    expected = first_stop(decode, tokens, stops)
    found = next((n for n in range(1, length + 1) if stops_here(decode, tokens[:n], stops)), None)
    assert found == expected, (stops, text)


def test_the_texts_of_these_tests_hold_what_makes_it_hard():
    for name, decode in DECODERS.items():
        texts = [decode(tokens_of_text(name, random.Random(seed), 100)) for seed in range(50)]
        assert any("你" in text and "🙂" in text for text in texts), name
        assert any("\ufffd" in text for text in texts), name


def test_a_tail_that_begins_inside_a_character_is_not_trusted():
    """The bytes of twelve characters are one run, and decode to nothing whole from its middle on."""
    tokens = [*("你" * 11 + "好").encode()]
    assert set(DECODERS["byte fallback"](tokens[-16:])) == {"\ufffd"}
    assert stops_here(DECODERS["byte fallback"], tokens, ("你好",))


def test_a_request_ends_with_the_token_that_completes_a_stop_text():
    tokens = [*b"some text ", *"🙂".encode(), *b" STOP and on"]
    sampling = SamplingParams(stop=("🙂 STOP",), max_new_tokens=100)
    sequence = TokenSequence(
        Request(0, (1, 2), sampling), 1000, lambda token_ids, skip: DECODERS["byte fallback"](token_ids)
    )
    for token in tokens:
        sequence.launch(1, 0)
        if reason := sequence.append(Generated((token,)), frozenset()):
            break
    assert reason == "stop"
    assert len(sequence.token_ids) == 2 + len(b"some text ") + len("🙂".encode()) + len(b" STOP")
    assert sequence.completion(reason).text == "some text "


def test_a_token_costs_no_more_in_a_long_completion():
    decoded = []

    def decode(token_ids: list[int]) -> str:
        decoded.append(len(token_ids))
        return DECODERS["byte level"](token_ids)

    chosen = random.Random(3)
    words = [token for token in range(300) if "\ufffd" not in DECODERS["byte level"]([token])]
    tokens = [chosen.choice(words) for _ in range(2000)]
    for length in range(1, len(tokens)):
        assert not stops_here(decode, tokens[:length], ("no such text", "nor this"))
    assert sum(decoded) < 64 * len(tokens), "decoding everything takes 1000 tokens a token"
