"""Running a step loop on a thread that another one watches: a call that hangs inside it can then be given up.

A rank waits for its peers with deadlines: in the agreement, and for the tokens of a step. But a launch blocks without
one once the device's queue is full of kernels that wait for a peer, and so does any call that waits for the device.
"""

import threading
import time

from ..dispatch.errors import RankError
from .step import StepLoop

_LOOK_S = 0.5
# The deadlines inside a stage are the same, and say more.
_GRACE_S = 1.0


def run_watched(loop: StepLoop, peer_wait_s: float) -> None:
    """Run the loop; returns when it does, and raises what it raises.

    Raises:
        RankError: a stage of an iteration has not ended in time. The loop's thread is left where it hangs, and the
            process is of no further use.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            loop.run()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="step loop", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_S)
        began = loop.stage_began
        if thread.is_alive() and began is not None and time.monotonic() - began > peer_wait_s + _GRACE_S:
            raise RankError(
                f"a step timed out: a call on this rank has not returned for {peer_wait_s:g} s (worker.step_timeout_s, "
                "less the driver's time to report it)"
            )
    if raised:
        raise raised[0]
