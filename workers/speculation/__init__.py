"""Speculation, as far as it goes: draft steps and their inputs. No pool speculates yet.

With `limits.speculative_algorithm` ranks record and rehearse the draft kinds (`eagle_draft`, `eagle_draft_extend`,
`frozen_kv_mtp`, `multi_layer_eagle_draft_extend`) and the target's `target_verify` with all other graphs, and tests
replay them. A step of a running pool replays none: what drafts, verifies and accepts is still to be made, and then says
in `dispatch/budgets/step_kinds.py` which steps these kinds serve.
"""
