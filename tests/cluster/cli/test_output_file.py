"""The output, a file or parts in a store: continued where it stopped, never repeated, never mixed up."""

import errno
import os
import resource
import shutil
import signal
import time

import fsspec
import msgspec
import pytest
from expert_pool.cluster import ConfigError, ExpertPoolError, PoolCompletion
from expert_pool.cluster.cli import object_output, output
from expert_pool.cluster.cli.object_output import PartsWriter
from expert_pool.cluster.cli.output import CompletionWriter, open_output
from expert_pool.cluster.cli.output_line import OutputLine
from expert_pool.workers.request import Completion, Generated


def line(key: str, num_tokens: int = 2) -> OutputLine:
    return OutputLine(key, tuple(range(num_tokens)), "a\u2028b\n", "length", 4, num_tokens)


def ids(path) -> list[str]:
    return [msgspec.json.decode(one, type=OutputLine).id for one in path.read_bytes().split(b"\n") if one]


def test_the_line_of_a_completion_says_what_its_caller_sees():
    completion = Completion(17, Generated((5, 6)), "a\u2028b", "length", 3)
    made = OutputLine.of("own", PoolCompletion(0, (1, 2, 3), completion))
    assert msgspec.json.encode(made) == (
        b'{"id":"own","token_ids":[5,6],"text":"a\xe2\x80\xa8b","finish_reason":"length","num_prompt_tokens":3,'
        b'"num_completion_tokens":2}'
    )


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


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_is_taken_away_ends_the_run_that_writes_it(replaced, tmp_path):
    """Its lines would go where nobody finds them, and the run would end as if they were there."""
    path = tmp_path / "out.jsonl"
    with CompletionWriter(str(path)) as writer:
        writer.write(line("a"))
        writer.flush()
        path.rename(tmp_path / "moved.jsonl")
        if replaced:
            path.write_text("")
        with pytest.raises(ExpertPoolError, match="was removed or replaced while this run wrote it, and with it 1 fin"):
            writer.flush()
        with pytest.raises(ExpertPoolError, match="was removed or replaced"):
            writer.write(line("b"))


def cut_to_nothing(path) -> None:
    os.truncate(path, 0)


def cut_within_a_line(path) -> None:
    os.truncate(path, path.stat().st_size - 5)


def filled_with_zeros(path) -> None:
    os.truncate(path, path.stat().st_size + 5)


def written_by_another(path) -> None:
    with open(path, "ab") as file:
        file.write(msgspec.json.encode(line("another's")) + b"\n")


def removed(path) -> None:
    path.unlink()


def rotated_by_copying(path) -> None:
    shutil.copy(path, path.with_suffix(".1"))
    os.truncate(path, 0)


CHANGES = [cut_to_nothing, cut_within_a_line, filled_with_zeros, written_by_another, removed, rotated_by_copying]


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_somebody_changes_ends_the_run_before_another_line_is_lost(change, tmp_path):
    path = tmp_path / "out.jsonl"
    with CompletionWriter(str(path)) as writer:
        for key in "abc":
            writer.write(line(key))
        change(path)
        after = path.read_bytes() if path.exists() else b""
        for ending in (writer.flush, writer.verify, lambda: writer.write(line("d"))):
            with pytest.raises(ExpertPoolError, match=r"while this run wrote it") as raised:
                ending()
            assert not isinstance(raised.value, ConfigError), "the output was fine when it was opened"
    assert (path.read_bytes() if path.exists() else b"") == after, "no line is written at the end of a cut one"


def test_what_somebody_cut_from_a_file_is_counted_and_completed_by_the_next_run(tmp_path):
    path = tmp_path / "out.jsonl"
    with CompletionWriter(str(path)) as writer:
        for key in "abcd":
            writer.write(line(key))
        cut_within_a_line(path)
        with pytest.raises(ExpertPoolError, match="1 of 4 finished requests are no longer there; run again to compl"):
            writer.verify()
    with CompletionWriter(str(path)) as writer:
        assert writer.finished_ids == {"a", "b", "c"}
        writer.write(line("d"))
        writer.verify()
    assert ids(path) == ["a", "b", "c", "d"]


def test_lines_changed_in_place_are_found_when_the_run_ends(tmp_path):
    path = tmp_path / "out.jsonl"
    with CompletionWriter(str(path)) as writer:
        writer.write(line("a"))
        writer.write(line("b"))
        writer.verify()
        path.write_bytes(path.read_bytes().replace(b'"id":"b"', b'"id":"a"'))
        with pytest.raises(
            ExpertPoolError, match=r"not those that this run left.*: 1 of 2 finished requests are no lo"
        ):
            writer.verify()
        path.write_bytes(b"#" + path.read_bytes()[1:])
        spoilt = "1 of 2 finished requests are no longer there; it cannot be continued: .*line 1: not a completion"
        with pytest.raises(ExpertPoolError, match=spoilt) as raised:
            writer.verify()
        assert not isinstance(raised.value, ConfigError)


def test_a_file_that_cannot_be_read_back_is_not_called_changed(tmp_path, monkeypatch):
    def unreadable(file, source):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with CompletionWriter(str(tmp_path / "out.jsonl")) as writer:
        writer.write(line("a"))
        monkeypatch.setattr(output, "finished_in", unreadable)
        with pytest.raises(ExpertPoolError, match=r"cannot be read back: Input/output error; run again to see"):
            writer.verify()


def test_parts_that_are_gone_are_missed_however_often_one_looks(store):
    filesystem, url = store
    with PartsWriter(url) as writer:
        for key in "ab":
            writer.write(line(key))
            writer.flush()
        filesystem.rm(sorted(filesystem.glob(f"{url}/*.jsonl"))[0])
        for _ in range(2):
            with pytest.raises(ExpertPoolError, match="1 of 2 finished requests are no longer there"):
                writer.verify()


def test_a_run_that_wrote_nothing_leaves_no_empty_file_but_keeps_one_that_was_there(tmp_path):
    path = tmp_path / "out.jsonl"
    CompletionWriter(str(path)).close()
    assert not path.exists()
    CompletionWriter(str(tmp_path / "new" / "folders" / "out.jsonl")).close()
    assert not (tmp_path / "new").exists()
    path.write_text("")
    CompletionWriter(str(path)).close()
    assert path.exists()


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
    assert f"--output {tmp_path}: is a folder; give a file" in said
    assert said.count("--output") == 1


def test_a_path_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"out.jsonl: cannot be written: .*file"):
        CompletionWriter(str(tmp_path / "file" / "out.jsonl"))


def test_prompts_as_their_own_output_are_refused_and_nobody_is_told_to_remove_them(
    refused, prompts_file, random_models
):
    prompts = prompts_file({"prompt_token_ids": [5]})
    said = refused("generate", "--model", random_models["qwen3_moe"], "--prompts", prompts, "--output", prompts)
    assert f"--output {prompts}, line 1: not a completion of this tool" in said
    assert said.endswith("; give another file\n")


def test_a_file_that_can_be_written_and_not_read_is_refused():
    with pytest.raises(ConfigError, match=r"^--output .*/clear_refs: cannot be read to be continued: "):
        CompletionWriter("/proc/self/clear_refs")


def test_a_device_is_refused():
    with pytest.raises(ConfigError, match="/dev/full: is no regular file"):
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
            writer.flush()  # the half of a line is the writer's own
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


@pytest.fixture
def store(tmp_path):
    """A folder in a store where objects can be written whole and not appended to, with its URL."""
    filesystem = fsspec.filesystem("memory")
    url = f"memory://{tmp_path}/out"
    yield filesystem, url
    if filesystem.exists(url):
        filesystem.rm(url, recursive=True)


def parts(store) -> list[list[str]]:
    filesystem, url = store
    names = sorted(filesystem.glob(f"{url}/*.jsonl"))
    return [[msgspec.json.decode(one).get("id") for one in filesystem.cat(name).split(b"\n") if one] for name in names]


def test_an_url_gets_parts_that_are_never_touched_again_and_a_path_one_file(store, tmp_path):
    _, url = store
    with open_output(url) as writer:
        writer.write(line("a"))
        writer.write(line("b"))
        assert parts(store) == [], "lines are gathered"
        writer.flush()
        assert parts(store) == [["a", "b"]]
        writer.write(line("c"))
    assert parts(store) == [["a", "b"], ["c"]]
    with open_output(url) as writer:
        assert writer.finished_ids == {"a", "b", "c"}
        writer.flush()
    assert parts(store) == [["a", "b"], ["c"]], "nothing to add, nothing written"
    for local in (f"file://{tmp_path}/local.jsonl", f"{tmp_path}/local.jsonl"):
        with open_output(local) as writer:
            assert isinstance(writer, CompletionWriter)
            writer.write(line(local))
    assert ids(tmp_path / "local.jsonl") == [f"file://{tmp_path}/local.jsonl", f"{tmp_path}/local.jsonl"]


def test_a_folder_of_any_name_is_continued(store):
    """Of one that reads as a pattern no part would be found, and all requests would run again."""
    for name in ("run[1]", "what?", "all*"):
        with PartsWriter(f"{store[1]}/{name}") as writer:
            writer.write(line("a"))
        with PartsWriter(f"{store[1]}/{name}") as writer:
            assert writer.finished_ids == {"a"}


def test_finished_requests_reach_the_store_by_themselves_after_a_while_or_once_they_fill_a_part(store, monkeypatch):
    _, url = store

    def eventually(expected: list[list[str]]) -> bool:
        deadline = time.monotonic() + 10
        while parts(store) != expected and time.monotonic() < deadline:
            time.sleep(0.02)
        return parts(store) == expected

    with PartsWriter(url, part_s=0.2) as writer:
        writer.write(line("a"))
        assert eventually([["a"]])
    monkeypatch.setattr(object_output, "PART_BYTES", 2000)
    with PartsWriter(url, part_s=1000) as writer:
        writer.write(line("b"))
        writer.write(line("long", num_tokens=1000))
        assert eventually([["a"], ["b", "long"]])


def test_parts_that_somebody_removes_or_cuts_end_the_run_with_their_count(store):
    filesystem, url = store
    with PartsWriter(url) as writer:
        writer.write(line("before"))
    [before] = filesystem.glob(f"{url}/*.jsonl")
    with PartsWriter(url) as writer:
        for keys in ("ab", "c"):
            for key in keys:
                writer.write(line(key))
            writer.flush()
        writer.verify()
        first, _ = sorted({*filesystem.glob(f"{url}/*.jsonl")} - {before})
        content = filesystem.cat(first)
        filesystem.pipe_file(first, content[: content.index(b"\n") + 1])
        with pytest.raises(ExpertPoolError, match="1 of 4 finished requests are no longer there; run again"):
            writer.verify()
        filesystem.rm(before)
        with pytest.raises(ExpertPoolError, match="2 of 4 finished requests are no longer there; run again"):
            writer.verify()
        filesystem.pipe_file(first, b"notes\n")
        spoilt = "3 of 4 finished requests are no longer there; it cannot be continued: .*line 1: not a completion"
        with pytest.raises(ExpertPoolError, match=spoilt) as raised:
            writer.verify()
        assert not isinstance(raised.value, ConfigError)
        filesystem.rm(url, recursive=True)
        with pytest.raises(ExpertPoolError, match="4 of 4 finished requests are no longer there; run again"):
            writer.verify()
    with PartsWriter(url) as writer:
        assert writer.finished_ids == set()


def test_parts_that_are_gathered_into_one_while_a_run_writes_lose_nothing(store):
    filesystem, url = store
    with PartsWriter(url) as writer:
        for key in "ab":
            writer.write(line(key))
            writer.flush()
        names = sorted(filesystem.glob(f"{url}/*.jsonl"))
        filesystem.pipe_file(f"{url}/all.jsonl", b"".join(map(filesystem.cat, names)))
        filesystem.rm(names)
        writer.verify()


class Unwritable(type(fsspec.filesystem("memory"))):
    """A store that refuses objects for as long as it is told to."""

    protocol = "unwritable"
    refuses = False

    def pipe_file(self, path, value, **options):
        if self.refuses:
            raise PermissionError("not today")
        return super().pipe_file(path, value, **options)


def test_a_store_that_fails_for_a_while_loses_nothing_and_one_that_goes_on_failing_ends_the_run(store, monkeypatch):
    fsspec.register_implementation("unwritable", Unwritable, clobber=True)
    _, url = store
    url = url.replace("memory:", "unwritable:")
    monkeypatch.setattr(object_output, "GIVE_UP_S", 0.5)
    writer = PartsWriter(url)
    writer.write(line("a"))
    writer.flush()
    writer.write(line("b"))
    monkeypatch.setattr(Unwritable, "refuses", True)
    with pytest.raises(ExpertPoolError, match="not today; this run wrote 1 finished requests"):
        writer.close()
    with pytest.raises(ConfigError, match="cannot be written: PermissionError: not today"):
        PartsWriter(url)
    monkeypatch.setattr(Unwritable, "refuses", False)
    with PartsWriter(url, part_s=0.05) as writer:
        assert writer.finished_ids == {"a"}
        monkeypatch.setattr(Unwritable, "refuses", True)
        writer.write(line("b"))
        time.sleep(0.3)
        writer.write(line("c"))  # refused for less than the bound
        time.sleep(0.5)
        with pytest.raises(ExpertPoolError, match="not today"):
            writer.write(line("d"))
        monkeypatch.setattr(Unwritable, "refuses", False)
    with PartsWriter(url) as writer:
        assert writer.finished_ids == {"a", "b", "c"}


class Unconfirmed(type(fsspec.filesystem("memory"))):
    """A store that takes a part, and whose answer does not arrive the first time."""

    protocol = "unconfirmed"
    forgets = False

    def pipe_file(self, path, value, **options):
        super().pipe_file(path, value, **options)
        if Unconfirmed.forgets:
            Unconfirmed.forgets = False
            raise TimeoutError("no answer")


def test_a_part_that_the_store_took_but_did_not_confirm_is_written_once(store):
    fsspec.register_implementation("unconfirmed", Unconfirmed, clobber=True)
    filesystem, url = store
    url = url.replace("memory:", "unconfirmed:")
    with PartsWriter(url) as writer:
        writer.write(line("a"))
        Unconfirmed.forgets = True
        with pytest.raises(ExpertPoolError, match="no answer"):
            writer.flush()
        writer.write(line("b"))
        writer.flush()
        writer.write(line("c"))
    parts = [filesystem.cat(part).count(b"\n") for part in sorted(filesystem.glob(f"{url}/*.jsonl"))]
    assert parts == [2, 1]
    with PartsWriter(url) as writer:
        assert writer.finished_ids == {"a", "b", "c"}


def test_an_interrupt_is_not_hidden_by_a_store_that_refuses(store, monkeypatch):
    fsspec.register_implementation("unwritable", Unwritable, clobber=True)
    writer = PartsWriter(store[1].replace("memory:", "unwritable:"))
    writer.write(line("a"))
    monkeypatch.setattr(Unwritable, "refuses", True)
    with pytest.raises(KeyboardInterrupt), writer:
        raise KeyboardInterrupt


def test_a_part_of_something_else_one_cut_short_and_an_unknown_store(store):
    filesystem, url = store
    with PartsWriter(url) as writer:
        writer.write(line("a"))
    whole = filesystem.cat(filesystem.glob(f"{url}/*.jsonl")[0])
    filesystem.pipe_file(f"{url}/part-9.jsonl", whole + whole[:20])
    with PartsWriter(url) as writer:
        assert writer.finished_ids == {"a"}
    filesystem.pipe_file(f"{url}/part-9.jsonl", b"notes\n")
    with pytest.raises(ConfigError, match=r"part-9.jsonl, line 1: not a completion of this tool"):
        PartsWriter(url)
    filesystem.pipe_file(f"{url}2", b"")
    with pytest.raises(ConfigError, match="is one object"):
        PartsWriter(f"{url}2")
    with pytest.raises(ConfigError, match=r"--output nosuch://x: .*nosuch"):
        open_output("nosuch://x")
