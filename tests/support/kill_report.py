"""Rows of the kill matrix, and the report that is made of them: `python tests/support/kill_report.py ROWS REPORT`.

A case that runs again takes the place of its earlier row, so a matrix may be run in pieces.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROWS = "EXPERT_POOL_KILL_ROWS"
NUM_CASES = 55
_HEAD = """# Kill matrix

Written by `make test-kill-matrix`: four CPU ranks of a small random Qwen3-MoE under load, eleven faults, each five
times at a random step that the seed gives. {verdict}

- **detected**: seconds from the fault until the pool's driver had reported the failure; for the driver, until its
  caller got the error; for the caller, until the first process of its pool had ended.
- **recovered**: seconds from the fault until new ranks were ready; for the driver, until the next answer; for the
  caller, until a second run had written its first line, the start of that run included.
- **tokens equal**: every request was answered once, with the token ids of an undisturbed run.
- **left over**: processes of ranks that are none of the pool's, and placement groups beyond its own.

{machine}.

| fault | cases | detected: median, largest | recovered: median, largest |
|---|---|---|---|
{summary}

| fault | seed | step | detected after s | recovered after s | tokens equal | left over |
|---|---|---|---|---|---|---|
{rows}
"""


@dataclass
class Row:
    """One case. `failure` is set where something did not hold."""

    fault: str
    seed: int
    step: str = "-"
    detected_s: float | None = None
    recovered_s: float | None = None
    tokens_equal: bool = False
    left_over: str = "-"
    failure: str | None = None
    load: float = 0.0


@contextmanager
def case(fault: str, seed: int) -> Iterator[Row]:
    """A row to fill in; it is kept in the file that `EXPERT_POOL_KILL_ROWS` names, also where the case fails."""
    row = Row(fault, seed)
    try:
        yield row
    except BaseException as error:
        row.failure = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise
    finally:
        row.load = os.getloadavg()[0]
        if ROWS in os.environ:
            path = Path(os.environ[ROWS])
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")


def render(rows: list[Row]) -> str:
    faults = list(dict.fromkeys(row.fault for row in rows))
    failed = [row for row in rows if row.failure is not None]
    verdict = f"{len(rows)} of {NUM_CASES} cases were run, {len(failed)} of them failed."
    loads = [row.load for row in rows]
    machine = (
        f"{time.strftime('%Y-%m-%d', time.gmtime())}, {os.cpu_count()} cores ({platform.machine()}), Python "
        f"{platform.python_version()}; load of the machine {min(loads):.1f} to {max(loads):.1f}"
    )
    summary = [
        f"| {fault} | {len(of_fault)} | {_times([row.detected_s for row in of_fault])} | "
        f"{_times([row.recovered_s for row in of_fault])} |"
        for fault in faults
        for of_fault in [[row for row in rows if row.fault == fault]]
    ]
    lines = [
        f"| {row.fault} | {row.seed} | {row.step} | {_seconds(row.detected_s)} | {_seconds(row.recovered_s)} | "
        f"{'yes' if row.tokens_equal else 'NO'} | {row.failure or row.left_over} |"
        for row in rows
    ]
    return _HEAD.format(verdict=verdict, machine=machine, summary="\n".join(summary), rows="\n".join(lines))


def _times(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f}, {max(known):.1f}" if known else "-"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def main(rows_path: str, report_path: str) -> None:
    rows = [Row(**json.loads(line)) for line in Path(rows_path).read_text().splitlines()]
    latest = {(row.fault, row.seed): row for row in rows}
    report = render(list(latest.values()))
    Path(report_path).write_text(report)
    print(report)


if __name__ == "__main__":
    main(*sys.argv[1:])
