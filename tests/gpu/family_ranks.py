"""The ranks of check_families.py: two processes a model, all started at once, each model's steps run in its turn."""

import multiprocessing
import os
import tempfile
import time
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from family_reference import DECODED
from harness import gpu_of

START_TIMEOUT_S = 400


def step_inputs(pieces: list[tuple[list[int], int, int]], blocks: list[list[int]], block_size: int) -> Any:
    """Inputs of a step that runs tokens `start` to `end` of each sequence; every row's logits are due."""
    from expert_pool.workers.attention.kv_cache import PADDING_BLOCK
    from expert_pool.workers.scheduling.inputs import StepInputs

    lens = torch.tensor([end - start for _, start, end in pieces], dtype=torch.int64)
    positions = [position for _, start, end in pieces for position in range(start, end)]
    slots = [
        table[position // block_size] * block_size + position % block_size
        for (_, start, end), table in zip(pieces, blocks, strict=True)
        for position in range(start, end)
    ]
    widest = max((len(table) for table in blocks), default=0)
    input_ids = [token for tokens, start, end in pieces for token in tokens[start:end]]
    return StepInputs(
        input_ids=torch.tensor(input_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        slots=torch.tensor(slots, dtype=torch.int64),
        due_rows=torch.arange(len(positions)),
        query_starts=lens.cumsum(0) - lens,
        query_lens=lens,
        context_lens=torch.tensor([start for _, start, _ in pieces], dtype=torch.int64),
        block_tables=torch.tensor(
            [table + [PADDING_BLOCK] * (widest - len(table)) for table in blocks], dtype=torch.int64
        ).view(len(blocks), widest),
        num_valid_tokens=torch.tensor([len(positions)], dtype=torch.int32),
    )


def prefill_groups(batch: list[list[int]], step_tokens: int) -> list[list[int]]:
    """Sequences by number, as many a step as its tokens allow."""
    groups: list[list[int]] = [[]]
    for index, tokens in enumerate(batch):
        if sum(len(batch[other]) for other in groups[-1]) + len(tokens) > step_tokens:
            groups.append([])
        groups[-1].append(index)
    return groups


class Routing:
    """Experts that every row of a step goes to, taken down where layers count their load.

    Ids are noted as tensors of the device: of a graph they are those that each of its replays fills anew.
    """

    def __init__(self, exchange: Any):
        self._noted: list[torch.Tensor] = []
        self._count = exchange.count_load
        self._recorded: dict[Any, list[torch.Tensor]] = {}
        exchange.count_load = self._note

    def begin(self) -> None:
        self._noted = []

    def keep_for(self, entry: Any) -> None:
        """What was noted while this entry was recorded."""
        self._recorded[entry] = self._noted
        self.begin()

    def of_replay(self, entry: Any) -> torch.Tensor:
        """Of a replay since `begin`: a graph fills what it noted when it was recorded, a CPU's replay notes anew."""
        return self._joined(self._noted or self._recorded[entry])

    def of_step(self) -> torch.Tensor:
        """`[rows, layers x top-k]`, sorted in each layer, since `begin`."""
        return self._joined(self._noted)

    def _note(self, layer: int, expert_ids_TK: torch.Tensor) -> None:
        self._noted.append(expert_ids_TK)
        self._count(layer, expert_ids_TK)

    @staticmethod
    def _joined(noted: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([ids.sort(dim=-1).values for ids in noted], dim=1).cpu()


def record_what_can_be(engine: Any, routing: Routing) -> tuple[Any, list[str]]:
    """The driver's part of capture, for ranks that are alike: drops what cannot be recorded, and says why."""
    from expert_pool.graphs.plan import plan_captures

    plan = plan_captures(engine.config.limits)
    refused = dict(engine.graphs.agree(plan).refused)
    reasons = sorted({f"{entry.kind} not recorded: {reason}" for entry, reason in refused.items()})
    plan = plan.without(set(refused))
    engine.graphs.rehearse(plan)
    engine.graphs.begin()
    for entry in plan.entries:
        engine.graphs.warm_up(entry)
        routing.begin()
        engine.graphs.record(entry)
        routing.keep_for(entry)
    engine.graphs.end()
    engine.graphs.commit(plan)
    return plan, reasons


Found = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Of each of a rank's sequences, `[length, V]` float32 logits and `[length, layers x top-k]` experts."""


@torch.inference_mode()
def logits_of(engine: Any, batches: list[list[list[int]]], routing: Routing) -> dict[str, Found]:
    """Of each of this rank's sequences, all positions: prefilled eagerly, the last ones decoded in a graph.

    Before they are decoded all are prefilled again by replaying graphs, in two chunks, whose keys and values the decode
    steps read; of the second chunk the logits of its last row are `prefill graphs`. Collective over all ranks.
    """
    from expert_pool.dispatch.budgets.geometry import StepGeometry
    from expert_pool.workers.attention.kv_cache import BlockAllocator
    from expert_pool.workers.scheduling.inputs import dummy
    from handle import target_of

    config, target = engine.config, target_of(engine)
    allocator, batch = BlockAllocator(config.num_blocks, config.block_size), batches[engine.rank]
    tables: list[list[int]] = [[] for _ in batch]
    for table, tokens in zip(tables, batch, strict=True):
        assert allocator.grow(table, len(tokens)), "too few KV blocks for the sequences"
    logits: list[list[torch.Tensor]] = [[] for _ in batch]
    experts: list[list[torch.Tensor]] = [[] for _ in batch]
    step_tokens = config.limits.chunked_prefill_size
    groups = [prefill_groups([tokens[:-DECODED] for tokens in one], step_tokens) for one in batches]
    for step in range(max(len(one) for one in groups)):
        counts = tuple(
            sum(len(batches[rank][index]) - DECODED for index in one[step]) if step < len(one) else 1
            for rank, one in enumerate(groups)
        )
        geometry = StepGeometry.eager(config.layout, counts, capacity=config.capacity)
        mine = groups[engine.rank][step] if step < len(groups[engine.rank]) else []
        pieces = [(batch[index], 0, len(batch[index]) - DECODED) for index in mine]
        blocks = [tables[index] for index in mine]
        inputs = step_inputs(pieces, blocks, config.block_size) if mine else dummy()
        routing.begin()
        rows = target.forward(inputs, geometry).float().cpu()
        lengths = [end for _, _, end in pieces]
        for kept, found in ((logits, rows), (experts, routing.of_step())):
            for index, part in zip(mine, found.split(lengths) if mine else (), strict=True):
                kept[index].append(part)
    graphed = replay_prefill(engine, batches, tables, routing)
    entry = smallest_graph(engine, "decode", len(batch))
    for back in range(DECODED, 0, -1):
        pieces = [(tokens, len(tokens) - back, len(tokens) - back + 1) for tokens in batch]
        values = step_inputs(pieces, tables, config.block_size).values()
        routing.begin()
        rows = engine.graphs.runners["decode"].replay(entry, values, len(batch))[0].float().cpu()
        for kept, found in ((logits, rows), (experts, routing.of_replay(entry))):
            for index in range(len(batch)):
                kept[index].append(found[index : index + 1])
    whole = [torch.cat(parts) for parts in logits], [torch.cat(parts) for parts in experts]
    return {"all": whole, "prefill graphs": graphed}


def smallest_graph(engine: Any, kind: str, count: int) -> Any:
    fitting = [entry for entry in engine.graphs.committed.entries if entry.kind == kind and entry.bucket >= count]
    return min(fitting, key=lambda entry: entry.bucket)


def replay_prefill(engine: Any, batches: list[list[list[int]]], tables: list[list[int]], routing: Routing) -> Found:
    """Logits and experts of the last prefilled position of each of this rank's sequences; collective."""
    config, batch = engine.config, batches[engine.rank]
    logits, experts = ([torch.empty(0)] * len(batch) for _ in range(2))
    for is_second in (False, True):
        by_rank = [[chunk_of(tokens, is_second) for tokens in one] for one in batches]
        lengths = [[list(range(start, end)) for start, end in one] for one in by_rank]
        groups = [prefill_groups(one, config.limits.chunked_prefill_size) for one in lengths]
        for step in range(max(len(one) for one in groups)):
            members = [one[step] if step < len(one) else [] for one in groups]
            counts = [sum(len(lengths[rank][index]) for index in mine) for rank, mine in enumerate(members)]
            entry, mine = smallest_graph(engine, "piecewise", max(counts)), members[engine.rank]
            pieces = [(batch[index], *by_rank[engine.rank][index]) for index in mine]
            inputs = step_inputs(pieces, [tables[index] for index in mine], config.block_size)
            last_rows = inputs.query_lens.cumsum(0) - 1
            values = replace(inputs, due_rows=last_rows).values()
            routing.begin()
            rows = engine.graphs.runners["piecewise"].replay(entry, values, len(mine))[0].float().cpu()
            chosen = routing.of_replay(entry)
            for place, index in enumerate(mine):
                logits[index] = rows[place : place + 1]
                experts[index] = chosen[last_rows[place] : last_rows[place] + 1]
    return logits, experts


def chunk_of(tokens: list[int], is_second: bool) -> tuple[int, int]:
    """The tokens that are prefilled, in two chunks; one token alone is the first."""
    end = len(tokens) - DECODED
    middle = (end + 1) // 2
    return (middle, end) if is_second and middle < end else (0, middle)


def build_early(config: Any) -> None:
    """Compile what FlashInfer would compile in the first steps, before peers wait for this rank."""
    from expert_pool.workers.kernels.flashinfer_kernels import build_kernels

    build_kernels(config)
    if config.worker.attention != "torch":
        from flashinfer.jit.page import gen_page_module

        page = gen_page_module()
        if not page.is_compiled:
            page.build(need_lock=True)


def rank_main(config: Any, rank: int, batches: Any, port_file: Path, folder: str, own: Any, go: Any) -> None:
    """Load, say so, wait for this model's turn, and leave the logits in `folder`."""
    import msgspec
    from expert_pool.workers.engine import RankEngine
    from expert_pool.workers.rank_config import Rendezvous
    from handle import exchange_of, target_of

    started = time.monotonic()
    try:
        if rank == 0 and config.worker.device == "cuda":
            build_early(config)
        engine = RankEngine(config, rank)
        if rank == 0:
            partial = port_file.with_suffix(".partial")
            partial.write_bytes(msgspec.json.encode(engine.open_rendezvous("127.0.0.1")))
            partial.rename(port_file)
        while not port_file.exists():
            if time.monotonic() - started > START_TIMEOUT_S:
                raise RuntimeError(f"rank 0 opened no rendezvous within {START_TIMEOUT_S} s")
            time.sleep(0.1)
        engine.join(msgspec.json.decode(port_file.read_bytes(), type=Rendezvous))
        engine.load()
        own.send(("ready", f"{time.monotonic() - started:.1f} s after its start"))
        go.wait()
        target = target_of(engine)
        routing = Routing(exchange_of(engine))
        plan, reasons = record_what_can_be(engine, routing)
        attention = type(target.attention).__name__
        torch.save(logits_of(engine, batches, routing), f"{folder}/rank{rank}.pt")
        own.send(("done", "; ".join([f"{attention}, {len(plan.entries)} graphs", *reasons])))
    except BaseException as error:
        traceback.print_exc()
        own.send(("failed", f"rank {rank}: {type(error).__name__}: {str(error)[:600]}"))
        os._exit(1)
    os._exit(0)


@dataclass
class Ranks:
    """The processes of one model, and what each said last."""

    name: str
    processes: list[Any]
    pipes: list[Any]
    go: Any
    folder: str
    said: list[tuple[str, str]]

    @property
    def are_ready(self) -> bool:
        return self._all_say("ready")

    @property
    def are_done(self) -> bool:
        return self._all_say("done")

    def listen(self) -> None:
        """Read what ranks say.

        Raises:
            RuntimeError: one failed or ended.
        """
        for rank, pipe in enumerate(self.pipes):
            try:
                while self.said[rank][0] != "done" and pipe.poll():
                    self.said[rank] = pipe.recv()
            except EOFError:
                self.processes[rank].join(timeout=2)
                raise RuntimeError(f"rank {rank} ended with code {self.processes[rank].exitcode}") from None
            if self.said[rank][0] == "failed":
                raise RuntimeError(self.said[rank][1])

    def take_turn(self, deadline: float) -> list[dict[str, Found]]:
        """Logits and experts of each rank's sequences."""
        self.go.set()
        while not self.are_done:
            self.listen()
            if time.monotonic() > deadline:
                raise RuntimeError("its ranks did not finish before the deadline")
            time.sleep(0.02)
        return [torch.load(f"{self.folder}/rank{rank}.pt") for rank in range(len(self.processes))]

    def end(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()

    def _all_say(self, word: str) -> bool:
        return all(said == word for said, _ in self.said)


def start_ranks(name: str, config: Any, batches: list[list[list[int]]]) -> Ranks:
    """Processes that see one GPU each, and begin to load at once."""
    context = multiprocessing.get_context("spawn")
    folder, go = tempfile.mkdtemp(prefix="family-"), context.Event()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(gpu_of(rank)) for rank in range(len(batches))]
    processes, pipes = [], []
    for rank in range(len(batches)):
        own, other = context.Pipe()
        if config.worker.device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[rank]
        arguments = (config, rank, batches, Path(folder) / "port", folder, own, go)
        process = context.Process(target=rank_main, args=arguments, daemon=True)
        process.start()
        own.close()
        processes.append(process)
        pipes.append(other)
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    else:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    return Ranks(name, processes, pipes, go, folder, [("starting", "")] * len(batches))
