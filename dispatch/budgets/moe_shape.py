"""The shape of a MoE layer: what a plan, a rank and every way to the experts know of it; free of PyTorch."""

import msgspec


class Gating(msgspec.Struct, frozen=True):
    """What is between the two projections of gated experts: `(up + plus) * gate * sigmoid(alpha * gate)`.

    Attributes:
        alpha: 1 for SiLU.
        plus: what is added to `up`.
        limit: `gate` is at most this, and `up` between it and its negative; `None`: neither is bounded.
        is_interleaved: whether rows of gate and up take turns in the first projection; else all of gate come first.
        has_bias: whether both projections have one.
    """

    alpha: float = 1.0
    plus: float = 0.0
    limit: float | None = None
    is_interleaved: bool = False
    has_bias: bool = False


class MoeShape(msgspec.Struct, frozen=True):
    """One MoE layer over all ranks, without its weights; equal on every rank.

    Attributes:
        name: of its experts module.
        num_experts: over all ranks.
        hidden_size: of a token.
        top_k: experts a token goes to.
        weights_dtype: of the routing weights, as PyTorch names it.
        intermediate_size: between the projections of an expert; 0 where they are not stacked over experts.
        unsupported_traits: why kernels for gated SiLU experts cannot compute these; empty where they can.
        gating: between the projections; `None`: otherwise than `Gating` can say.
    """

    name: str
    num_experts: int
    hidden_size: int
    top_k: int
    weights_dtype: str
    intermediate_size: int = 0
    unsupported_traits: tuple[str, ...] = ()
    gating: Gating | None = None

    @property
    def text(self) -> str:
        """Its numbers, as tables name them; layers that compute alike have the same."""
        return f"{self.num_experts} x {self.hidden_size} x {self.intermediate_size} top-{self.top_k}"

    def num_local(self, ep_size: int) -> int:
        """Experts that each of so many ranks owns."""
        return self.num_experts // ep_size

    def max_pairs(self, num_rows: int, ep_size: int) -> int:
        """The most pairs that so many rows make with the experts of one rank: the ids of a row are distinct."""
        return num_rows * min(self.top_k, self.num_local(ep_size))
