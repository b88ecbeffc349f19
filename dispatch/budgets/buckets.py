"""Which batch sizes and token counts have a graph, smallest first; equal on every rank, since the limits are."""

from .limits import Limits

_SMALLEST_PIECEWISE_BUCKET = 16


def decode_buckets(limits: Limits) -> tuple[int, ...]:
    """Batch sizes that have a graph, ascending; empty without graphs. `cuda_graph_bs` where it is given.

    Derived: 1, 2, 4, 8, 12, 16, then steps that grow with the batch (8 up to 64, later a quarter of the power of two
    below), and always the largest batch. From 16 on, a batch is padded by less than half of itself, from 64 on by less
    than a quarter.
    """
    largest = limits.graph_batch_size
    if limits.cuda_graph_bs is not None and not limits.disable_cuda_graph:
        return limits.cuda_graph_bs
    buckets = []
    bucket = 1
    while bucket < largest:
        buckets.append(bucket)
        bucket += _step_after(bucket)
    return (*buckets, largest) if largest else ()


def piecewise_buckets(limits: Limits) -> tuple[int, ...]:
    """Token counts of prefill steps that have a graph, ascending: powers of two from 16, and always the bound.

    Coarse, because a recording costs seconds and a prefill step is long enough to hide a few padded rows.
    """
    largest = limits.piecewise_tokens
    buckets = []
    bucket = _SMALLEST_PIECEWISE_BUCKET
    while bucket < largest:
        buckets.append(bucket)
        bucket *= 2
    return (*buckets, largest) if largest else ()


def _step_after(bucket: int) -> int:
    if bucket < 4:
        return bucket
    if bucket < 16:
        return 4
    if bucket < 64:
        return 8
    return (1 << (bucket.bit_length() - 1)) // 4
