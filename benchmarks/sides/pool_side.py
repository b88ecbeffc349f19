"""The pool's side of side_by_side.py: through `ExpertPool.generate`, in a process of its own."""

import sys
import time

from workload import Prompts, Sequence, measure, own_task, say


def main() -> None:
    from expert_pool.cluster import ExpertPool, Limits, PlacementConfig, PoolConfig, SamplingParams, WorkerConfig

    task = own_task()
    powers = {1 << power for power in range(task.max_running.bit_length())}
    config = PoolConfig(
        model=task.model,
        ranks=task.ranks,
        dtype="bfloat16" if task.device == "cuda" else "float32",
        weights="random" if task.random_weights else "checkpoint",
        dispatch=task.dispatch,
        experts=task.experts,
        address="local",
        limits=Limits(
            max_running_requests=task.max_running,
            chunked_prefill_size=task.work.chunk,
            cuda_graph_bs=tuple(sorted(powers | set(task.requests) | {task.max_running})),
        ),
        worker=WorkerConfig(device="cuda" if task.device == "cuda" else "cpu", threads=task.threads),
        placement=PlacementConfig(start_timeout_s=500),
    )
    stages: list[str] = []

    def report(line: str) -> None:
        stages.append(line)
        print(line, file=sys.stderr, flush=True)

    started = time.monotonic()
    with ExpertPool.launch(config, report) as pool:
        notes = [f"dispatch {task.dispatch}, experts {task.experts}", *(line for line in stages if "compil" in line)]
        say(task, "start", value=time.monotonic() - started, unit="s", notes=notes)

        def generate(batch: Prompts, new: Sequence[int]) -> float:
            sampling = [SamplingParams(max_new_tokens=count, ignore_eos=True) for count in new]
            begun = time.perf_counter()
            done = list(pool.generate(batch, sampling))
            seconds = time.perf_counter() - begun
            errors = [one.error for one in done if one.error]
            made = sum(one.num_completion_tokens for one in done)
            if errors or made != sum(new):
                raise SystemExit(f"the pool made {made} of {sum(new)} tokens, {len(errors)} errors: {errors[:1]}")
            return seconds

        for test, values in measure(task, generate):
            say(task, test, **values)


if __name__ == "__main__":
    main()
