"""The output file: continued where it stopped, never repeated, never mixed up with something else."""

import resource
import signal

import msgspec
import pytest
from expert_pool.cluster import ConfigError, ExpertPoolError
from expert_pool.cluster.output import CompletionWriter
from expert_pool.cluster.output_line import OutputLine


def line(key: str, num_tokens: int = 2) -> OutputLine:
    return OutputLine(key, tuple(range(num_tokens)), "a\u2028b\n", "length", 4, num_tokens)


def ids(path) -> list[str]:
    return [msgspec.json.decode(one, type=OutputLine).id for one in path.read_bytes().split(b"\n") if one]


def test_what_is_written_is_known_to_the_next_writer(tmp_path):
    path = tmp_path / "new" / "folders" / "out.jsonl"
    with CompletionWriter(str(path)) as writer:
        assert writer.finished_ids == set()
        writer.write(line("a"))
        assert ids(path) == ["a"], "a line is in the file as soon as it is written"
        writer.write(line("b"))
    with CompletionWriter(str(path)) as writer:
        assert writer.finished_ids == {"a", "b"}
        writer.write(line("c"))
    assert ids(path) == ["a", "b", "c"]


@pytest.mark.parametrize("kept", [1, 10, -1])
def test_a_last_line_cut_short_is_dropped(kept, tmp_path):
    path = tmp_path / "out.jsonl"
    with CompletionWriter(str(path)) as writer:
        writer.write(line("a"))
        whole = path.read_bytes()
        writer.write(line("b"))
    path.write_bytes(whole + path.read_bytes()[len(whole) :][:kept])
    with CompletionWriter(str(path)) as writer:
        assert writer.finished_ids == {"a"}
        writer.write(line("b"))
    assert ids(path) == ["a", "b"]


@pytest.mark.parametrize("content", ['{"prompt": "x"}\n', "hello\n", '{"id": 5}\n', "\n"])
def test_a_file_of_something_else_is_refused_and_left_as_it_is(content, tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text(content + "no line end")
    with pytest.raises(ConfigError, match="line 1: not a completion of this tool"):
        CompletionWriter(str(path))
    assert path.read_text() == content + "no line end"


def test_two_writers_do_not_share_a_file(tmp_path):
    path = str(tmp_path / "out.jsonl")
    with CompletionWriter(path), pytest.raises(ConfigError, match="another run is writing it"):
        CompletionWriter(path)
    CompletionWriter(path).close()


def test_a_folder_is_refused(refused, prompts_file, random_models, tmp_path):
    said = refused(
        "generate",
        *("--model", random_models["qwen3_moe"], "--prompts", prompts_file({"prompt_token_ids": [5]})),
        *("--output", tmp_path),
    )
    assert f"--output {tmp_path}: is not a regular file" in said


def test_a_path_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"out.jsonl: cannot be written: .*file"):
        CompletionWriter(str(tmp_path / "file" / "out.jsonl"))


def test_a_device_is_refused():
    with pytest.raises(ConfigError, match="/dev/full: is not a regular file"):
        CompletionWriter("/dev/full")


def test_a_disk_that_fills_up_keeps_what_was_written(tmp_path):
    """A limit on file sizes stands in for the disk: the system answers in the same place, with another reason."""
    path = tmp_path / "out.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with CompletionWriter(str(path)) as writer:
            writer.write(line("a"))
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
            with pytest.raises(ExpertPoolError, match=r"any further: .*; it holds 1 finished request"):
                writer.write(line("b"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    with CompletionWriter(str(path)) as writer:
        assert writer.finished_ids == {"a"}


@pytest.mark.parametrize(
    "foreign",
    [
        b"my precious notes",
        b'{"compact":"json","without":"an end"}',
        b'{"id":"p00","prompt":"a prompts file of one line"}',
        b'{"id": "p00"',
    ],
)
def test_a_foreign_file_whose_only_line_has_no_end_is_refused_and_kept(foreign, tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(foreign)
    with pytest.raises(ConfigError, match="line 1: not a completion of this tool"):
        CompletionWriter(str(path))
    assert path.read_bytes() == foreign


def test_our_own_line_cut_anywhere_is_dropped(tmp_path):
    path = tmp_path / "out.jsonl"
    with CompletionWriter(str(path)) as writer:
        writer.write(line('an "id" with \\ in it'))
    whole = path.read_bytes()
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        with CompletionWriter(str(path)) as writer:
            assert writer.finished_ids == set(), length
        assert path.read_bytes() == b""
