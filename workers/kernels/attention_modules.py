"""Which of FlashInfer's modules its attention of a rank runs. FlashInfer is imported when a function is called."""

from collections.abc import Iterator
from typing import Any

import torch

from ..attention.flashinfer_attention import (
    decodes_on_tensor_cores,
    has_decode_wrapper,
    sink_options,
)
from ..attention.flashinfer_writes import appends_in_one_kernel
from ..model.spec import AttentionShape
from ..rank_config import RankConfig


def attention_modules(config: RankConfig) -> Iterator[tuple[str, Any]]:
    """Specifications of the modules, each with a label for people; one may come more than once."""
    from flashinfer.page import gen_page_module

    spec = config.spec
    dtype = getattr(torch, spec.dtype)
    if any(map(appends_in_one_kernel, spec.attention)):
        yield "writing keys and values", gen_page_module()
    for shape in dict.fromkeys(spec.attention):
        if shape.has_sinks:
            yield "attention with sinks", _sink_spec(shape, dtype)
        elif not has_decode_wrapper(shape):
            yield "attention", _prefill_spec("fa2", shape, dtype)
            yield "attention over unequal widths", _prefill_spec("fa2", shape, dtype, is_unequal=True)
        else:
            yield "attention", _prefill_spec(_eager_backend(config, shape, dtype), shape, dtype)
            if decodes_on_tensor_cores(shape):
                yield "decode attention", _prefill_spec("fa2", shape, dtype)
            else:
                yield "decode attention", _decode_spec(shape, dtype)
            if config.limits.piecewise_tokens:
                yield "attention of prefill graphs", _prefill_spec("fa2", shape, dtype)


def _eager_backend(config: RankConfig, shape: AttentionShape, dtype: torch.dtype) -> str:
    """The kernels that FlashInfer takes for eager steps, as it resolves `auto` itself."""
    if config.worker.prefill_backend != "auto":
        return config.worker.prefill_backend
    from flashinfer.utils import determine_attention_backend

    device = torch.device("cuda", 0)
    return determine_attention_backend(
        device, 0, False, False, dtype, dtype, head_dim_qk=shape.key_dim, head_dim_vo=shape.value_dim
    )


def _prefill_spec(backend: str, shape: AttentionShape, dtype: torch.dtype, is_unequal: bool = False) -> Any:
    from flashinfer.jit.attention import modules

    # FlashInfer compiles these two for `fa2`, and has no public name for them; both exist throughout 0.7.
    make = modules.gen_batch_prefill_module
    if backend == "fa2":
        make = modules._gen_batch_prefill_primary_module
    if is_unequal:
        make = modules._gen_batch_prefill_independent_paged_module
    widths, has_window = (shape.key_dim, shape.value_dim), shape.sliding_window is not None
    return make(backend, dtype, dtype, dtype, torch.int32, *widths, 0, has_window, False, False)


def _decode_spec(shape: AttentionShape, dtype: torch.dtype) -> Any:
    from flashinfer.jit.attention import gen_batch_decode_module

    widths, has_window = (shape.key_dim, shape.value_dim), shape.sliding_window is not None
    return gen_batch_decode_module(dtype, dtype, dtype, torch.int32, *widths, 0, has_window, False)


def _sink_spec(shape: AttentionShape, dtype: torch.dtype) -> Any:
    from flashinfer import BatchAttentionWithAttentionSinkWrapper
    from flashinfer.jit.attention import gen_customize_batch_prefill_module

    options = sink_options(shape, dtype)
    backend, args, kwargs = BatchAttentionWithAttentionSinkWrapper._sink_jit_args(
        torch.device("cuda", 0), "fa2", *options.values()
    )
    return gen_customize_batch_prefill_module(backend, *args, **kwargs)
