"""What check_faults.py runs inside the ranks' processes."""

import dataclasses
from functools import partial
from typing import Any

import harness  # noqa: F401  makes the folder of the tests importable
import torch
from expert_pool.graphs.static import StaticBuffers
from expert_pool.workers.engine import RankEngine
from expert_pool.workers.graph_set import buffer_specs
from expert_pool.workers.request import Request, SamplingParams
from expert_pool.workers.scheduling.inputs import pack
from expert_pool.workers.scheduling.scheduler import BatchKind, ScheduledBatch, Slice
from expert_pool.workers.scheduling.sequence import TokenSequence
from handle import agreement_of, allocator_of, another_runner
from rank_faults import holds_otherwise, inject


def disagree_at_next_step(engine: RankEngine, what: str) -> None:
    """From its next agreement on, this rank of a running pool holds or wants something else than the others.

    Args:
        engine: of this rank.
        what: `graphs`: it lacks the graph that steps replay; `backend`: its experts have another name; `step`: it is a
            step ahead.
    """
    agreement, graphs = agreement_of(engine), engine.graphs
    agree = agreement.agree

    def agree_otherwise(proposal: Any, state: Any) -> Any:
        agreement.agree = agree
        if what == "step":
            return agree(proposal._replace(step=proposal.step + 1), state)
        if what == "graphs":
            used = {entry for entry in graphs.committed.entries if entry.bucket >= proposal.num_tokens}
            graphs.commit_plan(graphs.committed.without({min(used, key=lambda entry: entry.bucket)}))
        else:
            inject(engine, partial(holds_otherwise, expert_backend="another"))
        return agree(proposal, state)

    agreement.agree = agree_otherwise


@torch.inference_mode()
def outputs_are_kept(engine: RankEngine) -> list[str]:
    """Record the decode step a second time, as draft graphs are: into a memory pool and buffers of their own.

    Collective over all ranks, in a pool that is idle. Returns what is wrong, a sentence each: the output of a target's
    graph changed while the other was recorded and replayed, or a target's replay is another than before.
    """
    runner = engine.graphs.runners["decode"]
    buffers = StaticBuffers(buffer_specs(engine.config)["target"], engine.device)
    other = another_runner(runner, dataclasses.replace(runner.kind, model="draft"), buffers=buffers, finish=None)
    found = []
    for entry in engine.graphs.committed.entries:
        values, on_host, release = _inputs(engine, entry.bucket)
        output, _ = runner.replay(entry, values, entry.bucket, on_host)
        before = output.clone()
        other.warm_up(entry)
        other.record(entry, 1)
        few, few_on_host, release_few = _inputs(engine, 1)
        replayed, _ = other.replay(entry, few, 1, few_on_host)
        if engine.device.type == "cuda":
            if not torch.equal(output, before):
                found.append(f"{entry}: the second graph wrote into the output of the first")
            if replayed.untyped_storage().data_ptr() == output.untyped_storage().data_ptr():
                found.append(f"{entry}: both graphs put their output into the same memory")
        again, _ = runner.replay(entry, values, entry.bucket, on_host)
        if not torch.allclose(again, before, rtol=0, atol=0.02 * float(before.abs().max())):
            found.append(f"{entry}: a replay differs by {(again - before).abs().max()} from the one before")
        release()
        release_few()
    return found


def _inputs(engine: RankEngine, count: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], Any]:
    """A decode step of `count` requests with nothing cached but zeros, on the device and on the host."""
    allocator, slices = allocator_of(engine), []
    for index in range(count):
        length = 5 + 3 * index
        sequence = TokenSequence(Request(index, tuple(range(2, 2 + length)), SamplingParams()), 512, None)
        sequence.num_computed = length - 1
        assert allocator.grow(sequence.blocks, length)
        slices.append(Slice.of(sequence, 1))
    packed = pack(ScheduledBatch(BatchKind.DECODE, tuple(slices)), engine.config.block_size)
    inputs = packed.inputs.to(engine.device)

    def release() -> None:
        for piece in slices:
            allocator.release(piece.sequence.blocks)

    return inputs.values(), packed.inputs.values(), release
