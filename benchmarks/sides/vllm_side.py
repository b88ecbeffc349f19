"""vLLM's side of side_by_side.py, in vLLM's Python: a process a rank, data parallel with expert parallelism from 2 on.

Rank 0 reports; a time is that from when all ranks begin to when the last has ended.
"""

import multiprocessing
import os
import socket
import sys
import time
from typing import Any

from vllm_weights import draw_ordinary, problem_of
from workload import Prompts, Sequence, Task, measure, own_task, say

WAIT_S = 600
# Offline, without usage statistics, no NVLink multicast, and functions may be sent to the engine's process.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}


def run_rank(task: Task, rank: int, port: int, barrier: Any) -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if task.ranks == 1 else "1"
    if task.ranks > 1:
        os.environ |= {
            "VLLM_DP_RANK": str(rank),
            "VLLM_DP_RANK_LOCAL": str(rank),
            "VLLM_DP_SIZE": str(task.ranks),
            "VLLM_DP_MASTER_IP": "127.0.0.1",
            "VLLM_DP_MASTER_PORT": str(port),
        }
    started = time.monotonic()
    import vllm

    llm = vllm.LLM(
        model=task.model,
        skip_tokenizer_init=True,
        load_format="dummy" if task.random_weights else "auto",
        dtype="bfloat16",
        gpu_memory_utilization=0.9,
        max_model_len=min(task.max_tokens, 4096),
        max_num_seqs=task.max_running,
        max_num_batched_tokens=task.work.chunk,
        enable_prefix_caching=False,
        enable_expert_parallel=task.ranks > 1,
        generation_config="vllm",
        seed=0,
    )
    if rank == 0:
        say(task, "start", value=time.monotonic() - started, unit="s", notes=[f"version {vllm.__version__}"])
    if task.random_weights:
        (found,) = llm.apply_model(draw_ordinary)
        if problem := problem_of(found):
            raise RuntimeError(f"vLLM's weights could not be drawn: {problem}; {found}")

    def generate(batch: Prompts, new: Sequence[int]) -> float:
        own = [{"prompt_token_ids": prompt} for prompt in batch[rank :: task.ranks]]
        wanted = list(new[rank :: task.ranks])
        sampling = [
            vllm.SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in wanted
        ]
        barrier.wait(WAIT_S)
        begun = time.perf_counter()
        outputs = llm.generate(own, sampling, use_tqdm=False)
        barrier.wait(WAIT_S)
        seconds = time.perf_counter() - begun
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        if made != sum(wanted):
            raise RuntimeError(f"vLLM made {made} of {sum(wanted)} tokens")
        return seconds

    for test, values in measure(task, generate):
        if rank == 0:
            say(task, test, **values)
    barrier.wait(WAIT_S)
    sys.stdout.flush()
    os._exit(0)  # the parent ends what is left of the engine, and its teardown takes long


def main() -> None:
    task = own_task()
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(task.ranks)
    if task.ranks == 1:
        run_rank(task, 0, 0, barrier)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [context.Process(target=run_rank, args=(task, rank, port, barrier)) for rank in range(task.ranks)]
    for rank in ranks:
        rank.start()
    while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
        time.sleep(0.2)
    failed = [rank.exitcode for rank in ranks if rank.exitcode]
    for rank in ranks:
        rank.kill()
    if failed:
        raise SystemExit(f"ranks of vLLM ended with {failed}")


if __name__ == "__main__":
    main()
