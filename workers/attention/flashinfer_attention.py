"""FlashInfer's paged attention on GPUs: prefill wrappers for eager steps and prefill graphs, decode wrappers in others.

Layers with attention sinks, and layers whose keys and values differ in width, have no decode wrapper of their own:
their decode graphs record the prefill wrapper too, with one row a request. Graphs run its `fa2` kernels.

A wrapper is planned on the host, from lengths that the host has anyway, before the step runs; inside the step its
kernel only reads what was planned. So a graph records the kernel, and a plan for the same wrapper precedes a replay.

FlashInfer is imported at construction.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import numpy.typing
import torch

from ...dispatch.budgets.geometry import pad_to_ranks
from ...dispatch.budgets.step_kinds import KINDS
from ...graphs.plan import CaptureEntry
from ..model.spec import AttentionShape
from ..scheduling.inputs import StepInputs
from .flashinfer_writes import KvWriter, StepWriter
from .kv_cache import PADDING_BLOCK, KvCache
from .paged import layer_index

_WORKSPACE_BYTES = 256 << 20
_TENSOR_CORE_GROUP = 4
# What a wrapper in CUDA-graph mode allocates beside its page table: its schedule, and room for lengths.
_WRAPPER_BYTES = (8 << 20) + (128 << 10)


def has_decode_wrapper(shape: AttentionShape) -> bool:
    """Whether FlashInfer's decode wrapper serves such a layer; else its prefill wrapper does, a row a request."""
    return not shape.has_sinks and shape.key_dim == shape.value_dim


def decodes_on_tensor_cores(shape: AttentionShape) -> bool:
    """Whether enough query heads share a KV head for tensor cores to pay; they run the kernels of prefill."""
    return shape.num_heads // shape.num_kv_heads >= _TENSOR_CORE_GROUP


def sink_options(shape: AttentionShape, dtype: torch.dtype) -> dict[str, Any]:
    """What FlashInfer specialises its kernels for layers with sinks by; in the order that it names them."""
    return {
        "q_data_type": dtype,
        "kv_data_type": dtype,
        "head_dim_qk": shape.key_dim,
        "head_dim_vo": shape.value_dim,
        "window_left": _window_left(shape),
    }


def partial_bytes(shape: AttentionShape, num_rows: int, num_requests: int, num_ctas: int) -> int:
    """Memory for partial results of a graph that runs the prefill kernels and splits long contexts.

    FlashInfer takes it from a wrapper's workspace, for the most tiles that any batch of the graph can have
    (`PrefillPlan` in its scheduler.cuh).

    Args:
        shape: of the layer.
        num_rows: of the graph.
        num_requests: of the graph, those without rows included.
        num_ctas: thread blocks that the GPU holds at once, as FlashInfer counts them.
    """
    group = shape.num_heads // shape.num_kv_heads
    tile = _tile_rows(shape, num_rows, num_requests)
    tiles = max(num_ctas // shape.num_kv_heads, -(-num_rows * group // tile) + num_requests - 1)
    return -(-tiles * tile // group) * shape.num_heads * (shape.value_dim + 1) * 4


def splits_contexts(shape: AttentionShape, num_rows: int, num_requests: int, num_ctas: int) -> bool:
    """Whether a graph that runs the prefill kernels gives parts of one long context to several thread blocks.

    It then writes partial results and adds them up for all of its rows, whatever batch it gets: 136 of 2319 us a layer
    at 8192 rows of Qwen3-30B-A3B on an H200. A graph whose rows alone fill the GPU gains nothing by it, nor does one
    whose partial results have no room.

    Args: as of `partial_bytes`.
    """
    group = shape.num_heads // shape.num_kv_heads
    tiles = num_rows * group // _tile_rows(shape, num_rows, num_requests)
    fits = partial_bytes(shape, num_rows, num_requests, num_ctas) <= _WORKSPACE_BYTES
    return fits and tiles * shape.num_kv_heads < num_ctas


def _tile_rows(shape: AttentionShape, num_rows: int, num_requests: int) -> int:
    """Rows of one thread block, each query head of a group counted, as FlashInfer takes them for a graph."""
    longest = (num_rows - num_requests + 1) * (shape.num_heads // shape.num_kv_heads)
    return 128 if longest > 64 and shape.value_dim < 256 else 64 if longest > 16 else 16


IntArray = numpy.typing.NDArray[numpy.int64]
_Pages = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A page table in FlashInfer's form: offsets (host), page numbers (device), tokens in each last page (host)."""


class _Group:
    """Layers that attend alike: they share a plan."""

    def __init__(self, shape: AttentionShape):
        self.shape = shape
        self.eager: Any = None
        self.graphs: dict[CaptureEntry, Any] = {}


class FlashInferAttention:
    """Attention of one rank over its paged cache.

    Args:
        cache: keys and values; a page of FlashInfer is a block of the cache.
        shapes: of each layer.
        max_requests: in a prefill step, at most.
        max_pages: pages of all requests of a step together, at most.
        dtype: of queries, keys and values.
        prefill_backend: FlashInfer's name of the kernels for eager steps.
        attn_tp_size: ranks that share a batch, whose graphs are padded to a multiple of it.
        device: this rank's GPU.
    """

    def __init__(
        self,
        cache: KvCache,
        shapes: tuple[AttentionShape, ...],
        max_requests: int,
        max_pages: int,
        dtype: torch.dtype,
        prefill_backend: str,
        attn_tp_size: int,
        device: torch.device,
    ):
        import flashinfer

        self._flashinfer = flashinfer
        self._cache = cache
        self._dtype = dtype
        self._prefill_backend = prefill_backend
        self._attn_tp_size = attn_tp_size
        self._device = device
        self._max_requests = max_requests
        self._max_pages = max_pages
        # Two a multiprocessor, as FlashInfer's scheduler has it.
        self._num_ctas = 2 * torch.cuda.get_device_properties(device).multi_processor_count
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._planned = torch.cuda.Event()
        self._writer = KvWriter(cache, device)
        self._groups: dict[AttentionShape, _Group] = {shape: _Group(shape) for shape in shapes}
        self._group_of_layer = [self._groups[shape] for shape in shapes]

    def graph_bytes(self, entries: Sequence[CaptureEntry]) -> int:
        """One wrapper a graph and kind of layer."""
        pages = sum(self._max_pages + self._pages_of_padding(entry.num_tokens) for entry in entries)
        return len(self._groups) * (len(entries) * _WRAPPER_BYTES + 4 * pages)

    def prepare(self, entry: CaptureEntry, values: Mapping[str, torch.Tensor]) -> None:
        """Plan the wrappers of a graph for the batch that the next run of it gets.

        Args:
            entry: which graph.
            values: this rank's inputs before padding; host tensors. Requests that are missing get the padding block; in
                a decode graph a row too, which attends to it, in a prefill graph none. None at all, before a recording:
                of a prefill graph one request of padding has all rows, since FlashInfer runs no fewer than it planned
                for, and takes the rows of its first plan for the most there will be.
        """
        num_rows = pad_to_ranks(entry.num_tokens, self._attn_tp_size)
        kind = KINDS[entry.kind]
        is_decode = kind.serves == "decode"
        num_requests = num_rows if is_decode else kind.num_requests(entry.bucket, self._max_requests)
        query_lens = context_lens = numpy.zeros(0, numpy.int64)
        tables = numpy.zeros((0, 1), numpy.int64)
        if "query_lens" in values:
            query_lens, context_lens = values["query_lens"].numpy(), values["context_lens"].numpy()
            tables = values["block_tables"].numpy()
        elif not is_decode:
            query_lens, context_lens = numpy.array([num_rows]), numpy.array([0])
            tables = numpy.full((1, self._pages_of_padding(num_rows)), PADDING_BLOCK)
        num_missing = num_requests - len(query_lens)
        missing = numpy.full(num_missing, int(is_decode))
        self._wait_for_last_plan()
        pages = self._pages(context_lens + query_lens, tables, num_missing)
        queries = _offsets(numpy.concatenate([query_lens, missing]))
        for group in self._groups.values():
            if entry not in group.graphs:
                group.graphs[entry] = self._graph_wrapper(entry, group.shape, num_rows, num_requests)
            wrapper = group.graphs[entry]
            if _runs_decode_kernels(entry, group.shape):
                self._plan_decode(wrapper, group.shape, pages)
            else:
                self._plan_graph_prefill(wrapper, group.shape, num_rows, queries, pages)
        self._planned.record()

    def batch(self, inputs: StepInputs, entry: CaptureEntry | None, slots_T: torch.Tensor) -> "FlashInferBatch":
        """What the attention layers of one step call; plans eager steps here."""
        writes = self._writer.of_step(slots_T)
        if entry is not None:
            wrappers = [group.graphs[entry] for group in self._group_of_layer]  # planned by `prepare`
            return FlashInferBatch(
                self._cache, writes, wrappers, has_rows_of_none=KINDS[entry.kind].serves == "prefill"
            )
        lens = inputs.query_lens.tolist()
        if not lens:
            return FlashInferBatch(self._cache, writes, None)
        self._wait_for_last_plan()
        pages = self._pages((inputs.context_lens + inputs.query_lens).numpy(), inputs.block_tables.numpy())
        queries = _offsets(inputs.query_lens.numpy())
        for group in self._groups.values():
            if group.eager is None:
                backend = self._prefill_backend if has_decode_wrapper(group.shape) else "fa2"
                group.eager = self._prefill_wrapper(group.shape, backend=backend)
            self._plan_prefill(group.eager, group.shape, queries, pages)
        self._planned.record()
        return FlashInferBatch(self._cache, writes, [group.eager for group in self._group_of_layer])

    def _plan_graph_prefill(
        self, wrapper: Any, shape: AttentionShape, num_rows: int, queries: torch.Tensor, pages: _Pages
    ) -> None:
        """Always the same launch, whatever the batch: only what the kernel reads differs."""
        splits = splits_contexts(shape, num_rows, len(queries) - 1, self._num_ctas)
        self._plan_prefill(wrapper, shape, queries, pages, disable_split_kv=not splits)

    def _plan_prefill(
        self, wrapper: Any, shape: AttentionShape, queries: torch.Tensor, pages: _Pages, **options: Any
    ) -> None:
        wrapper.plan(
            queries,
            *pages,
            shape.num_heads,
            shape.num_kv_heads,
            shape.key_dim,
            self._cache.block_size,
            head_dim_vo=shape.value_dim,
            causal=True,
            window_left=_window_left(shape),
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            sm_scale=shape.scaling,
            **options,
        )

    def _plan_decode(self, wrapper: Any, shape: AttentionShape, pages: _Pages) -> None:
        wrapper.plan(
            *pages,
            shape.num_heads,
            shape.num_kv_heads,
            shape.key_dim,
            self._cache.block_size,
            window_left=_window_left(shape),
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
            sm_scale=shape.scaling,
        )

    def _wait_for_last_plan(self) -> None:
        """A wrapper plans into one host buffer, which the device may still be copying from the last time.

        That copy comes before the last step on the stream, so with overlap it is over, or waits for no more than the
        step before.
        """
        self._planned.synchronize()

    def _pages(self, lengths: IntArray, tables: IntArray, num_padding: int = 0) -> _Pages:
        """Page table of a batch in FlashInfer's form: offsets, page numbers, tokens in each last page.

        Args:
            lengths: `[B]` cached tokens of each request, those of this step included.
            tables: `[B, M]` its blocks.
            num_padding: requests behind these that have one token in the padding block.
        """
        size = self._cache.block_size
        counts = -(-lengths // size)
        used = numpy.arange(tables.shape[1]) < counts[:, None]
        indices = numpy.concatenate([tables[used], numpy.full(num_padding, PADDING_BLOCK)]).astype(numpy.int32)
        ones = numpy.ones(num_padding, numpy.int64)
        last = numpy.concatenate([(lengths - 1) % size + 1, ones]).astype(numpy.int32)
        on_device = torch.from_numpy(indices).pin_memory().to(self._device, non_blocking=True)
        return _offsets(numpy.concatenate([counts, ones])), on_device, torch.from_numpy(last)

    def _pages_of_padding(self, num_rows: int) -> int:
        """Of a request that has all rows of a graph."""
        return -(-num_rows // self._cache.block_size)

    def _graph_wrapper(self, entry: CaptureEntry, shape: AttentionShape, num_rows: int, num_requests: int) -> Any:
        """A wrapper whose buffers never move, for one graph."""

        def zeros(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int32, device=self._device)

        max_pages = self._max_pages + self._pages_of_padding(num_rows)
        indptr, indices, last = zeros(num_requests + 1), zeros(max_pages), zeros(num_requests) + 1
        if _runs_decode_kernels(entry, shape):
            return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=decodes_on_tensor_cores(shape),
                paged_kv_indptr_buffer=indptr,
                paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=last,
            )
        return self._prefill_wrapper(
            shape,
            backend="fa2",
            use_cuda_graph=True,
            qo_indptr_buf=zeros(num_requests + 1),
            paged_kv_indptr_buf=indptr,
            paged_kv_indices_buf=indices,
            paged_kv_last_page_len_buf=last,
        )

    def _prefill_wrapper(self, shape: AttentionShape, **options: Any) -> Any:
        if not shape.has_sinks:
            return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", **options)
        return self._flashinfer.BatchAttentionWithAttentionSinkWrapper(
            self._workspace,
            "NHD",
            **sink_options(shape, self._dtype),
            **options,
        )


class FlashInferBatch:
    """Attention of one step; see `paged.PagedBatch` for what it stands in for.

    Args:
        cache: keys and values.
        writes: each row's key and value to its slot.
        wrappers: planned, one a layer; `None` where no row attends to anything (an idle rank's dummy step).
        has_rows_of_none: whether there may be rows, behind the others, that are no request's; they come out as zero.
    """

    def __init__(self, cache: KvCache, writes: StepWriter, wrappers: list[Any] | None, has_rows_of_none: bool = False):
        self._cache = cache
        self._writes = writes
        self._wrappers = wrappers
        self._has_rows_of_none = has_rows_of_none

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """`[1, Hq, T, D]`, `[1, Hkv, T, D]`, `[1, Hkv, T, D]` -> `[1, T, Hq, D]`; what is added is written first."""
        layer = layer_index(module)
        self._writes.write(layer, key, value)
        if self._wrappers is None:
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
        # The kernel of a layer with sinks takes them, and the scale, where it runs rather than where it is planned.
        of_sinks = () if sinks is None else (sinks.float(), scaling)
        query_THD = query[0].transpose(0, 1).contiguous()
        # The kernel writes the rows of requests alone.
        out_THD = query_THD.new_zeros(*query_THD.shape[:2], value.shape[3]) if self._has_rows_of_none else None
        return self._wrappers[layer].run(query_THD, self._cache.pages(layer), *of_sinks, out=out_THD).unsqueeze(0)


def _runs_decode_kernels(entry: CaptureEntry, shape: AttentionShape) -> bool:
    return KINDS[entry.kind].serves == "decode" and has_decode_wrapper(shape)


def _offsets(counts: IntArray) -> torch.Tensor:
    """`[B + 1]` int32: where each request's part starts, and where the last ends."""
    return torch.from_numpy(numpy.concatenate([[0], counts.cumsum()]).astype(numpy.int32))


def _window_left(shape: AttentionShape) -> int:
    """FlashInfer counts the keys before a position; a window counts the position too."""
    return -1 if shape.sliding_window is None else shape.sliding_window - 1
