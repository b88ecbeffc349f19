"""Transformers' side of side_by_side.py: `generate` on one left-padded batch, in one process.

A batch runs to the longest of its requests, since `generate` takes one length for all: what it makes beyond a
request's own length is not counted.
"""

import time

from workload import Prompts, Sequence, measure, own_task, say


def main() -> None:
    task = own_task()
    started = time.monotonic()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(task.threads * task.ranks)
    torch.manual_seed(task.seed)
    dtype = torch.bfloat16 if task.device == "cuda" else torch.float32
    if task.random_weights:
        with torch.device(task.device):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(task.model), dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(task.model, dtype=dtype).to(task.device)
    model.eval()
    say(task, "start", value=time.monotonic() - started, unit="s")

    @torch.inference_mode()
    def generate(batch: Prompts, new: Sequence[int]) -> float:
        begun = time.perf_counter()
        longest = max(map(len, batch))
        rows = [[0] * (longest - len(prompt)) + prompt for prompt in batch]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch]
        ids = torch.tensor(rows, device=task.device)
        # Without an end of sequence all requests run to their length, as on the other sides.
        output = model.generate(
            ids,
            attention_mask=torch.tensor(mask, device=task.device),
            max_new_tokens=max(new),
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        made = output.cpu().shape[1] - longest
        if made != max(new):
            raise SystemExit(f"Transformers made {made} of {max(new)} tokens a request")
        return time.perf_counter() - begun

    for test, values in measure(task, generate):
        say(task, test, **values)


if __name__ == "__main__":
    main()
