"""CUDA graphs: capture mode, capture plans, lockstep capture and replay. Knows no Ray."""
