"""What every rank needs: its context, clocks, samples, failures. Nothing here knows of plans or models."""
