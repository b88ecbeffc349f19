"""Prompts that are chat messages: their token ids are those of the model's chat template, and so are the answers."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import pytest
import ray
from click.testing import CliRunner
from expert_pool.cluster import ConfigError, ExpertPool, Limits, PoolConfig, SamplingParams
from expert_pool.cluster.cli.commands import main
from expert_pool.cluster.requests.tokens import tokenize
from transformers import AutoTokenizer

QUESTION = [{"role": "user", "content": "What is a generator?"}]
TALK = [
    {"role": "system", "content": "Be short."},
    *QUESTION,
    {"role": "assistant", "content": 'A "yield".'},
    *QUESTION,
]
RENDERED_QUESTION = "<|endoftext|>user: What is a generator?\nassistant:"
RENDERED_TALK = (
    "<|endoftext|>system: Be short.\nuser: What is a generator?\n"
    'assistant: A "yield".\nuser: What is a generator?\nassistant:'
)


@pytest.fixture(scope="module")
def tokenizer(chat_model):
    return AutoTokenizer.from_pretrained(chat_model, local_files_only=True)


@pytest.fixture(scope="module")
def expected(tokenizer) -> list[tuple[int, ...]]:
    """Token ids of both chats, from their rendered texts."""
    return [
        tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (RENDERED_QUESTION, RENDERED_TALK)
    ]


def test_messages_become_what_their_template_writes_and_no_token_more(tokenizer, expected):
    start = tokenizer.eos_token_id
    assert tokenizer("x")["input_ids"][0] == start, "this tokenizer puts a token before a text by itself"
    mappings = tuple(MappingProxyType(message) for message in TALK)
    question, talk, ids, text = tokenize([QUESTION, mappings, [5, 6], "x"], tokenizer)
    assert [question, talk] == expected
    assert question.count(start) == talk.count(start) == 1
    assert (ids, text) == ((5, 6), tuple(tokenizer("x")["input_ids"]))


def test_a_template_may_stand_in_the_tokenizers_configuration(chat_model, expected, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(chat_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    template = (folder / "chat_template.jinja").read_text("utf-8")
    (folder / "chat_template.jinja").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}), "utf-8")
    assert tokenize([QUESTION, TALK], AutoTokenizer.from_pretrained(folder, local_files_only=True)) == expected


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ messages[0].content + 5 }}", r"cannot render messages=\[.*with the roles user: TypeError: "),
        ("{% for", r"cannot render messages=\[.*: TemplateSyntaxError: "),
        ("{{ messages[7].content.x }}", r"cannot render messages=\[.*: UndefinedError: "),
        ([{"name": "rag", "template": "x"}], r"cannot render messages=\[.*: ValueError: .* no default"),
        ("{% if false %}x{% endif %}", "makes no token of messages="),
        (None, r"prompts\[1\]: the prompt is chat messages, and the model folder carries no chat template"),
    ],
)
def test_a_template_that_cannot_render_is_an_error_of_ours(template, complaint, chat_model):
    given = AutoTokenizer.from_pretrained(chat_model, local_files_only=True)
    given.chat_template = {one["name"]: one["template"] for one in template} if isinstance(template, list) else template
    with pytest.raises(ConfigError, match=complaint):
        tokenize([[5], QUESTION], given)


@pytest.mark.parametrize(
    ("prompts", "complaint"),
    [
        (QUESTION, "not one message: {'role': 'user', .*: give a list of chats"),
        ([[*QUESTION, 5]], r"prompts\[0\]: messages\[1\]=5: set messages\[1\] to a mapping"),
        (
            [[5], [{"role": "user", "content": 5}]],
            r"prompts\[1\]: messages\[0\].content=5: set messages\[0\].content to ",
        ),
        (
            [[{"role": "user", "content": "x", "name": "y"}]],
            r"prompts\[0\]: messages\[0\]=.*: unknown key name: remove",
        ),
        ([[{"role": "user"}]], r"prompts\[0\]: messages\[0\].content is missing: set it"),
        (
            [[{"role": "wizard", "content": "x"}]],
            r"prompts\[0\]: .* roles wizard: TemplateError: Unexpected role wizard; ",
        ),
        ([[{"role": "user", "content": "\ud800"}]], r"prompts\[0\]: a message's content is no valid text"),
        ([[5, *QUESTION]], "a prompt is a text, a sequence of integer token ids or a list of chat messages, not "),
    ],
)
def test_what_are_no_messages_is_refused(prompts, complaint, tokenizer):
    with pytest.raises(ConfigError, match=complaint):
        tokenize(prompts, tokenizer)


def test_messages_without_a_tokenizer_are_refused():
    with pytest.raises(ConfigError, match=r"prompts\[0\]: .* carries no tokenizer: give token ids"):
        tokenize([QUESTION], None)


@pytest.fixture(scope="module")
def pool(chat_model) -> Iterator[ExpertPool]:
    """Two ranks with a batch each, under the name `chat`."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    config = PoolConfig(model=chat_model, ranks=2, limits=Limits(disable_cuda_graph=True))
    with ExpertPool.launch(config, name="chat") as launched:
        yield launched
    ray.shutdown()


def test_a_program_gets_the_answers_that_transformers_gives_to_the_rendered_chats(pool, expected, references):
    prompts = [QUESTION, [5, 17, 42], TALK]
    completions = {one.index: one for one in pool.generate(prompts, SamplingParams(max_new_tokens=12))}
    for index, prompt in enumerate([expected[0], (5, 17, 42), expected[1]]):
        assert completions[index].prompt_token_ids == prompt
        assert completions[index].token_ids == references["tiny_moe"].greedy(list(prompt), 12)


def test_a_file_of_chats_is_completed_and_its_output_belongs_to_it(
    pool, tokenizer, expected, references, prompts_file, tmp_path
):
    output = tmp_path / "out.jsonl"

    def run(*lines: dict) -> tuple[int, str]:
        arguments = ["--pool", "chat", "--prompts", prompts_file(*lines), "--output", str(output)]
        result = CliRunner().invoke(main, ["generate", *arguments, "--max-new-tokens", "12"])
        return result.exit_code, result.output

    lines = [{"id": "q", "messages": QUESTION}, {"messages": TALK, "max_new_tokens": 5}, {"prompt": "def add("}]
    code, said = run(*lines)
    assert code == 0, said
    written = {line["id"]: line for line in map(json.loads, Path(output).read_text("utf-8").splitlines())}
    prompts = {"q": (expected[0], 12), "2": (expected[1], 5), "3": (tokenizer("def add(")["input_ids"], 12)}
    assert written.keys() == prompts.keys()
    for own_id, (prompt, max_new_tokens) in prompts.items():
        assert written[own_id]["num_prompt_tokens"] == len(prompt)
        assert tuple(written[own_id]["token_ids"]) == references["tiny_moe"].greedy(list(prompt), max_new_tokens)

    assert run(*lines) == (0, f"3 of 3 requests are in {output} already\n")
    code, said = run({"id": "q", "messages": TALK})
    assert code == 2
    assert f"holds id 'q' with a prompt of {len(expected[0])} tokens, and that of " in said
