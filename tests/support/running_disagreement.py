"""One rank comes to disagree with the others while they generate, and is mended."""

import time
from typing import Any

from expert_pool.dispatch.errors import GeometryError
from expert_pool.workers.engine import RankEngine
from handle import agreement_of, state_of
from rank_faults import Fault
from rank_insides import run_script

WITHIN_S = 10.0
PROMPTS = [[5, 17, 42], [9, 9], [100], [7, 8, 9, 10, 11]]
NEW_TOKENS = 8
FAULTY_STEP = 5


def disagree_while_running(engine: RankEngine, fault: Fault, faulty_rank: int) -> tuple[str, float, dict[int, Any]]:
    """Generate; before the fifth agreement one rank comes to disagree; mend it, and let the loop go on.

    Returns:
        The error that this rank raised, seconds from the fault to it, and what was generated in the end.
    """
    agreement, seen = agreement_of(engine), [0]
    agree, opened = agreement.agree, []

    def agree_with_fault(*arguments: Any) -> Any:
        seen[0] += 1
        if seen[0] == FAULTY_STEP and engine.rank == faulty_rank:
            opened[0].__enter__()
            arguments = (arguments[0], state_of(engine))
        return agree(*arguments)

    opened.append(fault(engine))
    agreement.agree = agree_with_fault
    arrivals = [{0: [prompt]} for prompt in PROMPTS[: engine.config.layout.dp_size]]
    started = time.monotonic()
    try:
        run_script(engine, arrivals, NEW_TOKENS)
    except GeometryError as error:
        message, seconds = str(error), time.monotonic() - started
    finally:
        agreement.agree = agree
        if engine.rank == faulty_rank:
            opened[0].__exit__(None, None, None)
    assert seen[0] == FAULTY_STEP
    rest = run_script(engine, [{}] * engine.config.layout.dp_size, NEW_TOKENS)
    return message, seconds, rest.token_ids
