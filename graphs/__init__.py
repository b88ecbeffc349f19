"""CUDA graphs: capture plans, lockstep capture and replay. Knows no Ray.

Everything here works for any kind of step; what the kinds are is said in `dispatch/budgets/step_kinds.py`. A running
pool replays `decode` and `piecewise`. Speculation's kinds are recorded and rehearsed like them where settings ask for
it, and not replayed yet; see `workers/speculation`.
"""
