"""Tables of paths: which path a number of rows takes, what is kept within a bound, and tables that are refused."""

import math
import re

import msgspec
import pytest
from expert_pool.cluster import CacheConfig, Limits, PoolConfig, WorkerConfig, load_config
from expert_pool.cluster.config import configuration_problems, resolve, resolve_unchecked
from expert_pool.dispatch.budgets.layout import Layout
from expert_pool.dispatch.budgets.moe_shape import MoeShape
from expert_pool.dispatch.errors import ConfigError, GeometryError
from expert_pool.dispatch.paths.fastest import Measured, PathCost, choose
from expert_pool.dispatch.paths.table import PathName, PathTable, candidate_paths, measured_rows
from expert_pool.dispatch.paths.tuning import TableRow, Tuning
from expert_pool.workers.model.inspection import inspect_model
from expert_pool.workers.model.spec import ModelSpec

LIMITS = Limits(max_running_requests=8, cuda_graph_bs=(1, 8), chunked_prefill_size=64)
GPU = WorkerConfig(device="cuda")
BUCKETS = (8, 64, 256)
LAYER = "16 x 64 x 32 top-2"


def table(*rows: tuple[int, str]) -> tuple[TableRow, ...]:
    return tuple(TableRow(count, path) for count, path in rows)


def shape_in(spec: ModelSpec) -> str:
    """Of the first MoE layer; all are alike."""
    return spec.moe[0].text


def config_of(model: str, **settings) -> PoolConfig:
    settings = {"ranks": 2, "dispatch": "measured", "limits": LIMITS, "cache": CacheConfig(num_tokens=512)} | settings
    return PoolConfig(model=model, **settings)


@pytest.mark.parametrize("text", ["allgather+torch", "flashinfer+cutedsl", "mega@64"])
def test_a_path_is_read_as_it_is_written(text):
    assert str(PathName.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["mega", "mega@", "mega@0", "mega@x", "mega@064", "mega@٦٤", "flashinfer", "+torch", ""]
)
def test_what_names_no_path_is_refused_with_its_value(text):
    with pytest.raises(ConfigError, match=re.escape(repr(text))):
        PathName.parse(text)


def test_a_step_takes_the_first_row_that_holds_it():
    paths = PathTable(table((8, "a+b"), (64, "c+d")))
    assert [paths.path_for(LAYER, rows) for rows in (1, 8, 9, 64)] == ["a+b", "a+b", "c+d", "c+d"]
    with pytest.raises(GeometryError, match="no path for 65 rows"):
        paths.path_for(LAYER, 65)


def test_layers_of_different_shape_have_rows_of_their_own():
    other = MoeShape("experts", 8, 64, 2, "float32", intermediate_size=32).text
    paths = PathTable((TableRow(64, "a+b", LAYER), TableRow(64, "c+d", other)))
    assert (paths.path_for(LAYER, 3), paths.path_for(other, 3)) == ("a+b", "c+d")


def choice_of(times: dict[str, tuple[float, ...]], costs: dict[str, PathCost], max_bytes: int, copy_bytes: int = 0):
    return choose(BUCKETS, [Measured(LAYER, 2, times)], costs, copy_bytes, max_bytes)


def test_each_bucket_takes_its_fastest_path():
    times = {"a+b": (1.0, 9.0, 9.0), "c+d": (5.0, 2.0, 3.0)}
    costs = {name: PathCost({name: 10}, "as loaded") for name in times}
    choice = choice_of(times, costs, 100)
    assert [row.path for row in choice.table.rows] == ["a+b", "c+d", "c+d"]
    assert choice.num_bytes == 20
    assert [row.microseconds for row in choice.table.rows] == [1.0, 2.0, 3.0]


def test_the_path_that_is_missed_least_is_given_up_first():
    times = {"a+b": (1.0, 9.0, 9.0), "c+d": (5.0, 2.0, 3.0), "e+f": (1.5, 2.5, 3.5)}
    costs = {name: PathCost({name: 10}, "as loaded") for name in times}
    assert choice_of(times, costs, 19).table.names == ("e+f",)


def test_a_copy_of_the_weights_counts_where_layouts_are_kept_side_by_side():
    times = {"a+b": (1.0, 9.0, 9.0), "mega@256": (5.0, 2.0, 3.0)}
    costs = {"a+b": PathCost({"a": 4, "b": 6}, "as loaded"), "mega@256": PathCost({"mega@256": 10}, "mega")}
    assert choice_of(times, costs, 120, copy_bytes=100).table.names == ("a+b", "mega@256")
    assert choice_of(times, costs, 119, copy_bytes=100).table.names == ("mega@256",)


def test_buffers_that_paths_share_count_once():
    times = {"a+b": (1.0, 9.0, 9.0), "a+d": (5.0, 2.0, 3.0)}
    costs = {name: PathCost({"a": 10, name[2:]: 3}, "as loaded") for name in times}
    assert choice_of(times, costs, 16).num_bytes == 16


def test_a_path_that_gains_less_than_two_measurements_differ_is_not_kept():
    times = {"a+b": (1.0, 9.0, 9.0), "c+d": (1.01, 9.0, 9.0)}
    costs = {name: PathCost({name: 10}, "as loaded") for name in times}
    assert len(choice_of(times, costs, 100).table.names) == 1


def test_a_kernel_serves_no_more_rows_than_it_was_built_for():
    times = {"mega@8": (1.0, math.inf, math.inf), "a+b": (5.0, 5.0, 5.0)}
    costs = {name: PathCost({name: 10}, "as loaded") for name in times}
    assert choice_of(times, costs, 10).table.names == ("a+b",)
    message = re.escape("tuning.max_bytes=9 holds no path that reaches 256 rows a rank: set it to 10")
    with pytest.raises(ConfigError, match=message):
        choice_of(times, costs, 9)


def test_where_no_path_reaches_every_step_no_bound_is_given_as_a_way_out():
    times = {"mega@8": (1.0, math.inf, math.inf), "mega@64": (1.0, 2.0, math.inf)}
    costs = {name: PathCost({name: 10}, "mega") for name in times}
    with pytest.raises(ConfigError, match=r"^none of the paths mega@8, mega@64 reaches 256 rows a rank$"):
        choice_of(times, costs, 100)


def test_candidates_on_gpus_are_kernels_of_several_capacities():
    names = candidate_paths(Tuning(), "cuda", "torch", "none", 512, 2)
    assert list(map(str, names[-4:])) == ["mega@8", "mega@64", "mega@256", "mega@512"]
    assert {"flashinfer+cutedsl", "allgather+torch"} <= set(map(str, names))
    fp8 = candidate_paths(Tuning(mega_capacities=(16, 9999)), "cuda", "torch", "fp8", 512, 2)
    assert list(map(str, fp8)) == ["mega@16", "mega@512"]


def test_experts_that_the_user_names_leave_no_others():
    assert list(map(str, candidate_paths(Tuning(), "cuda", "cutedsl", "none", 512, 2))) == ["flashinfer+cutedsl"]
    triton = list(map(str, candidate_paths(Tuning(), "cuda", "triton", "none", 512, 2)))
    assert triton == ["flashinfer+triton", "allgather+triton"]


def test_one_rank_has_every_expert_backend_to_choose_from_and_no_exchange():
    names = list(map(str, candidate_paths(Tuning(), "cuda", "torch", "none", 512, 1)))
    assert names == ["local+cutedsl", "local+triton", "local+torch"]
    assert list(map(str, candidate_paths(Tuning(), "cuda", "triton", "none", 512, 1))) == ["local+triton"]
    assert list(map(str, candidate_paths(Tuning(), "cpu", "torch", "none", 512, 1))) == ["local+torch"]


@pytest.mark.parametrize(
    ("settings", "dispatch"),
    [
        ({"dispatch": "auto", "worker": GPU}, "measured"),
        ({"dispatch": "auto", "worker": GPU, "experts": "triton", "dtype": "bfloat16"}, "local"),
        ({"dispatch": "auto", "worker": GPU, "experts": "torch"}, "local"),
        ({"dispatch": "allgather", "worker": GPU}, "local"),
        ({"dispatch": "auto"}, "local"),
        ({"dispatch": "measured"}, "measured"),
        ({"dispatch": "measured", "tuning": Tuning(table=table((64, "local+torch")))}, "measured"),
    ],
)
def test_one_rank_measures_on_gpus_unless_experts_are_named(settings, dispatch, tiny_moe):
    config = resolve(config_of(tiny_moe, ranks=1, **settings), inspect_model(tiny_moe, settings.get("dtype")))
    assert (config.dispatch, config.capacity) == (dispatch, 64)


@pytest.mark.parametrize("path", ["allgather+torch", "mega@64"])
def test_one_rank_refuses_a_table_with_an_exchange(path, tiny_moe):
    config = config_of(tiny_moe, ranks=1, worker=GPU, tuning=Tuning(table=table((64, path))))
    with pytest.raises(
        ConfigError, match=rf"path '{path}' does not exist on worker.device='cuda' with ranks=1".replace("+", r"\+")
    ):
        resolve(config, inspect_model(tiny_moe, None))


def test_every_graph_and_the_capacity_are_measured():
    assert measured_rows(LIMITS, Layout(2), 64) == (1, 8, 16, 32, 64)
    assert measured_rows(LIMITS, Layout(2, 2), 32) == (1, 4, 8, 16, 32)


def test_auto_measures_on_gpus_and_not_on_cpus(tiny_moe):
    spec = inspect_model(tiny_moe, None)
    config = config_of(tiny_moe, dispatch="auto")
    assert resolve(config, spec).dispatch == "allgather"
    on_gpus = resolve(msgspec.structs.replace(config, worker=GPU), spec)
    assert (on_gpus.dispatch, on_gpus.capacity) == ("measured", 64)


REFUSED_TABLES = {
    "unknown path": (table((64, "teleport+torch")), "path 'teleport+torch' does not exist on worker.device='cpu'"),
    "no path": (table((64, "mega")), "path 'mega' is neither"),
    "of another device": (table((64, "mega@64")), "path 'mega@64' does not exist on worker.device='cpu'"),
    "misses rows": (table((8, "allgather+torch")), "ends at 8 rows for all layers, and a step may have 64"),
    "leading zero": (table((64, "mega@064")), "path 'mega@064' is neither"),
    "mistyped shape": (
        (*table((64, "allgather+torch")), TableRow(64, "alltoall+torch", "8 x 64 x 23 top-2")),
        "no MoE layer of this model has shape '8 x 64 x 23 top-2': use one of 'SHAPE'",
    ),
    "misses a shape": (
        (TableRow(64, "alltoall+torch", "8 x 64 x 23 top-2"),),
        "no rows for MoE layers of shape 'SHAPE'",
    ),
    "falls": (table((64, "allgather+torch"), (8, "alltoall+torch")), "rows [64, 8] of all layers have to rise"),
}


@pytest.mark.parametrize("case", REFUSED_TABLES)
def test_a_pinned_table_that_cannot_serve_is_refused_with_its_value(case, tiny_moe):
    rows, message = REFUSED_TABLES[case]
    spec = inspect_model(tiny_moe, None)
    with pytest.raises(ConfigError, match=re.escape(message.replace("SHAPE", shape_in(spec)))):
        resolve(config_of(tiny_moe, tuning=Tuning(table=rows)), spec)


def test_a_pinned_table_with_rows_for_each_shape_is_taken(tiny_moe):
    spec = inspect_model(tiny_moe, None)
    config = config_of(tiny_moe, tuning=Tuning(table=(TableRow(64, "alltoall+torch", shape_in(spec)),)))
    assert configuration_problems(resolve_unchecked(config, spec)) == ()


def test_a_top_k_that_flashinfer_does_not_send_is_refused_where_it_is_named(tiny_moe):
    spec = inspect_model(tiny_moe, None)
    layers = tuple(msgspec.structs.replace(layer, top_k=5) for layer in spec.moe)
    spec = msgspec.structs.replace(spec, moe=layers)
    pinned = Tuning(table=table((64, "flashinfer+torch")))
    for settings, said in (
        ({"dispatch": "flashinfer"}, "dispatch='flashinfer'"),
        ({"tuning": pinned}, "tuning.table's path 'flashinfer+torch'"),
    ):
        [problem] = configuration_problems(resolve_unchecked(config_of(tiny_moe, worker=GPU, **settings), spec))
        assert problem.startswith(
            f"{said} cannot run {layers[0].name}: FlashInfer's all-to-all sends a token to one of"
        )
        assert "and not to 5" in problem
    for settings in ({"dispatch": "allgather"}, {"tuning": Tuning()}):
        assert configuration_problems(resolve_unchecked(config_of(tiny_moe, worker=GPU, **settings), spec)) == ()


def test_a_kernel_below_the_rows_of_its_line_is_refused(tiny_moe):
    config = config_of(tiny_moe, worker=GPU, tuning=Tuning(table=table((64, "mega@32"))))
    [problem] = configuration_problems(resolve_unchecked(config, inspect_model(tiny_moe, None)))
    assert problem == "tuning.table: mega@32 cannot take 64 rows: name mega@64 or more"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantisation": "fp8"}, "quantisation='fp8' does not run on worker.device='cpu'"),
        ({"quantisation": "fp8", "dispatch": "allgather"}, "alone, on 2 or more ranks, and dispatch is 'allgather'"),
        ({"quantisation": "fp8", "ranks": 1, "worker": GPU}, "dispatch is 'local' with ranks=1"),
        ({"quantisation": "fp8", "ranks": 1, "worker": GPU, "dispatch": "auto"}, "dispatch is 'local' with ranks=1"),
        ({"quantisation": "fp8_blockwise", "dispatch": "flashinfer", "worker": GPU}, "dispatch is 'flashinfer'"),
        ({"quantisation": "nvfp4", "dispatch": "mega", "worker": GPU}, "set dispatch to one of them"),
        ({"dispatch": "mega", "worker": GPU}, "takes bfloat16, the pool's dtype is float32"),
        ({"dispatch": "alltoall", "tuning": Tuning(table=table((64, "a+b")))}, "tuning.table is for dispatch"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, message, tiny_moe):
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolve(config_of(tiny_moe, **settings), inspect_model(tiny_moe, None))


@pytest.mark.parametrize(
    ("quantisation", "hidden", "intermediate", "refused"),
    [
        ("none", 256, 64, None),
        ("none", 384, 64, "hidden size 384 is no multiple of 256"),
        ("none", 256, 96, "intermediate size 96 is no multiple of 64"),
        ("fp8", 384, 128, None),
        ("fp8", 320, 128, "hidden size 320 is no multiple of 128"),
        ("fp8", 256, 64, "intermediate size 64 is no multiple of 128"),
        ("fp8_blockwise", 256, 64, "intermediate size 64 is no multiple of 128"),
    ],
)
def test_widths_that_the_mega_kernel_does_not_take_are_refused_before_anything_starts(
    quantisation, hidden, intermediate, refused, tiny_moe
):
    spec = inspect_model(tiny_moe, "bfloat16")
    layers = tuple(
        msgspec.structs.replace(layer, hidden_size=hidden, intermediate_size=intermediate) for layer in spec.moe
    )
    for dispatch in ("mega",) if quantisation == "none" else ("mega", "measured"):
        config = config_of(tiny_moe, dispatch=dispatch, quantisation=quantisation, worker=GPU, dtype="bfloat16")
        problems = configuration_problems(resolve_unchecked(config, msgspec.structs.replace(spec, moe=layers)))
        assert [refused in problem for problem in problems] == ([] if refused is None else [True])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_bytes": 0}, "tuning.max_bytes=0"),
        ({"mega_capacities": [0]}, "tuning.mega_capacities=[0]"),
        ({"mega_capacities": list(range(1, 12))}, "tuning.mega_capacities lists 11 numbers of rows, more than 10"),
        ({"table": []}, "tuning.table is empty"),
        ({"tabel": []}, "did you mean tuning.table"),
    ],
)
def test_a_mistyped_tuning_is_refused(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_config(None, {"model": "somewhere", "tuning": settings})
