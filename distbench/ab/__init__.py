"""Two revisions or environments launched in turn until the verdict is settled. Imports nothing: it starts fast."""
