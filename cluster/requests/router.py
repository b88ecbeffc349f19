"""Which rank gets which request: the least loaded one, with only a few requests ahead of what it can run."""

from collections import deque

from ...workers.request import Request


class Router:
    """Requests that wait for a rank, and those that each DP rank has.

    A request counts with the tokens it may come to hold. Requests beyond `window` a DP rank wait here rather than at a
    rank, so that the rank that turns out to be faster takes more of them.

    Args:
        dp_size: DP ranks to choose from.
        window: the most requests a DP rank is given at a time.
    """

    def __init__(self, dp_size: int, window: int):
        self._window = window
        self._weights: list[dict[int, int]] = [{} for _ in range(dp_size)]
        self._tokens = [0] * dp_size
        self._pending: deque[Request] = deque()

    def add(self, request: Request) -> None:
        self._pending.append(request)

    def assign(self) -> dict[int, list[Request]]:
        """Requests to hand to each DP rank now."""
        assigned: dict[int, list[Request]] = {}
        while self._pending:
            dp_rank = min(range(len(self._tokens)), key=self._preference)
            if len(self._weights[dp_rank]) >= self._window:
                break
            request = self._pending.popleft()
            weight = len(request.prompt_token_ids) + request.sampling.max_new_tokens
            self._weights[dp_rank][request.key] = weight
            self._tokens[dp_rank] += weight
            assigned.setdefault(dp_rank, []).append(request)
        return assigned

    def forget(self, keys: set[int]) -> dict[int, list[int]]:
        """Drop requests that finished or that nobody waits for; returns those that each DP rank had."""
        had: dict[int, list[int]] = {}
        for dp_rank, weights in enumerate(self._weights):
            for key in keys & weights.keys():
                self._tokens[dp_rank] -= weights.pop(key)
                had.setdefault(dp_rank, []).append(key)
        if len(keys) > sum(map(len, had.values())):
            self._pending = deque(request for request in self._pending if request.key not in keys)
        return had

    def _preference(self, dp_rank: int) -> tuple[bool, int]:
        return len(self._weights[dp_rank]) >= self._window, self._tokens[dp_rank]
