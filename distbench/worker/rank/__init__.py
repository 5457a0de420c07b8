"""What one rank is made of: its context, clocks, samples, failures. No plan and no model is known here."""
