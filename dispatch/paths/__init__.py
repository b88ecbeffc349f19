"""Ways from a layer's routed rows to their results: made by name, measured, chosen by a step's rows."""
