"""What a pool shows of itself: metrics as Ray exports them, the dashboard over them, traces, status, and log lines."""

import io
import itertools
import json
import logging
import os
import re
import signal
import sys
import time
import urllib.request
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
import torch
from click.testing import CliRunner
from expert_pool.cluster import ExpertPool, Limits, PoolConfig, SamplingParams, WorkerConfig
from expert_pool.cluster.cli.commands import main
from expert_pool.cluster.cli.status_report import print_status
from expert_pool.cluster.driver.pool_status import PoolStatus
from expert_pool.cluster.observing.metrics import METRICS, PoolMetrics, imbalance
from expert_pool.cluster.observing.trace_clock import offset_of
from expert_pool.cluster.observing.trace_file import TraceFile
from expert_pool.dispatch.budgets.layout import Layout
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.observing.logs import KeyValueFormatter
from expert_pool.workers.observing.trace import StepTrace, TraceEvent
from expert_pool.workers.rank import RankPlace
from expert_pool.workers.rank_config import LoadReport
from expert_pool.workers.request import RankStats
from handle import actors_of, in_driver, in_rank, metric_objects_of, metrics_of, pool_label_of, write_trace
from plain_ranks import run_on_ranks
from rank_insides import run_script
from rich.console import Console
from transformers import AutoModelForCausalLM
from waiting import holds_in_time

REPOSITORY = Path(__file__).resolve().parents[3]
DASHBOARD = REPOSITORY / "ray_configs" / "grafana" / "expert_pool.json"
RANKS, NEW_TOKENS, TRACED = 2, 12, 400
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14], [15, 16]]
STAGES = {"schedule", "agree", "launch", "wait", "resolve"}
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


@pytest.fixture(scope="module")
def pool(tiny_moe) -> Iterator[ExpertPool]:
    """Two ranks that are watched in every way, after they have run a few requests."""
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors do not see the folder of the tests
    ray.init(
        address="local",
        num_cpus=2 * RANKS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _system_config={"metrics_report_interval_ms": 500},
    )
    worker = WorkerConfig(trace_steps=TRACED, expert_load=True, log_level="debug")
    limits = Limits(max_running_requests=4, chunked_prefill_size=64)
    try:
        with ExpertPool.launch(PoolConfig(model=tiny_moe, ranks=RANKS, worker=worker, limits=limits)) as launched:
            settings = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
            assert len(list(launched.generate(PROMPTS, settings))) == len(PROMPTS)
            yield launched
    finally:
        ray.shutdown()


def exported(pool: ExpertPool) -> dict[tuple[str, str], float]:
    """Every sample of this pool that the node's agent exports now, by name and label of its rank or layer."""
    [node] = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    text = urllib.request.urlopen(url, timeout=10).read().decode()
    found: dict[tuple[str, str], float] = {}
    for name, labels, value in re.findall(r"^(ray_expert_pool_\w+)\{([^}]*)\} (\S+)$", text, re.MULTILINE):
        tags = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if tags["pool"] != pool_label_of(pool):
            continue
        which = next((tags[tag] for tag in ("dp_rank", "rank", "layer") if tag in tags), "")
        found[name, which] = found.get((name, which), 0.0) + float(value)
    return found


def total(samples: dict[tuple[str, str], float], name: str) -> float:
    return sum(value for (found, _), value in samples.items() if found == name)


def test_ray_exports_what_the_ranks_counted(pool):
    deadline = time.monotonic() + 30
    wanted = "ray_expert_pool_generated_tokens_total"
    samples, before = exported(pool), {}
    while samples != before or not {("ray_expert_pool_rank_load_imbalance", "3"), (wanted, "0")} <= samples.keys():
        assert time.monotonic() < deadline, samples
        time.sleep(1.5)  # longer than ranks, driver and Ray hold a count back
        before, samples = samples, exported(pool)
    stats = pool.status().stats
    assert total(samples, wanted) == len(PROMPTS) * NEW_TOKENS == sum(one.generated_tokens for one in stats)
    assert total(samples, "ray_expert_pool_prompt_tokens_total") == sum(map(len, PROMPTS))
    steps = {name: value for (found, name), value in samples.items() if found == "ray_expert_pool_steps_total"}
    assert len(set(steps.values())) == 1
    assert steps.keys() == {"0", "1"}
    assert total(samples, "ray_expert_pool_step_time_seconds_count") == sum(steps.values())
    assert 0 < total(samples, "ray_expert_pool_replayed_steps_total") <= sum(steps.values())
    assert total(samples, "ray_expert_pool_agreement_seconds_total") > 0
    assert total(samples, "ray_expert_pool_agreement_seconds_total") < total(
        samples, "ray_expert_pool_step_seconds_total"
    )
    rows = {name: value for (found, name), value in samples.items() if found == "ray_expert_pool_dispatched_rows_total"}
    assert rows.keys() == {"0", "1"}
    assert sum(rows.values()) >= sum(map(len, PROMPTS)) + len(PROMPTS) * (NEW_TOKENS - 1)
    assert total(samples, "ray_expert_pool_requests_running") == 0
    assert 0 <= samples["ray_expert_pool_kv_cache_use", "0"] <= 1
    for name in ("ray_expert_pool_expert_load_imbalance", "ray_expert_pool_rank_load_imbalance"):
        found = {which: value for (sample, which), value in samples.items() if sample == name}
        assert found.keys() == {"0", "1", "2", "3"}
        assert min(found.values()) >= 1
    names = {f"ray_{one.name}{suffix}" for one in METRICS for suffix in SUFFIXES[one.kind]}
    assert {name for name, _ in samples} <= names


def test_every_metric_of_the_dashboard_is_one_that_the_pool_registers():
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= dashboard.keys()
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for one, other in itertools.combinations((panel["gridPos"] for panel in dashboard["panels"]), 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    sources = {variable["name"] for variable in dashboard["templating"]["list"]}
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    queries += [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    for panel in panels:
        assert panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert {"x", "y", "w", "h"} == panel["gridPos"].keys()
        assert panel["gridPos"]["w"] <= 24
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
            assert 'pool=~"$pool"' in target["expr"]
    assert {name for query in queries for name in re.findall(r"\$(\w+)", query)} <= sources | {"__rate_interval"}
    registered = {f"ray_{one.name}{suffix}": one for one in METRICS for suffix in SUFFIXES[one.kind]}
    queried = {name for query in queries for name in re.findall(r"\bray_\w+", query)}
    assert queried - registered.keys() == set()
    assert {one.name for one in METRICS} == {registered[name].name for name in queried}
    for query in queries:
        for tags in re.findall(r"by \(([^)]*)\)", query):
            known = {tag for name in re.findall(r"\bray_\w+", query) for tag in registered[name].tags}
            assert {tag.strip() for tag in tags.split(",")} <= known | {"pool", "le"}


def test_metrics_that_cannot_be_set_keep_nobody_from_an_answer_and_are_set_again_later(pool):
    restarts = pool.status().restarts
    in_driver(pool, make_metrics_raise)
    assert len(list(pool.generate(PROMPTS, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)))) == len(PROMPTS)
    raised = lambda: set(in_driver(pool, lambda driver: driver.raised)) == {"report", "report_expert_load"}  # noqa: E731
    assert holds_in_time(raised, within_s=15)
    in_driver(pool, count_metrics_again)
    assert holds_in_time(lambda: in_driver(pool, lambda driver: driver.loads_reported) > 0, within_s=15)
    assert (pool.status().state, pool.status().restarts) == ("ready", restarts)


@pytest.mark.long
def test_metrics_that_cannot_be_set_keep_no_pool_from_beginning_again(pool):
    before = pool.status()
    in_driver(pool, make_metrics_raise, ("begin", "restarted"))
    os.kill(before.places[0].pid, signal.SIGKILL)
    assert holds_in_time(lambda: pool.status().restarts == before.restarts + 1, within_s=15)
    assert len(list(pool.generate(PROMPTS, SamplingParams(max_new_tokens=NEW_TOKENS)))) == len(PROMPTS)
    assert set(in_driver(pool, lambda driver: driver.raised)) == {"begin", "restarted"}
    in_driver(pool, lambda driver: [delattr(metrics_of(driver), name) for name in ("begin", "restarted")])


def make_metrics_raise(driver: Any, names: tuple[str, ...] = ("report", "report_expert_load")) -> None:
    driver.raised = []

    def raising(name: str) -> Any:
        def report(*values: Any, **options: Any) -> None:
            driver.raised.append(name)
            raise ValueError("the metrics agent is gone")

        return report

    for name in names:
        setattr(metrics_of(driver), name, raising(name))


def count_metrics_again(driver: Any) -> None:
    metrics, driver.loads_reported = metrics_of(driver), 0
    del metrics.report, metrics.report_expert_load
    report = metrics.report_expert_load

    def counting(counts: Any) -> None:
        report(counts)
        driver.loads_reported += 1

    metrics.report_expert_load = counting


@pytest.mark.long
def test_a_trace_that_cannot_be_written_is_no_failure_of_the_run(pool, tmp_path):
    """All results are there."""
    trace = TraceFile(str(tmp_path / "trace.json"))
    (tmp_path / "trace.json").unlink()
    (tmp_path / "trace.json").mkdir()
    console = Console(file=io.StringIO(), width=200)
    write_trace(pool, trace, console)
    assert "cannot be written: Is a directory" in console.file.getvalue()


@pytest.mark.long
def test_a_trace_has_every_step_of_every_rank_on_one_clock(pool, tmp_path, tiny_moe, prompts_file):
    path, output = tmp_path / "trace.json", tmp_path / "out.jsonl"
    prompts = prompts_file(*({"id": str(index), "prompt": "def f("} for index in range(3)))
    arguments = ["--model", tiny_moe, "--ranks", "2", "--prompts", prompts, "--output", output, "--trace", path]
    result = CliRunner().invoke(main, ["generate", "--max-new-tokens", "6", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    assert f"steps of 2 ranks in {path}" in result.output
    trace = json.loads(path.read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["name"] for event in events} == STAGES
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in events)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    by_rank: dict[int, dict[int, dict[str, dict[str, Any]]]] = {0: {}, 1: {}}
    for event in events:
        by_rank[event["pid"]].setdefault(event["args"]["step"], {})[event["name"]] = event
    # The driver asks rank after rank; those that pause meanwhile stand at the same step.
    assert by_rank[0].keys() == by_rank[1].keys() == set(range(max(by_rank[0]) + 1))
    launched = [step for step, stages in by_rank[0].items() if "launch" in stages]
    assert len(launched) >= 6
    assert {by_rank[0][step]["launch"]["cat"] for step in launched} >= {"prefill", "decode"}
    for step in launched:
        one, other = by_rank[0][step], by_rank[1][step]
        assert one.keys() == other.keys() == STAGES
        assert one["launch"]["args"]["graph"] == other["launch"]["args"]["graph"]
        # No rank leaves a step's agreement before every rank has come to it.
        for mine, peer in ((one, other), (other, one)):
            assert mine["agree"]["ts"] + mine["agree"]["dur"] >= peer["agree"]["ts"]
    ends = [sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["pid"] == r) for r in (0, 1)]
    for spans in ends:
        assert all(before[1] <= after[0] + 1e-3 for before, after in itertools.pairwise(spans))


def test_a_rank_gives_signs_of_life_while_it_hands_out_a_trace(pool):
    """A million steps take seconds to hand out, and a rank that is silent for as long is ended as frozen."""
    actor = actors_of(pool)[0]

    def be_slow(engine: RankEngine) -> None:
        engine.trace = lambda: (time.sleep(5), delattr(engine, "trace"), engine.trace())[-1]

    in_rank(pool, 0, be_slow)
    handed_out = actor.trace.remote()
    for _ in range(3):
        ray.get(actor.clock.remote(), timeout=2)
    assert not ray.wait([handed_out], timeout=0)[0]
    assert ray.get(handed_out).events


def test_a_rank_remembers_the_last_steps_and_their_late_stages():
    trace = StepTrace(num_steps=3)
    for step in range(5):
        trace.add(TraceEvent("launch", step, step, step + 0.5, "decode", 1, None))
        if step:
            trace.add(TraceEvent("wait", step - 1, step + 0.6, step + 0.7, "decode", 1, None))
    trace.add(TraceEvent("wait", 0, 9.0, 9.1, "decode", 1, None))
    read = trace.read(rank=1)
    assert read.dropped_steps == 2
    assert [(event.stage, event.step) for event in read.events] == [
        ("launch", 2), ("launch", 3), ("wait", 2), ("launch", 4), ("wait", 3),
    ]  # fmt: skip


def test_a_clock_is_read_from_the_fastest_answer():
    offset = offset_of([(10.0, 103.0, 16.0), (20.0, 110.5, 21.0), (30.0, 121.9, 32.0)])
    assert offset == 20.5 - 110.5


def test_what_others_wrote_commands_no_terminal_that_shows_a_status(pool):
    status = msgspec.structs.replace(pool.status(), failure="\x1b]0;mine\x07 lost", notice="\x1b[2J gone")
    piped = io.StringIO()
    print_status(status, Console(file=piped, width=200))
    assert r"failed: \x1b]0;mine\x07 lost" in piped.getvalue()
    assert "\x1b" not in piped.getvalue()


def test_status_shows_ranks_batches_and_graphs(pool):
    status = pool.status()
    console = Console(width=200, record=True)
    print_status(status, console)
    text = console.export_text()
    assert text.startswith(f"ready: {RANKS} ranks on 1 node(s)")
    for place in status.places:
        assert re.search(rf"{place.rank}\s+│ {place.node_id[:8]} │ {place.address} │ {place.pid} ", text)
    tokens = sum(one.generated_tokens for one in status.stats)
    assert tokens > 0
    assert tokens % (len(PROMPTS) * NEW_TOKENS) == 0, "those of whole generations, of other tests too"
    for one in status.stats:
        [row] = re.findall(
            rf"^│ {one.dp_rank}\s+│\s+0 │\s+0 │\s+0% │\s+{one.generated_tokens} │.*$", text, re.MULTILINE
        )
        assert f" {one.steps} " in row
    assert "steps replayed" in text


def test_a_status_that_is_piped_is_as_wide_as_it_needs():
    """Where there is no terminal there are 80 columns, in which addresses and names of columns were cut short."""
    place = RankPlace(rank=0, node_id="0123456789abcdef", address="192.168.100.200", pid=4242424, gpu_ids=("0", "1"))
    loads = (LoadReport(0, *[2**30 + 2**28] * 3, 4096, 2**20, 1.0, 0, 0),)
    status = PoolStatus("ready", None, (place,), loads, (RankStats(0),), (), 1.0, None, 0, None, 0, "node", 1, 0)
    piped = io.StringIO()
    print_status(status, Console(file=piped, width=80))
    assert "│ 01234567 │ 192.168.100.200 │ 4242424 │ 0, 1 │" in piped.getvalue()
    assert "exchange buffers" in piped.getvalue()
    assert "…" not in piped.getvalue()


def test_logs_of_ranks_say_pool_rank_and_step(pool):
    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    for place in pool.status().places:
        [log] = folder.glob(f"worker-*-{place.pid}.err")
        lines = [line for line in log.read_text().splitlines() if line.startswith("time=")]
        pools = {re.search(r" pool=(\w+) ", line)[1] for line in lines}
        assert len(pools) == 1
        assert pools != {"none"}
        begins = [line for line in lines if line.endswith('logger=workers.engine message="the loop begins"')]
        assert len(begins) == 1
        assert f" level=info pool={pools.pop()} rank={place.rank} step=0 " in begins[0]
        paused = [line for line in lines if line.endswith('message="all ranks pause"')]
        assert int(re.search(r" step=(\d+) ", paused[-1])[1]) > NEW_TOKENS


def test_a_log_line_stays_one_line_that_can_be_split():
    record = logging.LogRecord("expert_pool.workers.x", logging.ERROR, "", 1, 'a "quoted"\nline = %d', (3,), None)
    line = KeyValueFormatter("my pool", 2, lambda: 17).format(record)
    assert re.fullmatch(
        r'time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z level=error pool="my pool" rank=2 step=17 logger=workers\.x '
        r'message="a \\"quoted\\"\\nline = 3"',
        line,
    )


def routed(engine: RankEngine, arrivals: list[dict[int, list[list[int]]]]) -> Any:
    """What this rank generated, its steps, and how often it says experts were chosen."""
    generated = run_script(engine, arrivals, new_tokens=6)
    counts = engine.expert_counts()
    replayed = sum(step.graph is not None for step in generated.steps)
    return generated.token_ids, replayed, None if counts is None else (counts.num_experts, array("q", counts.counts))


@torch.inference_mode()
def choices_of_transformers(path: str, sequences: list[list[int]]) -> list[Counter[int]]:
    """How often every expert of each layer is chosen, as the unchanged model routes these tokens."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    chosen: list[Counter[int]] = [Counter() for _ in model.model.layers]
    for layer, block in enumerate(model.model.layers):
        block.mlp.experts.register_forward_pre_hook(
            lambda _, args, layer=layer: chosen[layer].update(args[1].flatten().tolist())
        )
    for tokens in sequences:
        model(torch.tensor([tokens]), use_cache=False)
    return chosen


@pytest.mark.parametrize("attn_tp_size", [1, 2])
def test_expert_load_is_what_transformers_routes(attn_tp_size, random_models):
    """Prefill and decode, replayed on padding too; every rank busy in every step, so that none adds dummy tokens."""
    config = PoolConfig(
        model=random_models["qwen3_moe"],
        ranks=2,
        attn_tp_size=attn_tp_size,
        limits=Limits(max_running_requests=4, chunked_prefill_size=32),
        worker=WorkerConfig(expert_load=True),
    )
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    arrivals = [{0: [prompt]} for prompt in prompts] if attn_tp_size == 1 else [{0: prompts}]
    results = run_on_ranks(config, routed, arrivals)
    tokens = {key: ids for token_ids, _, _ in results for key, ids in token_ids.items()}
    assert all(replayed > 0 for _, replayed, _ in results)
    reported = [counts for _, _, counts in results if counts is not None]
    assert len(reported) == 2 // attn_tp_size
    sequences = [prompt + list(tokens[key])[:-1] for key, prompt in enumerate(prompts)]
    expected = choices_of_transformers(config.model, sequences)
    assert {num_experts for num_experts, _ in reported} == {(8,) * len(expected)}
    summed = [sum(values) for values in zip(*(counts for _, counts in reported), strict=True)]
    assert summed == [chosen[expert] for chosen in expected for expert in range(8)]


def test_imbalance_is_the_largest_over_the_mean():
    assert imbalance([4, 4, 4, 4]) == 1.0
    assert imbalance([8, 0, 0, 0]) == 4.0


def test_counts_go_on_after_ranks_were_started_anew(monkeypatch):
    """Counters of Ray only grow, while those of new ranks begin at zero; gauges of ranks that are gone fall to zero."""
    metrics = PoolMetrics("pool")
    said: list[tuple[str, float, Any]] = []
    for name, metric in metric_objects_of(metrics).items():
        monkeypatch.setattr(metric, "_record", lambda value, tags=None, name=name: said.append((name, value, tags)))
    metrics.begin(Layout(world_size=2))
    metrics.report(RankStats(1, steps=10, generated_tokens=30, num_kv_blocks=4, step_times=(0, 10)))
    metrics.restarted()
    metrics.begin(Layout(world_size=1))
    metrics.report(RankStats(0, steps=4, generated_tokens=5, running=2, step_times=(1, 3)))
    metrics.report(RankStats(0, steps=6, generated_tokens=9, running=2, step_times=(1, 5)))  # within the same second
    metrics.report(RankStats(0, steps=7, generated_tokens=11, step_times=(1, 6)))
    counted = [(name, value) for name, value, _ in said if name in ("expert_pool_steps", "expert_pool_restarts")]
    assert counted == [
        ("expert_pool_steps", 10),
        ("expert_pool_restarts", 1.0),
        ("expert_pool_steps", 4),
        ("expert_pool_steps", 3),
    ]
    assert sum(value for name, value, _ in said if name == "expert_pool_generated_tokens") == 30 + 11
    assert sum(name == "expert_pool_step_time_seconds" for name, _, _ in said) == 10 + 7
    running = [(value, tags["dp_rank"]) for name, value, tags in said if name == "expert_pool_requests_running"]
    assert running == [(0, "1"), (0, "1"), (2, "0"), (0, "0")]
