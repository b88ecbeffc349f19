"""Chat templates run where they can be ended: what they may take of time, memory and size is bounded."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from expert_pool.cluster import ConfigError
from expert_pool.cluster.requests.chat_rendering import ChatRenderer

USER = [{"role": "user", "content": "x"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = (
    "{% set all = namespace(text='xxxxxxxx') %}"
    "{% for i in range(99) %}{% set all.text = all.text + all.text %}{% endfor %}"
)


@pytest.fixture
def renderer() -> Iterator[ChatRenderer]:
    made = ChatRenderer(seconds=3.0)
    yield made
    made.close()


def test_a_template_that_does_not_end_is_ended_and_the_next_chat_is_rendered():
    renderer = ChatRenderer(seconds=1.0)
    with pytest.raises(ConfigError, match=r"did not end within 1 s, or needs more memory .*exit code -14"):
        renderer.render(ENDLESS, USER, {})
    with pytest.raises(ConfigError, match="did not end within 1 s"):
        renderer.render("{{ 10 ** (10 ** 9) }}", USER, {})  # one call, which no signal handler would interrupt
    assert renderer.render("{{ bos_token }}{{ messages[0].content }}", USER, {"bos_token": "<s>"}) == "<s>x"
    renderer.close()


@pytest.mark.parametrize("template", [DOUBLING, "{{ 'x' * 10 ** 10 }}", "{{ ['x'] * 10 ** 9 }}"])
def test_a_template_that_fills_memory_is_refused(template, renderer):
    with pytest.raises(ConfigError, match=r"MemoryError|needs more memory"):
        renderer.render(template, USER, {})


def test_a_template_that_writes_far_more_than_it_is_given_is_refused(renderer):
    with pytest.raises(ConfigError, match=r"it writes 10,000,000 characters, more than 4,194,320"):
        renderer.render("{{ 'x' * 10 ** 7 }}", USER, {})
    long = [{"role": "user", "content": "x" * 5_000_000}]
    assert len(renderer.render("{{ messages[0].content }}", long, {})) == 5_000_000


def test_threads_get_each_their_own_answer_from_one_process(renderer):
    chats = [[{"role": "user", "content": f"{number} \n \u2028 é"}] for number in range(40)]
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda chat: renderer.render("{{ messages[0].content }}!", chat, {}), chats))
    assert texts == [f"{chat[0]['content']}!" for chat in chats]


def test_what_is_printed_while_the_process_starts_is_no_answer(renderer, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text('print(\'{"text": "mine"}\', flush=True)\n')
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    texts = [renderer.render("{{ messages[0].content }}", [{"role": "user", "content": one}], {}) for one in "abc"]
    assert texts == ["a", "b", "c"]


def test_a_process_that_cannot_start_is_not_taken_for_a_template_that_does_not_end(renderer, tmp_path, monkeypatch):
    (tmp_path / "transformers.py").write_text("raise ImportError('no such library')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match="no process that renders it could be started: ImportError: no such library"):
        renderer.render("x", USER, {})


def test_a_timer_that_this_process_ignores_still_bounds_a_template():
    renderer, before = ChatRenderer(seconds=1.0), signal.signal(signal.SIGALRM, signal.SIG_IGN)
    try:
        with pytest.raises(ConfigError, match="did not end within 1 s"):
            renderer.render(ENDLESS, USER, {})
    finally:
        signal.signal(signal.SIGALRM, before)
        renderer.close()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Workers of pytest-xdist take no notice of interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_while_a_template_runs_ends_it(renderer):
    others = set(psutil.Process().children())
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        renderer.render(ENDLESS, USER, {})
    assert not set(psutil.Process().children()) - others
    assert renderer.render("{{ messages[0].content }}", USER, {}) == "x"
