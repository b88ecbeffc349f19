"""The rank side: the actor, model loading, attention and KV cache, the scheduler and the step loop."""
