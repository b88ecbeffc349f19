"""What the processes of ranks wrote to their own logs; the evidence that a rank itself knew of a failure."""

import glob
import os
import time

import ray


def said_by(pid: int, sentence: str, within_s: float = 5.0) -> bool:
    """Whether the rank with this process id logged the sentence; its process may be gone, its log stays."""
    sentence = sentence.replace("\\", "\\\\").replace('"', '\\"')  # as log lines quote what they hold
    folder = ray._private.worker._global_node.get_logs_dir_path()
    deadline = time.monotonic() + within_s
    while True:
        logs = glob.glob(os.path.join(folder, f"worker-*-{pid}.err"))
        assert logs, f"no log of process {pid} in {folder}"
        if any(sentence in open(log, errors="replace").read() for log in logs):  # noqa: SIM115
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
