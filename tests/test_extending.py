"""Whoever has another dispatcher, or other experts, writes one class and registers it: no file of the house names it.

A class of each is here. A module that registers the two, as a user's would, is named in `plugins`.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
import torch
from click.testing import CliRunner
from conftest import REPOSITORY
from expert_pool.cluster import ConfigError, ExpertPool, Limits, PoolConfig, SamplingParams
from expert_pool.cluster.cli.commands import main
from expert_pool.cluster.cli.plan_report import plan_pool
from expert_pool.cluster.config import resolve
from expert_pool.cluster.planning.validation import validate
from expert_pool.dispatch import registry
from expert_pool.dispatch.budgets.budget import exchange_rows
from expert_pool.dispatch.budgets.geometry import StepGeometry
from expert_pool.dispatch.budgets.path_settings import PathSettings, budget_for, rows_of
from expert_pool.dispatch.budgets.planned_buffer import PlannedBuffer
from expert_pool.dispatch.dispatchers.contract import INVALID_EXPERT_ID, Dispatched, check_rows
from expert_pool.dispatch.dispatchers.exchange import (
    ExchangeBuffers,
    PackedRows,
    return_to_senders,
    row_format_of,
)
from expert_pool.dispatch.dispatchers.exchange_dispatcher import ExchangeDispatcher
from expert_pool.dispatch.dtypes import dtype_bytes
from expert_pool.dispatch.errors import GeometryError
from expert_pool.dispatch.moe_layer import MoeLayer
from expert_pool.dispatch.paths.table import candidate_paths
from expert_pool.dispatch.paths.tuning import TableRow, Tuning
from expert_pool.dispatch.probe import HostGroup
from expert_pool.dispatch.way import DispatcherWay, ExpertsWay, FusedWay, RankParts, Way
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.model.inspection import inspect_model
from expert_pool.workers.rank_config import RankConfig
from handle import keep_registries
from plain_ranks import CONTEXT, DEADLINE_S, ForkedRanks
from rank_faults import OTHER_BACKEND, Fault, other_dispatcher, other_expert_backend
from running_disagreement import NEW_TOKENS, disagree_while_running
from running_disagreement import PROMPTS as ASKED

PLUGIN = "ways_from_elsewhere"
REGISTERS = """
from expert_pool.dispatch.registry import register
from test_extending import LoopedExperts, RelayDispatcher

register(RelayDispatcher)
register(LoopedExperts)
"""
WRITTEN_ELSEWHERE = """
import test_extending

RelayDispatcher = type("RelayDispatcher", (test_extending.RelayDispatcher,), {"__module__": __name__})
LoopedExperts = type("LoopedExperts", (test_extending.LoopedExperts,), {"__module__": __name__})
"""
FOLDERS = (REPOSITORY / "tests", REPOSITORY / "tests" / "support")
PROMPTS = [[5, 17, 42], [9, 9], [100]]


class RelayDispatcher(DispatcherWay):
    """Sends every row to every rank, in an all-to-all of copies."""

    kind = name = "relay"

    @classmethod
    def problems(cls, settings: PathSettings, setting: str) -> list[str]:
        shared = settings.layout.attn_tp_size
        return [f"{setting} shares no batch, and attn_tp_size is {shared}: set it to 1"] if shared > 1 else []

    @classmethod
    def planned(cls, settings: PathSettings) -> list[PlannedBuffer]:
        rows, num_bytes = exchange_rows(settings.layout, settings.capacity), budget_for(settings).total_bytes
        return [PlannedBuffer("dispatch: relay", rows, num_bytes, rows_of(settings))]

    @classmethod
    def make(cls, parts: RankParts) -> RelayDispatcher:
        return cls(parts)

    def __init__(self, parts: RankParts):
        self._parts = parts
        self._buffers = ExchangeBuffers(budget_for(parts.settings), parts.device)
        self.capacity, self.num_bytes = parts.settings.capacity, self._buffers.num_bytes

    def dispatch(
        self,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        expert_weights_TK: torch.Tensor,
        geometry: StepGeometry,
        num_local_experts: int,
    ) -> Dispatched:
        rank, slots = self._parts.rank, list(geometry.slot_sizes)
        check_rows(x_TH, expert_ids_TK, geometry, rank, self.capacity)
        num_rows, copies = x_TH.shape[0], len(slots)
        row_format = row_format_of(x_TH, expert_ids_TK, expert_weights_TK.dtype)
        own = PackedRows(self._buffers.send, slots[rank], row_format)
        own.ids.fill_(INVALID_EXPERT_ID)
        own.ids[:num_rows], own.hidden[:num_rows] = expert_ids_TK, x_TH
        own.weights[:num_rows] = expert_weights_TK
        sent = PackedRows(self._buffers.send, copies * slots[rank], row_format).packed
        sent.view(copies, *own.packed.shape)[1:] = own.packed
        received = PackedRows(self._buffers.receive, sum(slots), row_format)
        self._parts.collectives.all_to_all("ep", received.packed, sent, slots, [slots[rank]] * copies)
        return Dispatched(
            received.hidden,
            received.ids,
            received.weights,
            geometry,
            row_format,
            first_expert=rank * num_local_experts,
        )

    def combine(self, y_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        rank, geometry = self._parts.rank, dispatched.geometry
        returned = return_to_senders(y_RH, geometry, rank, self._buffers.returned, self._parts.collectives)
        return returned[:, : geometry.num_rows_per_rank[rank]].sum(dim=0)

    def close(self) -> None:
        """Nothing is held beside memory."""


class LoopedExperts(ExpertsWay):
    """Computes one expert after the other, into a buffer for the rows of all ranks."""

    kind = "looped"
    name = "experts one by one"
    tuning = ""

    @classmethod
    def problems(cls, settings: PathSettings) -> list[str]:
        dtype = settings.spec.dtype
        if dtype == "float32":
            return []
        return [f"experts='looped' adds up in float32, and the dtype is {dtype}: set it to that"]

    @classmethod
    def planned(cls, settings: PathSettings) -> list[PlannedBuffer]:
        rows = exchange_rows(settings.layout, settings.capacity)
        row_bytes = max(layer.hidden_size for layer in settings.spec.moe) * dtype_bytes("float32")
        return [PlannedBuffer("experts: looped", rows, rows * row_bytes, rows_of(settings))]

    @classmethod
    def make(cls, parts: RankParts) -> LoopedExperts:
        return cls(parts)

    def __init__(self, parts: RankParts):
        [planned] = self.planned(parts.settings)
        self.num_bytes = planned.num_bytes
        self._sums = torch.zeros(self.num_bytes // dtype_bytes("float32"), device=parts.device)

    def adopt(self, layer: MoeLayer) -> None:
        """Nothing is prepared."""

    def prepare(self, group: HostGroup | None) -> None:
        """Nothing is compiled."""

    def run(self, layer: MoeLayer, dispatched: Dispatched) -> torch.Tensor:
        x_RH, ids_RK = dispatched.x_RH, dispatched.local_ids_RK
        sums_RH = self._sums[: x_RH.numel()].view(x_RH.shape).zero_()
        for expert in range(layer.num_local):
            row, slot = (ids_RK == expert).nonzero(as_tuple=True)
            if row.numel():
                ids, weights = ids_RK[row, slot], dispatched.expert_weights_RK[row, slot]
                sums_RH.index_add_(0, row, layer.forward(x_RH[row], ids[:, None].long(), weights[:, None]))
        return sums_RH


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module that can be imported here and in processes that are started from here, by this test alone."""
    (tmp_path / f"{PLUGIN}.py").write_text(REGISTERS)
    assert not {"relay", "looped"} & {*registry.dispatch_names(), *registry.experts_names()}
    keep_registries(monkeypatch.setattr)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, *FOLDERS))))
    yield
    sys.modules.pop(PLUGIN, None)


def config_of(model: str, **others: Any) -> PoolConfig:
    limits = Limits(cuda_graph_bs=(1, 2), chunked_prefill_size=16, max_running_requests=4)
    ways = {"dispatch": "relay", "experts": "looped", "plugins": (PLUGIN,)}
    return PoolConfig(model=model, ranks=2, limits=limits, **ways | others)


def file_of(config: PoolConfig, folder: Path) -> Path:
    path = folder / "pool.json"
    path.write_bytes(msgspec.json.encode(config))
    return path


def test_no_file_of_the_house_knows_their_names():
    names = re.compile(rf"\b(relay|looped|{PLUGIN}|RelayDispatcher|LoopedExperts)\b", re.IGNORECASE)
    folders = [REPOSITORY / name for name in ("cluster", "workers", "graphs", "dispatch")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(files) > 100
    assert [str(path) for path in files if names.search(path.read_text("utf-8"))] == []


@pytest.mark.parametrize(("setting", "kind"), [("dispatch", "relay"), ("experts", "looped")])
def test_a_name_that_no_plugin_registers_is_refused_with_the_known_ones(setting, kind, tiny_moe, tmp_path, refused):
    known = ", ".join(registry.dispatch_names() if setting == "dispatch" else registry.experts_names())
    file = file_of(PoolConfig(model=tiny_moe, **{setting: kind}), tmp_path)
    assert f"{setting}='{kind}': set {setting} to one of {known}" in " ".join(refused("plan", "--config", file).split())


def test_a_plugin_that_cannot_be_imported_is_refused_by_its_name(tiny_moe, tmp_path, refused):
    file = file_of(PoolConfig(model=tiny_moe, plugins=("ways_of_nobody",)), tmp_path)
    said = " ".join(refused("plan", "--config", file).split())
    assert "plugins: module 'ways_of_nobody' cannot be imported: ModuleNotFoundError" in said
    assert "PYTHONPATH" in said


@pytest.mark.parametrize(
    ("module", "content", "said"),
    [
        ("of_mine", "import sys; sys.exit(7)", "module 'of_mine' cannot be imported: SystemExit: 7; correct it"),
        ("of_mine", "raise OSError('gone')", "module 'of_mine' cannot be imported: OSError: gone; correct it"),
        ("of_mine", "import absent_one", "No module named 'absent_one'; correct it"),
        (
            "of_mine",
            "from expert_pool.dispatch.registry import register; register(5)",
            "5 is registered, which is no cl",
        ),
        ("../of_mine", "", "'../of_mine' is no name of a module: give it as `import` takes it"),
        (".of_mine", "", "'.of_mine' is no name of a module"),
    ],
)
def test_a_module_that_is_no_plugin_is_refused_by_what_is_wrong_with_it(module, content, said, tiny_moe, tmp_path):
    (tmp_path / "of_mine.py").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(said)):
        resolve(config_of(tiny_moe, plugins=(module,)), inspect_model(tiny_moe))


def test_a_way_that_cannot_say_what_it_refuses_is_refused(tiny_moe):
    class Odd(RelayDispatcher):
        kind = name = "odd"

        @classmethod
        def problems(cls, settings: PathSettings, setting: str) -> list[str]:
            raise ValueError("odd indeed")

    registry.register(Odd)
    with pytest.raises(ConfigError, match=r"'odd' cannot say what it refuses: .*Odd.problems raises ValueError: odd"):
        resolve(config_of(tiny_moe, dispatch="odd"), inspect_model(tiny_moe))


def test_a_name_that_another_has_is_refused():
    class OtherGather(DispatcherWay):
        kind = "allgather"

    with pytest.raises(ConfigError, match=r"test_extending registers 'allgather', which .*allgather has"):
        registry.register(OtherGather)


class NoDispatcher(DispatcherWay):
    kind = "silent"


class NoCombine(ExchangeDispatcher):
    kind = name = "one_way"

    def dispatch(self, *_: Any) -> Dispatched:
        raise NotImplementedError


class NoExperts(ExpertsWay):
    kind = "idle"


class NoFused(FusedWay):
    kind = "apart"


class NoKind(ExpertsWay):
    make = LoopedExperts.make


@pytest.mark.parametrize(
    ("way", "lacks"),
    [
        (NoDispatcher, "NoDispatcher lacks make, which"),
        (NoCombine, "NoCombine lacks combine, which"),
        (NoExperts, "NoExperts lacks make, which"),
        (NoFused, "NoFused lacks make, share, which"),
        (NoKind, "NoKind is a way to the experts without a kind"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_class_that_lacks_what_it_has_to_give_is_refused_by_name(way, lacks):
    before = registry.dispatch_names(), registry.experts_names()
    with pytest.raises(ConfigError, match=f"^test_extending.{lacks}"):
        registry.register(way)
    assert (registry.dispatch_names(), registry.experts_names()) == before


def test_every_way_of_the_house_is_listed_by_its_module_and_class():
    """A line that names nothing fails here, and so does a class that no line names."""
    listed = set()
    for entry in registry.BUILT_IN:
        module, _, name = entry.partition(":")
        listed.add(getattr(importlib.import_module(f"expert_pool.dispatch.{module}"), name))
    assert len(listed) == len(registry.BUILT_IN)
    for path in (REPOSITORY / "dispatch").glob("[!_]*/*.py"):
        if any(base in path.read_text("utf-8") for base in ("Way)", "Dispatcher)")):
            importlib.import_module(".".join(("expert_pool", *path.relative_to(REPOSITORY).with_suffix("").parts)))
    there = {
        way
        for base in (Way, ExpertsWay)
        for way in descendants(base)
        if way.__module__.startswith("expert_pool.dispatch.") and not inspect.isabstract(way)
    }
    assert there == listed


def descendants(base: type) -> Iterator[type]:
    for one in base.__subclasses__():
        yield one
        yield from descendants(one)


@pytest.mark.parametrize(
    ("others", "problem"),
    [
        ({"attn_tp_size": 2}, "dispatch='relay' shares no batch, and attn_tp_size is 2: set it to 1"),
        ({"dtype": "bfloat16"}, "experts='looped' adds up in float32, and the dtype is bfloat16: set it to that"),
    ],
    ids=["dispatcher", "experts"],
)
def test_a_plan_refuses_what_they_refuse(others, problem, tiny_moe, tmp_path):
    config = config_of(tiny_moe, **others)
    planned = CliRunner().invoke(main, ["plan", "--config", str(file_of(config, tmp_path))])
    assert planned.exit_code == 2
    assert f"would fail: {problem}" in " ".join(planned.output.split())
    with pytest.raises(ConfigError, match=re.escape(problem)):
        ExpertPool.launch(config)
    assert not ray.is_initialized()


def test_paths_are_measured_over_them_too(tiny_moe):
    rows = TableRow(rows=1024, path="relay+looped")
    config = config_of(tiny_moe, dispatch="measured", experts="auto", tuning=Tuning(table=(rows,)))
    assert validate(config).tuning.table == (rows,)
    names = candidate_paths(Tuning(), "cpu", "torch", "none", capacity=16, world_size=2)
    ways = [(dispatch, experts) for dispatch in ("allgather", "alltoall", "relay") for experts in ("torch", "looped")]
    assert {(name.dispatch, name.experts) for name in names} == set(ways)


def test_a_pool_generates_through_them_with_the_bytes_that_its_plan_has(tiny_moe, references):
    config = config_of(tiny_moe)
    plan = plan_pool(config)
    assert (plan.problems, plan.refusals) == ((), ())
    planned = plan.num_bytes("dispatch: relay"), plan.num_bytes("experts: looped")
    assert all(planned)
    # Ray's processes get the environment of what starts it, `PYTHONPATH` too.
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        with ExpertPool.launch(config) as pool:
            completions = pool.generate(PROMPTS, SamplingParams(max_new_tokens=NEW_TOKENS))
            tokens = {completion.index: completion.token_ids for completion in completions}
            status = pool.status()
    finally:
        ray.shutdown()
    assert [load.exchange_bytes for load in status.loads] == [sum(planned)] * 2
    expected = {index: references["tiny_moe"].greedy(prompt, NEW_TOKENS) for index, prompt in enumerate(PROMPTS)}
    assert tokens == expected


def test_ranks_that_hold_them_otherwise_are_told_at_the_next_step(tiny_moe, references):
    """Capture compares them as well: the ranks has recorded its graphs through them."""
    faults: dict[str, tuple[Fault, str]] = {
        "dispatcher": (other_dispatcher, "dispatcher differs (rank 0: relay, rank 1: another dispatcher)"),
        "experts": (
            other_expert_backend,
            f"expert_backend differs (rank 0: experts one by one, rank 1: {OTHER_BACKEND})",
        ),
    }
    with ForkedRanks(config_of(tiny_moe)) as rank_set:
        for fault, problem in faults.values():
            for message, _, generated in rank_set.call(disagree_while_running, fault, 1):
                assert message == f"ranks disagree before a step: {problem}"
                for key, tokens in generated.items():
                    expected = references["tiny_moe"].greedy(ASKED[key], NEW_TOKENS)
                    assert tokens[: len(expected)] == expected


def join_from(folder: Path, config: RankConfig, rank: int, meeting: Any, reports: Any) -> None:
    """Join as a rank that has its plugins in this folder; tells what comes of it."""
    sys.path.insert(0, str(folder))
    engine = RankEngine(config, rank)
    if rank == 0:
        rendezvous = engine.open_rendezvous("127.0.0.1")
        meeting.put(rendezvous)
    else:
        rendezvous = meeting.get(timeout=DEADLINE_S)
    try:
        engine.join(rendezvous)
        reports.put("joined")
    except (ConfigError, GeometryError) as error:
        reports.put(str(error))
    meeting.get(timeout=DEADLINE_S)  # the store ends with rank 0


def another_version(folder: Path) -> str:
    (folder / f"{PLUGIN}.py").write_text(f"{REGISTERS}# of another version\n")
    return rf"ranks disagree before a step: module '{PLUGIN}' of plugins differs \(.*same module on all nodes"


def what_it_imports_in_another_version(folder: Path) -> str:
    """A plugin that only registers what lies elsewhere, as a package of its own does."""
    for where, note in ((folder.parent, ""), (folder, "# of another version")):
        (where / f"{PLUGIN}.py").write_text(REGISTERS.replace("test_extending import", "written_elsewhere import"))
        (where / "written_elsewhere.py").write_text(f"{WRITTEN_ELSEWHERE}{note}\n")
    return r"ranks disagree before a step: what plugins registered differs \(looped \w+ relay \w+: rank 0 .*"


def one_that_cannot_be_imported(folder: Path) -> str:
    (folder / f"{PLUGIN}.py").write_text("raise RuntimeError('no licence')\n")
    return rf"ranks cannot start: rank 1 on .*: plugins: module '{PLUGIN}' cannot be imported: RuntimeError: no .*"


OTHERS = [another_version, what_it_imports_in_another_version, one_that_cannot_be_imported]


@pytest.mark.parametrize("other_than", OTHERS)
def test_ranks_whose_plugins_differ_are_refused_before_they_run_them(other_than, tiny_moe, tmp_path):
    """As on two nodes that have a module in two versions."""
    other = tmp_path / "other"
    other.mkdir()
    expected = other_than(other)
    config = resolve(config_of(tiny_moe), inspect_model(tiny_moe))
    meeting, reports = CONTEXT.Queue(), CONTEXT.Queue()
    processes = [
        CONTEXT.Process(target=join_from, args=(folder, config, rank, meeting, reports), daemon=True)
        for rank, folder in enumerate((tmp_path, other))
    ]
    try:
        for process in processes:
            process.start()
        said = [reports.get(timeout=DEADLINE_S) for _ in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    for message in said:
        assert re.fullmatch(expected, message), message
        assert "rank 1 on" in message
