"""Two revisions, installations or environments of one thing, launched in turn until the verdict is settled.

Nothing is imported here, so that the command line starts fast.
"""
