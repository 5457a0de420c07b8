"""Parts of every rank: its context, clocks, samples, failures. These parts do not depend on plans and models."""
