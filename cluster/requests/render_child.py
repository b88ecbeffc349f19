"""A process that renders chat templates and nothing else, so that it can be ended: a template is a program of the model
folder's, which may loop, or fill memory, inside one call that no other thread could interrupt.

Run as a script: requests and answers are lines of JSON, until its input ends. A request gives `template`, `messages`,
`special_tokens`, `seconds` and `max_chars`; an answer has `text`, or `kind` and `message` of what was raised. Past its
time, which the system's own timer keeps, a rendering ends the process; so does memory that it cannot have.
"""

import json
import os
import resource
import signal
import sys
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


def main() -> None:
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (held + _MEMORY_BYTES, held + _MEMORY_BYTES))
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_answer(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
