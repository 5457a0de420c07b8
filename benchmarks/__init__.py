"""The project's own promises, measured: each module's `main()` gives rows (name, measured, allowed)."""
