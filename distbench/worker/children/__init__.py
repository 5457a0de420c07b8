"""What a process of its own answers about torch or a plan: no rank is started for it."""
