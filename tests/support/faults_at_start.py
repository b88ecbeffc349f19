"""A plugin of pools under test, through which ranks have a fault as soon as they have loaded, and so at their capture.

A session that is started within `session_environment` has the variables that it needs; `want` says which ranks that
start from then on have which fault. Processes that load no rank are left as they are.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PLUGIN = __name__
_FILE = "FAULTS_AT_START"
_FOLDER = Path(__file__).resolve().parent


@contextmanager
def session_environment(file: Path) -> Iterator[None]:
    """Ray's processes get the environment of what starts it: where this module is, and where `want` writes."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", _FILE)}
    path = [str(_FOLDER.parent), str(_FOLDER), *filter(None, [before["PYTHONPATH"]])]
    os.environ |= {"PYTHONPATH": os.pathsep.join(path), _FILE: str(file)}
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def want(file: Path, ranks: Sequence[int], fault: str, *args: Any) -> None:
    """These ranks, of those that start from now on, have this fault of `rank_faults`; of no ranks: none has one."""
    file.write_text(json.dumps({"ranks": list(ranks), "fault": fault, "args": args}))


def _have_faults(engine_type: Any, file: Path) -> None:
    load = engine_type.load

    def load_and_inject(engine: Any) -> Any:
        import rank_faults

        report = load(engine)
        if file.exists():
            wanted = json.loads(file.read_text())
            if engine.rank in wanted["ranks"]:
                rank_faults.inject(engine, getattr(rank_faults, wanted["fault"]), *wanted["args"])
        return report

    engine_type.load = load_and_inject


if _FILE in os.environ and "expert_pool.workers.engine" in sys.modules:
    _have_faults(sys.modules["expert_pool.workers.engine"].RankEngine, Path(os.environ[_FILE]))
