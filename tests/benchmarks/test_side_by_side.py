"""benchmarks/side_by_side.py: options that are refused, the arithmetic, equal work for all sides, a real run."""

import importlib.util
import json
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

REPOSITORY = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(REPOSITORY / "benchmarks")]

import side_by_side  # noqa: E402
from comparison import Comparison, rows_of  # noqa: E402
from vllm_weights import draw_ordinary, problem_of  # noqa: E402
from workload import SIZES, Task, measure, task_from  # noqa: E402

TINY_MOE = str(REPOSITORY / "examples" / "tiny_moe")
SETUP = {"model": "m", "ranks": 1}


def row(side: str, test: str, value: float, **others: object) -> dict[str, object]:
    return {"side": side, "test": test, "value": value, "unit": "", "setup": SETUP, **others}


ROWS = [
    row("pool", "start", 30.0, notes=["compiled kernels in 3 s"]),
    row("pool", "decode", 6.0, requests=8),
    row("pool", "mixed", 3000.0),
    row("vllm", "decode", 4.0, requests=8),
    row("vllm", "mixed", 6000.0),
]


def task(side: str = "pool") -> Task:
    return Task(side, TINY_MOE, "tiny", 2, (1, 2), 2, (), "cpu", False, 2048, 1024)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sides", "pool,vlm"], "'vlm' is none of pool, vllm, transformers"),
        (["--sides", "pool,pool"], "names one twice"),
        (["--sides", ","], "--sides is empty"),
        (["--requests", "1,0"], "'1,0' is not a list of integers of at least 1"),
        (["--requests", "4,4"], "names one twice"),
        (["--skip", "decode"], "'decode' is none of prefill, mixed"),
        (["--sides", "pool,vllm", "--device", "cuda"], "--vllm-python does not find vllm"),
        (["--sides", "vllm", "--device", "cuda", "--vllm-python", "no-such-python"], "'no-such-python' cannot be run"),
        (["--sides", "vllm", "--device", "cpu"], "measured on GPUs"),
        (["--device", "cpu", "--model", "/nowhere"], "'/nowhere' has no config.json"),
        (["--device", "cpu", "--model", TINY_MOE, "--layers", "1"], "has weights of its own"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name_before_anything_runs(arguments, message):
    result = CliRunner().invoke(side_by_side.main, arguments)
    assert result.exit_code != 0
    assert message in result.output
    assert "|" not in result.output.replace("|---", "")


def test_the_first_side_is_divided_by_the_others_and_gaps_stay_empty():
    assert Comparison(ROWS).table() == [
        "| | pool | vllm | pool / vllm |",
        "|---|---|---|---|",
        "| start, s | 30.00 |  |  |",
        "| decode step, 8 a rank, ms | 6.00 | 4.00 | 1.50 |",
        "| mixed, tokens/s | 3,000 | 6,000 | 0.50 |",
    ]


def test_rows_of_other_setups_and_rows_that_are_there_twice_are_refused():
    with pytest.raises(click.ClickException, match="different setups"):
        Comparison([*ROWS, row("vllm", "start", 1.0) | {"setup": {"model": "m", "ranks": 2}}])
    with pytest.raises(click.ClickException, match="of pool is there twice"):
        Comparison([*ROWS, ROWS[1]])


def test_kept_results_are_joined_and_drawn_and_other_lines_refused(tmp_path):
    ours, theirs, chart = tmp_path / "ours", tmp_path / "theirs", tmp_path / "chart.png"
    ours.write_text("".join(json.dumps(one) + "\n" for one in ROWS[:3]))
    theirs.write_text("".join(json.dumps(one) + "\n" for one in ROWS[3:]))
    arguments = ["--from", str(ours), "--from", str(theirs)]
    shown = CliRunner().invoke(side_by_side.main, arguments)
    assert shown.exit_code == 0, shown.output
    assert "| decode step, 8 a rank, ms | 6.00 | 4.00 | 1.50 |" in shown.output
    assert "pool: compiled kernels in 3 s" in shown.output
    drawn = CliRunner().invoke(side_by_side.main, [*arguments, "--chart", str(chart)])
    if importlib.util.find_spec("matplotlib") is None:
        assert "--chart needs matplotlib" in drawn.output
    else:
        assert drawn.exit_code == 0, drawn.output
        assert chart.read_bytes().startswith(b"\x89PNG")
    theirs.write_text('{"side": "vllm"}\n')
    with pytest.raises(click.ClickException, match="line 1 is no result"):
        rows_of([str(theirs)])


def test_every_side_gets_the_same_work_and_a_step_is_a_difference_over_its_tokens():
    def run(side: str) -> tuple[list[tuple], list]:
        calls: list[tuple] = []

        def generate(batch, new):
            calls.append((batch, list(new)))
            return 1.0 + 0.25 * max(new)

        return calls, list(measure(task_from(task(side).as_json()), generate))

    calls, found = run("pool")
    assert calls == run("vllm")[0]
    decode = [values for test, values in found if test == "decode"]
    assert [values["requests"] for values in decode] == [1, 2]
    assert [values["value"] for values in decode] == pytest.approx([250.0, 250.0])
    work = SIZES["tiny"]
    assert {len(batch) for batch, _ in calls} == {2, 4, 2 * work.prefill[0], 2 * work.mixed_requests}
    prefill = next(values["value"] for test, values in found if test == "prefill")
    assert prefill == pytest.approx(2 * work.prefill[0] * work.prefill[1] / 1.25)


class Routed(torch.nn.Module):
    def __init__(self, num_layers: int):
        super().__init__()
        names = ("norm", "mlp", "experts")
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({name: torch.nn.Module() for name in names}) for _ in range(num_layers)
        )
        for layer in self.layers:
            layer["norm"].weight = torch.nn.Parameter(torch.zeros(8))
            layer["mlp"].gate = torch.nn.Linear(8, 16, bias=False)
            layer["mlp"].gate.weight.data.fill_(1e-3)


def test_dummy_weights_are_drawn_anew_and_shared_or_missing_routers_are_a_problem():
    model = Routed(3)
    found = draw_ordinary(model)
    assert found == {"parameters": 3 * (8 + 128), "routers": 3, "distinct_routers": 3}
    assert problem_of(found) is None
    assert all(bool((layer["norm"].weight == 1).all()) for layer in model.layers)
    assert 0.01 < float(model.layers[0]["mlp"].gate.weight.detach().std()) < 0.03
    assert problem_of(found | {"distinct_routers": 1}) == "only 1 of 3 routers are distinct"
    assert problem_of(draw_ordinary(torch.nn.Linear(2, 2))) == "no router was found among the parameters"


def test_a_side_that_fails_shows_its_last_lines_and_gives_no_numbers():
    broken = Task("transformers", "/nowhere", "tiny", 1, (1,), 1, (), "cpu", False, 2048, 1024)
    with pytest.raises(click.ClickException, match=r"transformers ended with 1; its last lines:[\s\S]*nowhere"):
        side_by_side.run_side(broken, [sys.executable], {"PATH": "/usr/bin:/bin"}, 60)


@pytest.mark.long
def test_the_pool_beside_transformers_gives_all_rows(tmp_path):
    results = tmp_path / "results"
    arguments = ["--device", "cpu", "--model", TINY_MOE, "--size", "tiny", "--requests", "1,2", "--repeats", "1"]
    result = CliRunner().invoke(side_by_side.main, [*arguments, "--results", str(results)])
    assert result.exit_code == 0, result.output
    rows = rows_of([str(results)])
    expected = ["start", "decode", "decode", "prefill", "mixed"]
    assert [(one["side"], one["test"]) for one in rows] == [
        (side, test) for side in ("pool", "transformers") for test in expected
    ]
    assert all(one["value"] > 0 for one in rows if one["test"] != "decode")
    assert "| pool | transformers | pool / transformers |" in result.output
