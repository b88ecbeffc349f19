"""CUDA graphs: capture mode, plans, lockstep capture and replay. Empty until the pool records graphs."""
