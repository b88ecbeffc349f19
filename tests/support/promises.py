"""What the documents promise to run on GPUs, held to what a rank says and to the kernels that its graphs launch."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from expert_pool.workers.compiled.said import COMPILED, ONE_CHOICE

SHARED = "q_proj+k_proj+v_proj as one GEMM"
WRITTEN = "keys and values written in one kernel"
KINDS = ("decode", "piecewise")
MOST_KERNELS = 17  # of 64 requests; docs/gpu-results.md lists them
# Kernels that the compiled regions, FlashInfer and the routing kernels replace: PyTorch's own of these names.
REPLACED = ("index_copy", "CatArrayBatchedCopy", "softmax", "TopK", "Sort", "rsqrt", "layer_norm")


def broken_promises(
    layers: Sequence[str],
    recorded: Collection[str],
    compiled_since: int,
    kernels: Mapping[str, float],
    experts: str,
) -> Iterator[str]:
    """What a rank of a Qwen3-MoE on Hopper does otherwise than the documents say; nothing where all is kept.

    Args:
        layers: lines of its `LoadReport`.
        recorded: kinds of its graphs.
        compiled_since: regions that were compiled after it had loaded.
        kernels: of one replayed decode step, by name: how often a layer launches each.
        experts: how its way to the experts begins.
    """
    of_layers = [line.partition(": ")[2] for line in layers if line.startswith("layer")]
    if not of_layers:
        yield "the rank does not say what runs in its layers"
    for line in of_layers:
        parts = line.split("; ")
        for promised in (COMPILED, SHARED, ONE_CHOICE):
            if promised not in parts:
                yield f"{promised!r} is promised, and this runs: {line}"
        if WRITTEN not in line:
            yield f"{WRITTEN!r} is promised, and this runs: {line}"
        if f"experts by {experts}" not in line:
            yield f"experts by {experts} are promised, and this runs: {line}"
    for kind in KINDS:
        if kind not in recorded:
            yield f"{kind} graphs are promised, and only these were recorded: {', '.join(recorded) or 'none'}"
    if compiled_since:
        yield f"{compiled_since} regions were compiled after the rank had loaded"
    a_layer = {name: count for name, count in kernels.items() if count >= 1 / 2}  # not a step's own
    launched = sum(map(round, a_layer.values()))
    if launched > MOST_KERNELS:
        yield f"a layer launches {launched} kernels a step, at most {MOST_KERNELS} are promised"
    for name, count in a_layer.items():
        if any(part in name for part in REPLACED) and not name.startswith("triton_"):
            yield f"a layer still launches {count:.1f} of {name:.100}"
