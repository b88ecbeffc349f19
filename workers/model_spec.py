"""What is known of a model without reading its weights; free of PyTorch, since the driver carries it to the ranks."""

import hashlib
from pathlib import Path

import msgspec

from ..dispatch.errors import ConfigError

_TOKENIZER_FILES = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*tokens*.json",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template*",
)


class AttentionShape(msgspec.Struct, frozen=True):
    """How one layer attends, and what its KV cache stores for a token.

    Attributes:
        num_kv_heads: heads of keys and values.
        key_dim: width of a key head.
        value_dim: width of a value head.
        num_heads: heads of queries.
        scaling: of the logits.
        sliding_window: keys a position sees, itself included; `None`: all before it.
        has_sinks: whether each head has a logit without a value.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    num_heads: int
    scaling: float
    sliding_window: int | None = None
    has_sinks: bool = False

    @property
    def width(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class MoeShape(msgspec.Struct, frozen=True):
    """One MoE layer as the dispatch and the expert backends see it.

    Attributes:
        name: of its experts module.
        num_experts: over all ranks.
        hidden_size: of a token.
        top_k: experts a token goes to.
        weights_dtype: of the routing weights, as PyTorch names it.
        intermediate_size: between the projections of an expert; 0 where they are not stacked over experts.
        unsupported_traits: why kernels for gated SiLU experts cannot compute these; empty where they can.
    """

    name: str
    num_experts: int
    hidden_size: int
    top_k: int
    weights_dtype: str
    intermediate_size: int = 0
    unsupported_traits: tuple[str, ...] = ()


class ModelSpec(msgspec.Struct, frozen=True):
    """A model that can be served, with everything that planning and the ranks need to know of it.

    Attributes:
        path: the model folder.
        model_type: family, as Transformers names it.
        dtype: of weights and computation, as PyTorch names it.
        dtype_bytes: bytes of one number of that dtype.
        vocab_size: rows of the embedding.
        hidden_size: of the decoder; experts may work on narrower or wider rows, see `MoeShape`.
        context_length: the most tokens of a request, prompt and completion together.
        eos_token_ids: tokens that end a request.
        attention: KV row of each layer, in layer order.
        moe: the MoE layers, in order of execution.
        dense_bytes: weights that every rank holds in full.
        expert_bytes: weights that are divided over the ranks.
        has_tokenizer: whether the folder carries one.
        config_digest: of `config.json`, where the model was looked at; empty where it was not.
        tokenizer_digest: likewise, of the files that a tokenizer is read from.
    """

    path: str
    model_type: str
    dtype: str
    dtype_bytes: int
    vocab_size: int
    hidden_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    attention: tuple[AttentionShape, ...]
    moe: tuple[MoeShape, ...]
    dense_bytes: int
    expert_bytes: int
    has_tokenizer: bool
    config_digest: str = ""
    tokenizer_digest: str = ""

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(shape.width for shape in self.attention) * self.dtype_bytes

    def check_experts_divide(self, ep_size: int) -> None:
        """Refuse a number of ranks that the experts of some layer cannot be divided over."""
        for layer in self.moe:
            if layer.num_experts % ep_size:
                divisors = [n for n in range(1, layer.num_experts + 1) if layer.num_experts % n == 0]
                raise ConfigError(
                    f"{layer.name} has {layer.num_experts} experts, which cannot be divided over ranks={ep_size}: "
                    f"set ranks to one of {divisors}"
                )


def digest_of_config(path: str) -> str:
    """One name for a model folder's `config.json`; the reason where it cannot be read."""
    try:
        return hashlib.sha256((Path(path) / "config.json").read_bytes()).hexdigest()[:16]
    except OSError as error:
        return f"unreadable ({error.strerror})"


def digest_of_tokenizer(path: str) -> str:
    """One name for the files of a model folder's tokenizer; the reason where one cannot be read.

    Whoever tokenises, looks for stop texts or decodes has to do so alike, and most of these files may be missing.
    """
    digest, folder = hashlib.sha256(), Path(path)
    try:
        for file in sorted({file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}):
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)}\n".encode() + content)
    except OSError as error:
        return f"unreadable ({error.strerror})"
    return digest.hexdigest()[:16]
