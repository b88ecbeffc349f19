"""The text of a completion is what it adds to its prompt's, and stop texts end it where Transformers would."""

import random

import pytest
import torch
from expert_pool.workers.request import Completion, Generated, Request, SamplingParams
from expert_pool.workers.scheduling.sequence import TokenSequence
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation import StopStringCriteria

WORDS = [" The", " pool", " call", "s", "ed", " é", "你", "\n", ".", " ", "  ", "a", "b", "c", "d", "e", "f"]
SPECIAL = ["<s>", "</s>", "<|end|>"]
SMILE = "🙂"


def llama_like() -> PreTrainedTokenizerFast:
    """The decoder drops the space that a text begins with."""
    pieces = sorted({word.replace(" ", "▁") for word in WORDS} | {"▁"})
    vocab = [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(vocab)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return with_special_tokens(tokenizer)


def byte_level() -> PreTrainedTokenizerFast:
    symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = {symbols.pre_tokenize_str(word)[0][0] for word in WORDS}
    vocab = sorted({*pieces, *pre_tokenizers.ByteLevel.alphabet()})
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(vocab)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = symbols, decoders.ByteLevel()
    return with_special_tokens(tokenizer)


def with_special_tokens(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {"byte level": byte_level(), "llama": llama_like()}


def token(name: str, text: str) -> int:
    """The one token that this text is in the middle of another."""
    mark = {"byte level": "Ġ", "llama": "▁"}[name]
    if name == "byte level" and text not in SPECIAL:
        return TOKENIZERS[name].convert_tokens_to_ids(
            pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)[0][0]
        )
    return TOKENIZERS[name].convert_tokens_to_ids(text.replace(" ", mark))


def bytes_of(name: str, text: str) -> list[int]:
    if name == "llama":
        return list(text.encode())
    symbols = pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text)[0][0]
    return TOKENIZERS[name].convert_tokens_to_ids(list(symbols))


def tokens(name: str, *texts: str) -> list[int]:
    return [token(name, text) for text in texts]


def completed(
    name: str, prompt: list[int], generated: list[int], resumed: int = 0, **sampling: object
) -> tuple[int, Completion]:
    """How many of these tokens a request takes, and what becomes of it."""

    def decode(token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return TOKENIZERS[name].decode(token_ids, skip_special_tokens=skip_special_tokens)

    limits = SamplingParams(max_new_tokens=len(generated), **sampling)
    request = Request(0, tuple(prompt), limits, Generated(tuple(generated[:resumed])))
    sequence = TokenSequence(request, 10_000, decode)
    for count, token_id in enumerate(generated[resumed:], start=resumed + 1):
        sequence.launch(1, 0)
        if reason := sequence.append(Generated((token_id,)), frozenset()):
            return count, sequence.completion(reason)
    raise AssertionError("max_new_tokens ends it")


def some_tokens(name: str, chosen: random.Random, length: int, special: bool = True) -> list[int]:
    """Words, special tokens and characters in single bytes."""
    found: list[int] = []
    while len(found) < length:
        kind = chosen.random()
        if kind < 0.75:
            found.append(token(name, chosen.choice(WORDS)))
        elif kind < 0.9 or not special:
            found += bytes_of(name, chosen.choice(["é", "你", SMILE]))
        else:
            found.append(token(name, chosen.choice(SPECIAL)))
    return found


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("resumed", [0, 1])
def test_the_space_before_the_first_word_is_kept(name, resumed):
    prompt, generated = tokens(name, " The", " pool"), tokens(name, " call", "s")
    assert completed(name, prompt, generated, resumed)[1].text == " calls"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_stop_text_that_begins_with_the_first_space_is_found(name):
    prompt, generated = tokens(name, " The", " pool"), tokens(name, " call", "s", "ed")
    count, completion = completed(name, prompt, generated, stop=" call")
    assert (count, completion.finish_reason, completion.text) == (1, "stop", "")


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("num_special", [1, 40])
def test_the_space_is_kept_behind_a_prompt_that_ends_in_special_tokens(name, num_special):
    prompt = tokens(name, " The", *["<|end|>"] * num_special)
    assert completed(name, prompt, tokens(name, " call"))[1].text == " call"


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_the_prompt_began_is_in_the_text(name, cut):
    smile = bytes_of(name, SMILE)
    prompt, generated = [*tokens(name, " The", "你"), *smile[:cut]], [*smile[cut:], *tokens(name, " call")]
    assert completed(name, prompt, generated)[1].text == f"{SMILE} call"
    count, completion = completed(name, prompt, generated, stop=SMILE)
    assert (count, completion.text) == (4 - cut, "")


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), num_prompt=st.integers(1, 60), num_generated=st.integers(1, 40))
def test_prompt_and_completion_decode_to_both_texts(name, skip, seed, num_prompt, num_generated):
    chosen = random.Random(seed)
    prompt, generated = some_tokens(name, chosen, num_prompt), some_tokens(name, chosen, num_generated)
    before = TOKENIZERS[name].decode(prompt, skip_special_tokens=skip)
    both = TOKENIZERS[name].decode([*prompt, *generated], skip_special_tokens=skip)
    assert before + completed(name, prompt, generated, skip_special_tokens=skip)[1].text == both


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 60), size=st.integers(1, 20))
def test_a_request_ends_where_generate_would_end_it(name, seed, length, size):
    chosen, prompt = random.Random(seed), tokens(name, "a", " The", " pool")
    generated = some_tokens(name, chosen, length)
    text = TOKENIZERS[name].decode([*prompt, *generated])[len("a The pool") :]
    place = chosen.randrange(max(1, len(text)))
    stops = (text[place : place + size], "no such text in it")
    criteria = StopStringCriteria(TOKENIZERS[name], list(stops))
    ends = [n for n in range(1, len(generated) + 1) if criteria(torch.tensor([generated[:n]]), None).item()]
    count, completion = completed(name, prompt, generated, stop=stops)
    assert (count, completion.finish_reason) == ((ends[0], "stop") if ends else (len(generated), "length")), (
        text,
        stops,
    )
    _, marked = completed(name, prompt, generated, stop=stops, skip_special_tokens=False)
    position = text.find(stops[0])
    assert marked.text == text[: position if ends else len(marked.text)]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    ("stop", "count", "text", "marked"),
    [
        ("<|end|>", 3, " call", " call</s>"),
        ("l</s><|", 3, " cal", " cal"),
        ("end|>s", 4, " call", " call</s><|"),
        ("s" + SMILE, 8, " call", " call</s><|end|>"),
    ],
)
def test_a_stop_text_may_hold_special_tokens(name, stop, count, text, marked):
    generated = [*tokens(name, " call", "</s>", "<|end|>", "s"), *bytes_of(name, SMILE), *tokens(name, " call")]
    prompt = tokens(name, " The", " pool")
    taken, completion = completed(name, prompt, generated, stop=stop)
    assert (taken, completion.finish_reason, completion.text) == (count, "stop", text)
    assert completed(name, prompt, generated, stop=stop, skip_special_tokens=False)[1].text == marked


@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_tokens_are_in_the_text_on_request(name):
    prompt, generated = tokens(name, " The", " pool"), tokens(name, " call", "</s>", "s")
    assert completed(name, prompt, generated)[1].text == " calls"
    assert completed(name, prompt, generated, skip_special_tokens=False)[1].text == " call</s>s"


def test_a_prompt_costs_a_token_no_more_when_it_is_long():
    decoded = []

    def decode(token_ids: list[int], skip_special_tokens: bool) -> str:
        decoded.append(len(token_ids))
        return TOKENIZERS["llama"].decode(token_ids, skip_special_tokens=skip_special_tokens)

    prompt = some_tokens("llama", random.Random(1), 5000, special=False)
    generated = some_tokens("llama", random.Random(2), 200, special=False)
    sequence = TokenSequence(Request(0, tuple(prompt), SamplingParams(max_new_tokens=500, stop="no")), 10_000, decode)
    for token_id in generated:
        sequence.launch(1, 0)
        assert sequence.append(Generated((token_id,)), frozenset()) is None
    assert sum(decoded) < 150 * len(generated)
