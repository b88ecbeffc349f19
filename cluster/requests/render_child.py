"""A process that renders chat templates and nothing else, so that it can be ended: a template is a program of the model
folder's, which may loop, or fill memory, inside one call that no other thread could interrupt.

Run as a script with the file descriptor of a connection, over which it says that it is ready, and then answers requests
until the other end is closed; all in JSON. Not over its standard output: whatever is imported may print. A request
gives `template`, `messages`, `special_tokens`, `seconds` and `max_chars`; an answer has `text`, or `kind` and `message`
of what was raised. Past its time, which the system's own timer keeps, a rendering ends the process; so does memory that
it cannot have.
"""

import json
import os
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

_MEMORY_BYTES = 1 << 30


def _answer(request: dict[str, Any]) -> dict[str, str]:
    signal.setitimer(signal.ITIMER_REAL, request["seconds"])
    try:
        (text,), _ = render_jinja_template(
            conversations=[request["messages"]],
            chat_template=request["template"],
            add_generation_prompt=True,
            **request["special_tokens"],
        )
    except Exception as error:
        return {"kind": type(error).__name__, "message": str(error)[:1000]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if len(text) > request["max_chars"]:
        return {"kind": "TooLong", "message": f"it writes {len(text):,} characters, more than {request['max_chars']:,}"}
    return {"text": text}


def main(connection: Connection) -> None:
    # What a parent ignores or blocks, its children do too.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + _MEMORY_BYTES, held + _MEMORY_BYTES))
    answer: dict[str, Any] = {"ready": True}
    while True:
        try:
            connection.send_bytes(json.dumps(answer).encode())
            request = connection.recv_bytes()
        except (EOFError, OSError):  # whoever asked is gone
            return
        answer = _answer(json.loads(request))


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
