"""Child processes that answer questions about torch or a plan; no rank is started for them."""
