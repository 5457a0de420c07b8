"""Parts of every rank: its context, clocks, samples, failures. Independent of plans and models."""
