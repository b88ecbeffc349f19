"""Real ranks measure their ways to the experts: all take the same, whatever each of them saw."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from expert_pool.cluster import CacheConfig, ExpertPool, Limits, PoolConfig
from expert_pool.dispatch.dispatchers.alltoall import AllToAllDispatcher
from expert_pool.dispatch.dispatchers.contract import Dispatched
from expert_pool.dispatch.errors import ConfigError
from expert_pool.dispatch.expert_path import ExpertPath
from expert_pool.dispatch.experts.pairs.quack_gemm import GemmTile
from expert_pool.dispatch.experts.pairs.tile_table import TileTable, agree_on
from expert_pool.dispatch.experts.torch_experts import TorchExperts
from expert_pool.dispatch.moe_layer import MoeLayer
from expert_pool.dispatch.paths.kept_measurements import KeptMeasurements
from expert_pool.dispatch.paths.maker import PathMaker
from expert_pool.dispatch.paths.table import PathName
from expert_pool.dispatch.paths.tuning import MEASURE_ALWAYS, TableRow, Tuning
from expert_pool.dispatch.probe import HostGroup, attempt
from expert_pool.dispatch.registry import register
from expert_pool.graphs.backend import StaticReplayBackend
from expert_pool.graphs.plan import plan_captures
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.path_selection.calibration import calibrate
from expert_pool.workers.path_selection.candidates import kept_measurements, loading_path, path_check, path_maker
from expert_pool.workers.path_selection.layer_timer import LayerTimer
from expert_pool.workers.path_selection.selection import PathSelection, Settled
from expert_pool.workers.start.code_digest import code_digest
from handle import exchange_of, path_of, replaced, target_of
from plain_ranks import ForkedRanks
from rank_faults import OTHER_TABLE, other_table
from rank_insides import run_script
from running_disagreement import WITHIN_S, disagree_while_running

MIXED = (TableRow(4, "alltoall+torch"), TableRow(16, "allgather+torch"))
BUCKETS = (1, 4, 16)
PROMPTS = [[5, 17, 42], [9, 9]]
NEW_TOKENS = 8
FAULTY_MEETING = 10


def config_of(model: str, tuning: Tuning) -> PoolConfig:
    return PoolConfig(
        model=model,
        ranks=2,
        dispatch="measured",
        limits=Limits(max_running_requests=4, cuda_graph_bs=(1, 4), chunked_prefill_size=16),
        cache=CacheConfig(num_tokens=1024),
        tuning=tuning,
    )


@pytest.fixture(scope="module")
def rank_set(random_models: dict[str, str]) -> Iterator[ForkedRanks]:
    """Two ranks with a pinned table of two paths; tests have them choose again."""
    with ForkedRanks(config_of(random_models["qwen3_moe"], Tuning(table=MIXED))) as ranks:
        yield ranks


def choose_again(engine: RankEngine, **tuning: Any) -> Settled:
    """What this rank's path would be under another tuning; the engine keeps the one it has."""
    target = target_of(engine)
    return choice_of(engine, **tuning).settle(target.model, exchange_of(engine))


def choice_of(engine: RankEngine, **tuning: Any) -> PathSelection:
    config = msgspec.structs.replace(engine.config, tuning=Tuning(repeats=1, **tuning))
    world = engine.joined.world
    hosts = HostGroup(engine.joined.host_group, engine.rank)
    kept = kept_measurements(config, hosts, engine.device)
    maker = path_maker(config, engine.rank, engine.joined.collectives, world, engine.device, kept)
    check = path_check(config, hosts, exchange_of(engine).path, engine.device)
    return PathSelection(config, maker, hosts, StaticReplayBackend(), check)


def times(by_path: dict[str, tuple[float, ...]]) -> Callable[..., float]:
    """In place of a clock: what a rank measures, by path and bucket."""

    def microseconds(timer: LayerTimer, path: ExpertPath, layer: MoeLayer, num_rows: int) -> float:
        return by_path[path.held.dispatcher][BUCKETS.index(num_rows)]

    return microseconds


SEEN_BY_RANK = (
    {"allgather": (1.0, 1.0, 5.0), "alltoall": (2.0, 4.0, 4.0)},
    {"allgather": (9.0, 1.0, 5.0), "alltoall": (2.0, 2.0, 4.0)},
)


def table_though_clocks_differ(engine: RankEngine) -> list[tuple[int, str, float | None]]:
    with replaced(LayerTimer, "microseconds", times(SEEN_BY_RANK[engine.rank])):
        settled = choose_again(engine)
    return [(row.rows, row.path, row.microseconds) for row in settled.path.table.rows]


def test_all_ranks_take_what_is_best_on_the_slowest_of_them(rank_set):
    expected = [(1, "alltoall+torch", 2.0), (4, "allgather+torch", 1.0), (16, "alltoall+torch", 4.0)]
    assert rank_set.call(table_though_clocks_differ) == [expected] * 2


def really_measured(engine: RankEngine) -> tuple[str, tuple[str, ...], bool]:
    settled = choose_again(engine)
    took = [row.microseconds for row in settled.path.table.rows]
    return settled.path.held.tuning, settled.lines, all(time is not None and time > 0 for time in took)


def test_what_is_really_measured_is_one_table_for_all(rank_set):
    first, second = rank_set.call(really_measured)
    assert first == second
    assert first[2]
    assert first[1][0].startswith("experts by table, measured, best of 2 paths")


def issued(engine: RankEngine) -> tuple[dict[int, tuple[int, ...]], list[tuple[int, tuple[str, ...]]]]:
    arrivals = [{0: [prompt]} for prompt in PROMPTS]
    generated = run_script(engine, arrivals, NEW_TOKENS)
    steps = [(step.padded[0], tuple(call.op for call in step.collectives)) for step in generated.steps]
    return generated.token_ids, steps


def test_each_step_takes_the_path_of_its_rows_and_generates_the_same(rank_set, references):
    tokens: dict[int, tuple[int, ...]] = {}
    for generated, steps in rank_set.call(issued):
        tokens |= generated
        assert {rows for rows, _ in steps} == {1, 16}
        for rows, calls in steps:
            assert set(calls[::2]) == {"all_to_all" if rows <= 4 else "all_gather"}
    for key, prompt in enumerate(PROMPTS):
        expected = references["qwen3_moe"].greedy(prompt, NEW_TOKENS)
        assert tokens[key][: len(expected)] == expected


def tuning_of_records(engine: RankEngine) -> tuple[str, set[str]]:
    return path_of(engine).held.tuning, {
        frozen.held.tuning for frozen in engine.graphs.rehearse(plan_captures(engine.config.limits))
    }


def test_the_table_is_part_of_what_a_recording_freezes(rank_set):
    for tuning, recorded in rank_set.call(tuning_of_records):
        assert tuning == "all layers to 4: alltoall+torch; all layers to 16: allgather+torch"
        assert recorded == {tuning}


def test_a_rank_with_another_table_is_an_error_on_every_rank(rank_set):
    table = "all layers to 4: alltoall+torch; all layers to 16: allgather+torch"
    for message, seconds, _ in rank_set.call(disagree_while_running, other_table, 1):
        assert f"tuning differs (rank 0: {table}, rank 1: {OTHER_TABLE})" in message
        assert seconds < WITHIN_S


def never(*_: object) -> float:
    raise AssertionError("measured again")


def twice_with_a_cache(engine: RankEngine, path: str) -> tuple[str, str, str]:
    first = choose_again(engine, cache=path)
    with replaced(LayerTimer, "microseconds", never):
        second = choose_again(engine, cache=path)
    return first.path.held.tuning, second.path.held.tuning, second.lines[0]


def test_a_cached_table_is_taken_without_measuring(rank_set, tmp_path):
    file = str(tmp_path / "tables" / "mine.json")
    for first, second, line in rank_set.call(twice_with_a_cache, file):
        assert first == second
        assert f"from tuning.cache={file}" in line
    [(key, rows)] = msgspec.json.decode(Path(file).read_bytes()).items()
    assert "2 x 1 ranks; 3 x (8 x 64 x 32 top-2); float32" in key
    assert f"code {code_digest()}; plugins " in key
    assert [row["rows"] for row in rows] == list(BUCKETS)


def times_measured(engine: RankEngine, cache: str | None) -> list[str]:
    """How two starts on this rank come by their table."""
    return [choose_again(engine, cache=cache).lines[0].split(";")[0] for _ in range(2)]


def test_on_cpus_and_where_it_is_off_every_start_measures(rank_set):
    for cache in (None, MEASURE_ALWAYS):
        measured = "experts by table, measured, best of 2 paths"
        assert rank_set.call(times_measured, cache) == [[measured] * 2] * 2


class TilesOf:
    """In place of a measurement: a table, and how often it was asked for."""

    def __init__(self, num_rows: int):
        self.num_asked = 0
        self._table = TileTable((num_rows,), ((num_rows, 2 * num_rows),))

    def __call__(self) -> TileTable[int]:
        self.num_asked += 1
        return self._table


def tiles_of_two_starts(
    engine: RankEngine, folder: str, path: str | None, keys: tuple[str, ...]
) -> tuple[list[TileTable[int]], int]:
    hosts = HostGroup(engine.joined.host_group, engine.rank)
    tune = TilesOf(10 + engine.rank)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        tables = [agree_on(hosts, tune, int, KeptMeasurements(path, "this GPU", hosts), key) for key in keys]
    return tables, tune.num_asked


@pytest.mark.parametrize("is_default", [True, False])
def test_tiles_are_those_that_rank_0_found_at_an_earlier_start(rank_set, tmp_path, is_default):
    path = None if is_default else str(tmp_path / "mine.json")
    answers = rank_set.call(tiles_of_two_starts, str(tmp_path), path, ("a layer", "a layer", "another"))
    assert answers == [([TileTable((10,), ((10, 20),))] * 3, 2)] * 2
    assert (tmp_path / ("expert_pool/measured.json" if is_default else "mine.json")).is_file()


@pytest.mark.parametrize("content", ["{", '{"a layer; this GPU": {"num_rows": ["x"], "tiles": []}}'])
def test_a_file_that_nobody_named_is_passed_over_where_it_is_broken(rank_set, tmp_path, content):
    file = tmp_path / "expert_pool" / "measured.json"
    file.parent.mkdir()
    file.write_text(content, "utf-8")
    answers = rank_set.call(tiles_of_two_starts, str(tmp_path), None, ("a layer",))
    assert answers == [([TileTable((10,), ((10, 20),))], 1)] * 2


def test_a_folder_that_cannot_be_written_is_passed_over_where_nobody_named_it(rank_set, tmp_path):
    (tmp_path / "expert_pool").write_text("no folder", "utf-8")
    answers = rank_set.call(tiles_of_two_starts, str(tmp_path), None, ("a layer", "a layer"))
    assert answers == [([TileTable((10,), ((10, 20),))] * 2, 2)] * 2


def tiles_though_one_failed(engine: RankEngine, path: str) -> str:
    hosts = HostGroup(engine.joined.host_group, engine.rank)

    def build() -> TileTable[int]:
        if engine.rank == 1:
            raise ValueError("no memory")
        return agree_on(hosts, TilesOf(10), int, KeptMeasurements(path, "this GPU", hosts), "a layer")

    return str(attempt(hosts, "tiles", build))


def test_a_rank_that_failed_before_keeps_no_other_from_its_tiles_for_ever(rank_set, tmp_path):
    answers = rank_set.call(tiles_though_one_failed, str(tmp_path / "mine.json"), deadline_s=WITHIN_S)
    assert answers == ["tiles dropped on all ranks: rank 1: ValueError: no memory"] * 2


def refusal_of(engine: RankEngine, tuning: dict[str, Any]) -> str:
    try:
        choose_again(engine, **tuning)
    except ConfigError as error:
        return str(error)
    return "nothing was refused"


def test_a_cache_that_rank_0_cannot_read_is_refused_on_every_rank(rank_set, tmp_path):
    file = tmp_path / "broken.json"
    file.write_text("{", "utf-8")
    messages = rank_set.call(refusal_of, {"cache": str(file)})
    assert messages[0] == messages[1]
    assert f"tuning.cache='{file}' cannot be read" in messages[0]


def without_a_home(engine: RankEngine, path: str) -> str:
    """What is refused where the ranks but the first run as a user without a home folder."""

    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    with ExitStack() as faults:
        if engine.rank > 0:
            faults.enter_context(replaced(Path, "expanduser", homeless))
        return refusal_of(engine, {"cache": path})


def test_only_rank_0_needs_to_find_the_cache(rank_set, tmp_path):
    assert (
        rank_set.call(without_a_home, str(tmp_path / "mine.json"), deadline_s=WITHIN_S) == ["nothing was refused"] * 2
    )
    messages = rank_set.call(without_a_home, "~no-such-user/mine.json", deadline_s=WITHIN_S)
    assert messages[0] == messages[1]
    assert messages[0].startswith("tuning.cache='~no-such-user/mine.json' cannot be read: ")


def test_a_pinned_table_above_the_bound_is_refused_on_every_rank(rank_set):
    messages = rank_set.call(refusal_of, {"table": MIXED, "max_bytes": 100})
    assert messages[0] == messages[1]
    assert "above tuning.max_bytes=100: raise it, or name fewer paths" in messages[0]


def without(engine: RankEngine, lost: str, how: str, faulty_rank: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Choose among paths of which one rank cannot take one."""
    refusal, make = PathMaker.refusal, PathMaker.make

    def refuses(maker: PathMaker, name: PathName, *arguments: Any) -> str | None:
        return "has no such thing" if str(name) == lost else refusal(maker, name, *arguments)

    def cannot_tell(maker: PathMaker, name: PathName, *arguments: Any) -> str | None:
        if str(name) == lost:
            raise OSError("has no such thing")
        return refusal(maker, name, *arguments)

    def raises(maker: PathMaker, name: PathName) -> ExpertPath:
        if str(name) == lost:
            raise RuntimeError("has no such thing")
        return make(maker, name)

    with ExitStack() as faults:
        if engine.rank == faulty_rank:
            fault = {"refuses": refuses, "cannot tell": cannot_tell, "raises": raises}[how]
            faults.enter_context(replaced(PathMaker, "make" if fault is raises else "refusal", fault))
        settled = choose_again(engine)
    return settled.path.table.names, settled.lines


@pytest.mark.parametrize(
    ("how", "reason"), [("refuses", ""), ("cannot tell", "OSError: "), ("raises", "RuntimeError: ")]
)
def test_a_path_that_one_rank_cannot_take_is_dropped_on_all_with_the_reason(how, reason, rank_set):
    for names, lines in rank_set.call(without, "alltoall+torch", how, 1):
        assert names == ("allgather+torch",)
        assert f"alltoall+torch dropped on all ranks: rank 1: {reason}has no such thing" in lines
        assert lines[-1] == "all ranks fall back to allgather+torch"


def with_rows_wrong_on_one(engine: RankEngine, factor: float, tuning: dict[str, Any]) -> tuple[str, ...] | str:
    """Choose where one rank's all-to-all brings back other numbers, without a word."""
    combine = AllToAllDispatcher.combine

    def other_numbers(dispatcher: AllToAllDispatcher, y_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        return factor * combine(dispatcher, y_RH, dispatched)

    with ExitStack() as faults:
        if engine.rank == 1:
            faults.enter_context(replaced(AllToAllDispatcher, "combine", other_numbers))
        try:
            return choose_again(engine, **tuning).lines
        except ConfigError as error:
            return str(error)


@pytest.mark.parametrize(("factor", "error"), [(1.05, "0.05"), (0.0, "1"), (float("nan"), "inf")])
def test_a_path_that_computes_something_else_is_dropped_on_all_with_the_error(factor, error, rank_set):
    reason = (
        "alltoall+torch dropped on all ranks: rank 0: ConfigError: on rank 1 it computes model.layers.0.mlp.experts "
        f"with a relative error of {error} to the plain experts, 0.03 at most can be rounding"
    )
    for lines in rank_set.call(with_rows_wrong_on_one, factor, {}):
        assert reason in lines
        assert lines[-1] == "all ranks fall back to allgather+torch"
    messages = rank_set.call(with_rows_wrong_on_one, factor, {"table": MIXED})
    assert messages == [f"the table pinned by tuning.table cannot run: {reason}"] * 2


def cached_and_then_wrong(engine: RankEngine, file: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a cached table names, and what is taken once one of its paths computes something else."""
    with replaced(LayerTimer, "microseconds", times(SEEN_BY_RANK[engine.rank])):
        cached = choose_again(engine, cache=file).path.table.names
        lines = with_rows_wrong_on_one(engine, 0.0, {"cache": file})
    assert isinstance(lines, tuple)
    return cached, lines


def test_a_cached_table_with_a_path_that_fails_is_measured_anew(rank_set, tmp_path):
    for cached, lines in rank_set.call(cached_and_then_wrong, str(tmp_path / "mine.json")):
        assert cached == ("alltoall+torch", "allgather+torch")
        assert lines[0].startswith("experts by table, measured, best of 1 paths")
        assert lines[-1] == "all ranks fall back to allgather+torch"


def failing_while_it_measures(engine: RankEngine, faulty_rank: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """One rank fails where all are about to replay what they recorded; the others wait for it there."""
    meet = HostGroup.meet
    met = [0]

    def fails(group: HostGroup) -> None:
        met[0] += 1
        if met[0] == FAULTY_MEETING:
            raise RuntimeError("out of memory")
        meet(group)

    with ExitStack() as faults:
        if engine.rank == faulty_rank:
            faults.enter_context(replaced(HostGroup, "meet", fails))
        settled = choose_again(engine)
    return settled.path.table.names, settled.lines


@pytest.mark.parametrize("faulty_rank", [0, 1])
def test_a_rank_that_fails_while_all_measure_keeps_nobody_waiting(faulty_rank, rank_set):
    for names, lines in rank_set.call(failing_while_it_measures, faulty_rank, deadline_s=WITHIN_S):
        assert names == ("alltoall+torch",)
        assert f"allgather+torch dropped on all ranks: rank {faulty_rank}: RuntimeError: out of memory" in lines


def failing_while_it_tunes(engine: RankEngine, faulty_rank: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Experts that agree on tiles; one rank fails at its first before it comes to that, and the others wait there."""
    tile = GemmTile(64, 128, pingpong=True)
    tunings = itertools.count()

    def tune() -> TileTable[GemmTile]:
        if next(tunings) == 0 and engine.rank == faulty_rank:
            raise RuntimeError("no tile runs")
        return TileTable((16,), ((tile, tile),))

    def prepare(experts: TorchExperts, group: HostGroup) -> None:
        agree_on(group, tune, GemmTile)

    with replaced(TorchExperts, "prepare", prepare):
        settled = choose_again(engine)
    return settled.path.table.names, settled.lines


@pytest.mark.parametrize("faulty_rank", [0, 1])
def test_a_rank_that_fails_while_all_tune_keeps_nobody_waiting(faulty_rank, rank_set):
    for names, lines in rank_set.call(failing_while_it_tunes, faulty_rank, deadline_s=WITHIN_S):
        assert names == ("alltoall+torch",)
        assert f"allgather+torch dropped on all ranks: rank {faulty_rank}: RuntimeError: no tile runs" in lines


def out_of_reach(engine: RankEngine) -> str:
    """What is refused where no path that is left reaches the largest step."""

    def microseconds(timer: LayerTimer, path: ExpertPath, layer: MoeLayer, num_rows: int) -> float:
        if path.held.dispatcher == "alltoall":
            raise RuntimeError("out of memory")
        return 1.0 if num_rows < BUCKETS[-1] else float("inf")

    with replaced(LayerTimer, "microseconds", microseconds):
        return refusal_of(engine, {})


def test_where_no_path_reaches_the_largest_step_the_dropped_ones_are_named(rank_set):
    for message in rank_set.call(out_of_reach, deadline_s=WITHIN_S):
        assert message == (
            "none of the paths allgather+torch reaches 16 rows a rank; "
            "alltoall+torch dropped on all ranks: rank 0: RuntimeError: out of memory"
        )


def pinned_but_refused(engine: RankEngine) -> str:
    refusal = PathMaker.refusal
    with ExitStack() as faults:
        if engine.rank == 1:
            faults.enter_context(
                replaced(PathMaker, "refusal", lambda maker, name, *rest: refusal(maker, name, *rest) or "cannot")
            )
        return refusal_of(engine, {"table": MIXED})


def test_a_pinned_path_that_a_rank_cannot_take_is_an_error_and_not_replaced(rank_set):
    for message in rank_set.call(pinned_but_refused):
        assert message.startswith(
            "the table pinned by tuning.table cannot run: alltoall+torch dropped on all ranks: rank 1: cannot"
        )


@pytest.mark.long
def test_the_table_is_shown_at_start_and_in_the_pools_status(random_models):
    lines: list[str] = []
    config = config_of(random_models["qwen3_moe"], Tuning(table=MIXED))
    with ExpertPool.launch(msgspec.structs.replace(config, address="local"), report=lines.append) as pool:
        loads = pool.status().loads
    shown = ("  all layers, up to 4 rows a rank: alltoall+torch", "  all layers, up to 16 rows a rank: allgather+torch")
    assert set(shown) <= set(lines)
    assert all(load.experts[1:] == shown for load in loads)


def scales_of(engine: RankEngine) -> list[tuple[float, float]]:
    target = target_of(engine)
    maker = path_maker(engine.config, engine.rank, engine.joined.collectives, engine.joined.world, engine.device)
    group = HostGroup(engine.joined.host_group, engine.rank)
    with replaced(exchange_of(engine), "path", loading_path(engine.config, maker)):
        return calibrate(engine.config.spec, target.model, exchange_of(engine), group, engine.device).scales


def scales_with_nan_on_one(engine: RankEngine) -> str:
    weights = exchange_of(engine).layers[1].weights.stored["gate_up"]
    kept = weights.detach().clone()
    try:
        if engine.rank == 1:
            weights.data[0, 0, 0] = float("nan")
        scales_of(engine)
    except ConfigError as error:
        return str(error)
    finally:
        weights.data.copy_(kept)
    return "nothing was refused"


def test_a_layer_without_finite_numbers_has_no_fp8_scale_and_every_rank_says_so(rank_set):
    first, second = rank_set.call(scales_with_nan_on_one)
    assert first == second
    assert first.startswith("quantisation='fp8' has no scale for model.layers.1.mlp.experts: on random tokens")


def test_fp8_scales_are_the_same_numbers_on_every_rank_and_cover_what_the_model_computes(rank_set):
    first, second = rank_set.call(scales_of)
    assert first == second
    assert len(first) == 3
    # RMS-normed rows of width 64: some magnitude lies above 1, none above 8; with room by 4, over e4m3's largest 448.
    assert all(4 / 448 < inputs < 32 / 448 and inner > 1e-6 for inputs, inner in first)


class DoubledExperts(TorchExperts):
    """Another backend that is right, under a name of its own."""

    kind = "again"
    is_plain = False
    name = "torch, again"


def alone(engine: RankEngine) -> tuple[list[str], str, dict[int, tuple[int, ...]]]:
    """What one rank takes where either of two backends is the faster, and the tokens that it then generates."""
    register(DoubledExperts)
    seen = {TorchExperts.name: (1.0, 5.0, 5.0), DoubledExperts.name: (3.0, 2.0, 5.0)}

    def microseconds(timer: LayerTimer, path: ExpertPath, layer: MoeLayer, num_rows: int) -> float:
        return seen[path.held.expert_backend][BUCKETS.index(num_rows)]

    with replaced(LayerTimer, "microseconds", microseconds):
        settled = choose_again(engine)
    exchange_of(engine).path = settled.path
    tokens = run_script(engine, [{0: PROMPTS[:1]}], NEW_TOKENS).token_ids
    return [f"{row.rows} {row.path}" for row in settled.path.table.rows], settled.lines[0], tokens


def test_one_rank_has_its_experts_to_choose_from(random_models, references):
    config = msgspec.structs.replace(config_of(random_models["qwen3_moe"], Tuning(repeats=1)), ranks=1)
    with ForkedRanks(config) as ranks:
        [(tuning, _)] = ranks.call(tuning_of_records)
        assert tuning == "all layers to 1: local+torch; all layers to 4: local+torch; all layers to 16: local+torch"
        [(table, line, tokens)] = ranks.call(alone)
    assert table == ["1 local+torch", "4 local+again", "16 local+torch"]
    assert line.startswith("experts by table, measured, best of 2 paths")
    expected = references["qwen3_moe"].greedy(PROMPTS[0], NEW_TOKENS)
    assert tokens[0][: len(expected)] == expected
