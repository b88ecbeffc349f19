"""A driver script on a pool that stays in the cluster, beside any other driver that uses it.

    expert-pool launch --name qwen3 --config ray_configs/pools/qwen3_30b_a3b_8_gpus.yaml
    python ray_configs/detached_pool.py qwen3 "A prompt" "Another prompt"
    expert-pool shutdown --pool qwen3

Each joins the Ray cluster that it runs in, as a job or with RAY_ADDRESS.
"""

import sys

from expert_pool.cluster import ExpertPool, ExpertPoolError, SamplingParams


def main(name: str, prompts: list[str]) -> None:
    """Print the completions of the prompts as they finish."""
    with ExpertPool.connect(name) as pool:  # leaving the block takes leave of the pool, which stays
        for completion in pool.generate(prompts, SamplingParams(max_new_tokens=128)):
            print(f"{prompts[completion.index]}{completion.text}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("give the pool's name and at least one prompt")
    try:
        main(sys.argv[1], sys.argv[2:])
    except ExpertPoolError as error:
        sys.exit(f"failed: {error}")
