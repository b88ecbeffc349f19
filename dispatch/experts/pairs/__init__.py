"""What experts over sorted pairs share, and the grouped GEMMs that compute them; `tuned_experts` is where to begin."""
