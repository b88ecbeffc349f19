"""What a rank of check_layers.py says while it hangs: where it is, what memory there is, and what its peers told it."""

import faulthandler
import sys
import threading
import time
from typing import Any

import torch
from handle import words_of


class Watch:
    """Remembers the last thing a rank began, and prints what it knows once, some time after the start.

    Args:
        rank: of this process.
        device: its GPU, or the CPU.
        seconds: from now on, after which a rank that still runs is taken to hang.
    """

    def __init__(self, rank: int, device: torch.device, seconds: float):
        self.links: list[Any] = []
        self._rank = rank
        self._device = device
        self._started = time.perf_counter()
        self._stage, self._since = "nothing", self._started
        self._timer = threading.Timer(seconds, self._say)
        self._timer.daemon = True
        self._timer.start()

    def begin(self, stage: str) -> None:
        self._stage, self._since = stage, time.perf_counter()

    def memory(self) -> str:
        """Of the whole GPU, and of this process's PyTorch, in GiB."""
        if self._device.type != "cuda":
            return "no GPU"
        free, total = torch.cuda.mem_get_info(self._device)
        own = (torch.cuda.memory_allocated, torch.cuda.memory_reserved, torch.cuda.max_memory_reserved)
        held = "/".join(f"{of(self._device) / 2**30:.1f}" for of in own)
        return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free, allocated/reserved/most {held}"

    def end(self) -> None:
        self._timer.cancel()

    def _say(self) -> None:
        now = time.perf_counter()
        text = f"rank {self._rank} is at {self._stage!r} since {now - self._since:.0f} s; {self.memory()}"
        print("\n".join([text, *map(self._flags, self.links)]), flush=True)
        faulthandler.dump_traceback(sys.stdout, all_threads=True)
        sys.stdout.flush()

    def _flags(self, link: Any) -> str:
        """The round this rank is in (2N + 1: dispatch, 2N + 2: combine), and the last that each peer announced here."""
        if link.metainfo is None:
            return f"rank {self._rank}: a link that was given back"
        ranks = link.ep_size
        # A stream of its own: the others may wait behind what hangs.
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            found = {
                name: words_of(link, name, count)
                for name, count in (
                    ("FLAG_VAL", 1),
                    ("DISPATCH_COMPLETION_FLAGS", ranks),
                    ("COMBINE_COMPLETION_FLAGS", ranks),
                    ("RECV_COUNTERS", 2 * ranks),
                    ("LOCAL_TOKEN_COUNTER", 1),
                )
            }
        return (
            f"rank {self._rank}: link for {link.params.num_experts} experts at {link.workspace.data_ptr():#x}: {found}"
        )
