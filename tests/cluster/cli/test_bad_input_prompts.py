"""Files of prompts: what is read from a good one, and what is said of a bad one."""

import json
import shutil
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner
from expert_pool.cluster import ConfigError, SamplingParams
from expert_pool.cluster.cli.options import sampling_options, take_sampling
from expert_pool.cluster.cli.output import open_output
from expert_pool.cluster.cli.output_line import OutputLine
from expert_pool.cluster.cli.prompts import PromptEntry, read_prompts
from expert_pool.cluster.requests.tokens import Chat, Message

DEFAULTS = SamplingParams(max_new_tokens=7, temperature=0.5)
USER = {"role": "user", "content": "x"}


def test_a_line_gives_a_prompt_an_id_and_what_differs_from_the_defaults(prompts_file):
    path = prompts_file(
        {"prompt": "one"},
        "",
        {"id": "b", "prompt_token_ids": [1, 2], "temperature": 0, "max_new_tokens": 3, "ignore_eos": True},
        {"id": 17, "prompt": "three", "stop": "end", "top_k": 4, "top_p": 0.5, "seed": 9},
        {"prompt": "four", "stop": ["a", "b"], "skip_special_tokens": False},
        {"messages": [USER, {"role": "assistant", "content": ""}], "prompt": None},
    )
    expected = [
        ("1", 1, "one", {}),
        ("b", 3, (1, 2), {"max_new_tokens": 3, "temperature": 0.0, "ignore_eos": True}),
        ("17", 4, "three", {"top_k": 4, "top_p": 0.5, "seed": 9, "stop": ("end",)}),
        ("5", 5, "four", {"stop": ("a", "b"), "skip_special_tokens": False}),
        ("6", 6, Chat((Message("user", "x"), Message("assistant", ""))), {}),
    ]
    entries = read_prompts(path, DEFAULTS)
    for defaults in (DEFAULTS, SamplingParams(top_k=3, stop="other", max_new_tokens=9)):
        assert [entry.over(defaults) for entry in entries] == [
            PromptEntry(name, number, prompt, msgspec.structs.replace(defaults, **given), given)
            for name, number, prompt, given in expected
        ]
    assert entries == [entry.over(DEFAULTS) for entry in entries]


def test_any_text_that_json_allows_is_read_as_it_is(prompts_file, tmp_path):
    text = "line\nseparator\u2028next\x85line\x0c é 日本 🎉"
    path = prompts_file(json.dumps({"prompt": text}, ensure_ascii=False) + "\r")
    assert [entry.prompt for entry in read_prompts(path, DEFAULTS)] == [text]

    marked = tmp_path / "marked.jsonl"
    marked.write_bytes(b'\xef\xbb\xbf{"prompt": "after a byte order mark"}')
    assert [entry.prompt for entry in read_prompts(str(marked), DEFAULTS)] == ["after a byte order mark"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "x"', "line 2: not JSON: "),
        ("hello", "line 2: not JSON: "),
        ('["x"]', "line 2: a list, not a JSON object"),
        ("{}", "line 2: give one of prompt, prompt_token_ids, messages; the line has none"),
        (
            {"prompt": "x", "prompt_token_ids": [1]},
            "line 2: give one of prompt, prompt_token_ids, messages; the line has prompt and prompt_token_ids",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "prompt": "x"},
            "line 2: give one of prompt, prompt_token_ids, messages; the line has prompt and messages",
        ),
        ('{"prompt": "x", "prompt": "y"}', "line 2: the key 'prompt' is there twice"),
        ({"prompt": ""}, "line 2: the prompt is empty"),
        ({"prompt_token_ids": []}, "line 2: the prompt is empty"),
        ({"messages": []}, "line 2: the prompt is empty: messages=[]"),
        ({"prompt": 5}, "line 2: prompt=5: set prompt to a text or nothing"),
        ({"prompt_token_ids": [1, "x"]}, "line 2: prompt_token_ids[1]='x': set prompt_token_ids[1] to an integer"),
        ({"prompt_token_ids": [1, 999_999]}, "line 2: token id 999999 is outside the model's vocabulary of "),
        (
            {"prompt": "x"},
            "line 2: the prompt is text, and the model folder carries no tokenizer: give token ids alone",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}]},
            "line 2: the prompt is chat messages, and the model folder carries no tokenizer: give token ids alone",
        ),
        (
            {"prompt_token_ids": [1], "stop": "x"},
            "line 2: stop=('x',) is text, and the model folder carries no tokenizer",
        ),
        ({"prompt": "x", "max_tokens": 5}, "line 2: unknown key max_tokens: did you mean max_new_tokens?"),
        ({"prompt": "x", "Temperatur": 5}, "line 2: unknown key Temperatur: did you mean temperature?"),
        ({"prompt": "x", "zzz": 5}, "line 2: unknown key zzz: known: id, prompt, prompt_token_ids, messages, "),
        ({"prompt": "x", "temperature": -1}, "line 2: temperature=-1.0: set temperature to 0 (greedy) or more"),
        (
            {"prompt": "x", "max_new_tokens": 0},
            "line 2: max_new_tokens=0: set max_new_tokens to between 1 and 2**31 - 1",
        ),
        ({"prompt": "x", "id": "first"}, "line 2: id 'first' is that of line 1"),
        ('{"prompt": "a\\ud800"}', "line 2: the line is no valid text: 'utf-8' codec can't encode character"),
        ('{"prompt": "b", "id": "a\\ud800"}', "line 2: the line is no valid text"),
        ({"prompt_token_ids": [10**20]}, "line 2: "),
        ("[" * 100_000, "line 2: not JSON: "),
        ({"prompt": "x", "id": True}, "line 2: id=True: set id to an integer or a text or nothing"),
    ],
)
def test_a_bad_line_is_refused_by_its_number(line, complaint, refused, prompts_file, random_models, tmp_path):
    path = prompts_file({"id": "first", "prompt_token_ids": [1]}, line, {"prompt_token_ids": [2]})
    said = refused("generate", "--model", random_models["qwen3_moe"], "--prompts", path, "--output", tmp_path / "o")
    assert f"--prompts {path}, {complaint}" in said
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ("x", "messages='x': set messages to a list or nothing"),
        (
            {"role": "user", "content": "x"},
            "messages={'role': 'user', 'content': 'x'}: set messages to a list or nothing",
        ),
        (["x"], "messages[0]='x': set messages[0] to a mapping"),
        ([USER, {"role": "user", "content": 5}], "messages[1].content=5: set messages[1].content to a text"),
        ([{"role": "user", "content": None}], "messages[0].content=None: set messages[0].content to a text"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
            "messages[0].content=[{'type': 'text', 'text': 'x'}]: set messages[0].content to a text",
        ),
        ([{"role": 1, "content": "x"}], "messages[0].role=1: set messages[0].role to a text"),
        ([{"content": "x"}], "messages[0].role is missing: set it"),
        ([USER, {"role": "user"}], "messages[1].content is missing: set it"),
        ([{**USER, "nome": "y"}], "'nome': 'y'}: unknown key nome: remove it"),
        (
            [USER, {"role": "wizard", "content": "y"}],
            "with the roles user, wizard: TemplateError: Unexpected role wizard; give messages that it takes, or a "
            "text or token ids",
        ),
        ([{"role": "user", "content": "a\ud800"}], "a message's content is no valid text: 'utf-8' codec can't encode"),
        ([{"role": "user", "content": "x " * 2000}], "the model's context of 1024 holds a prompt of at most 1023"),
    ],
)
def test_bad_messages_are_refused_by_their_line(messages, complaint, refused, prompts_file, chat_model, tmp_path):
    path = prompts_file({"messages": [USER]}, {"id": "bad", "messages": messages})
    said = refused("generate", "--model", chat_model, "--prompts", path, "--output", tmp_path / "o")
    assert f"--prompts {path}, line 2: " in said
    assert complaint in said
    assert not (tmp_path / "o").exists()


def test_messages_for_a_model_without_a_chat_template_are_refused(refused, prompts_file, tiny_moe, tmp_path):
    path = prompts_file({"prompt": "x"}, {"messages": [USER]})
    said = refused("generate", "--model", tiny_moe, "--prompts", path, "--output", tmp_path / "o")
    assert (
        f"--prompts {path}, line 2: the prompt is chat messages, and the model folder carries no chat template "
        "(chat_template.jinja, or chat_template in tokenizer_config.json): add the model's own, or give a text"
    ) in said
    assert not (tmp_path / "o").exists()


def test_what_a_template_or_a_prompt_says_does_not_command_the_terminal(refused, prompts_file, chat_model, tmp_path):
    folder = Path(shutil.copytree(chat_model, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(
        "{{ raise_exception('\x1b]0;mine\x07\x9b31m\u202e' + messages[0].role) }}"
    )
    path = prompts_file({"messages": [{"role": "\x1b[2J", "content": "x"}]})
    said = refused("generate", "--model", folder, "--prompts", path, "--output", tmp_path / "o")
    assert "TemplateError: \\x1b]0;mine\\x07\\x9b31m\\u202e\\x1b[2J; " in said
    assert not any(char in said for char in "\x1b\x07\x9b\u202e")

    path = prompts_file({"id": "\x1b[31m", "prompt": "x"}, {"id": "\x1b[31m", "prompt": "y"})
    said = refused("generate", "--model", folder, "--prompts", path, "--output", tmp_path / "o")
    assert "line 2: id '\\x1b[31m' is that of line 1" in said


@pytest.mark.parametrize(
    "url", ["zip://nowhere.zip", "reference://x", "no-such-store://x", "no_such_store://x", "out\0.jsonl"]
)
def test_an_output_that_no_store_opens_is_refused(url, refused, prompts_file, random_models):
    path = prompts_file({"prompt_token_ids": [5]})
    said = refused("generate", "--model", random_models["qwen3_moe"], "--prompts", path, "--output", url)
    assert said.startswith("refused: --output ")
    assert len(said.splitlines()) == 1


def test_an_id_may_not_be_the_number_that_another_line_goes_by(prompts_file):
    with pytest.raises(ConfigError, match="line 2: id '1' is that of line 1"):
        read_prompts(prompts_file({"prompt": "x"}, {"id": 1, "prompt": "y"}), DEFAULTS)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "holds no prompts"),
        (b"\n  \n", "holds no prompts"),
        (b'{"prompt": "\xff"}', "not UTF-8 text"),
        (None, "No such file or directory"),
    ],
)
def test_a_file_without_prompts_is_refused(content, complaint, refused, random_models, tmp_path):
    path = tmp_path / "prompts.jsonl"
    if content is not None:
        path.write_bytes(content)
    said = refused("generate", "--model", random_models["qwen3_moe"], "--prompts", path, "--output", tmp_path / "o")
    assert f"--prompts {path}: {complaint}" in said


def test_a_folder_of_prompts_is_refused(refused, random_models, tmp_path):
    said = refused("generate", "--model", random_models["qwen3_moe"], "--prompts", tmp_path, "--output", tmp_path / "o")
    assert f"--prompts {tmp_path}: Is a directory" in said


def test_a_prompt_longer_than_the_context_is_refused(refused, prompts_file, random_models, tmp_path):
    path = prompts_file({"prompt_token_ids": [5] * 511}, {"prompt_token_ids": [5] * 512})
    said = refused("generate", "--model", random_models["qwen3_moe"], "--prompts", path, "--output", tmp_path / "o")
    assert "line 2: 512 tokens; the model's context of 512 holds a prompt of at most 511" in said


def test_a_text_prompt_longer_than_the_context_is_refused(refused, prompts_file, tiny_moe, tmp_path):
    path = prompts_file({"prompt": "a statement " * 2000})
    said = refused("generate", "--model", tiny_moe, "--prompts", path, "--output", tmp_path / "o")
    assert "line 1: " in said
    assert "the model's context of 1024 holds a prompt of at most 1023" in said


SETTINGS = {
    "max_new_tokens": (3, "--max-new-tokens=3"),
    "temperature": (0.5, "--temperature=0.5"),
    "top_p": (0.25, "--top-p=0.25"),
    "top_k": (4, "--top-k=4"),
    "seed": (9, "--seed=9"),
    "stop": (("end",), None),
    "ignore_eos": (True, "--ignore-eos"),
    "skip_special_tokens": (False, "--keep-special-tokens"),
}


def test_every_sampling_setting_can_be_given_in_a_line_and_all_but_texts_as_an_option(prompts_file):
    @click.command()
    @sampling_options
    def taken(**options):
        click.echo(repr(take_sampling(options)) + repr(options))

    assert SETTINGS.keys() == {*SamplingParams.__struct_fields__}
    everything = {name: value for name, (value, _) in SETTINGS.items()}
    [entry] = read_prompts(prompts_file({"prompt_token_ids": [5], **everything}), SamplingParams())
    assert (entry.sampling, entry.given) == (SamplingParams(**everything), everything)
    options = {name: option for name, (_, option) in SETTINGS.items() if option is not None}
    given = {name: everything[name] for name in options}
    assert CliRunner().invoke(taken, list(options.values())).output == f"{given!r}{{}}\n"
    assert CliRunner().invoke(taken, []).output == "{}{}\n"


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("--max-new-tokens", "0", "max_new_tokens=0: set max_new_tokens to between 1 and 2**31 - 1"),
        ("--temperature", "-2", "temperature=-2.0: set temperature to 0 (greedy) or more"),
        ("--top-p", "0", "top_p=0.0: set top_p to above 0 and at most 1"),
        ("--top-k", "-3", "top_k=-3: set top_k to 0 (all tokens) or more"),
        ("--seed", "-1", "seed=-1: set seed to between 0"),
    ],
)
def test_a_sampling_option_out_of_bounds_is_refused(
    option, value, complaint, refused, prompts_file, random_models, tmp_path
):
    path = prompts_file({"prompt_token_ids": [5]})
    said = refused(
        "generate", "--model", random_models["qwen3_moe"], "--prompts", path, "--output", tmp_path / "o", option, value
    )
    assert complaint in said


@pytest.mark.parametrize("to", ["{}/out.jsonl", "file://{}/out.jsonl", "memory://{}/out"])
def test_an_output_of_other_prompts_is_refused_and_kept(to, refused, prompts_file, random_models, tmp_path):
    """Ids that are line numbers are those of every file of prompts, whose requests would pass for finished."""
    output = to.format(tmp_path)
    with open_output(output) as writer:
        writer.write(OutputLine("1", (7,), None, "length", num_prompt_tokens=3, num_completion_tokens=1))
        writer.write(OutputLine("2", (7,), None, "length", num_prompt_tokens=2, num_completion_tokens=1))
    path = prompts_file({"prompt_token_ids": [5] * 3}, {"prompt_token_ids": [5] * 4})
    said = refused("generate", "--model", random_models["qwen3_moe"], "--prompts", path, "--output", output)
    assert f"--output {output}: holds id '2' with a prompt of 2 tokens, and that of --prompts {path}, line 2" in said
    with open_output(output) as writer:
        assert writer.finished == {"1": 3, "2": 2}


def test_the_seed_of_a_run_gives_every_line_one_of_its_own(prompts_file):
    path = prompts_file({"prompt": "x"}, {"prompt": "x"}, {"prompt": "x", "seed": 7}, {"id": "1st", "prompt": "x"})
    seeds = [entry.sampling.seed for entry in read_prompts(path, SamplingParams(seed=7))]
    assert len(set(seeds)) == 4
    assert seeds[2] == 7
    assert all(0 <= seed < 2**64 for seed in seeds)
    # By id, not by place: the same lines in another order get the same.
    path = prompts_file({"id": "1st", "prompt": "x"}, {"id": "2", "prompt": "x"})
    assert [entry.sampling.seed for entry in read_prompts(path, SamplingParams(seed=7))] == [seeds[3], seeds[1]]
    assert seeds != [entry.sampling.seed for entry in read_prompts(path, SamplingParams(seed=8))]
