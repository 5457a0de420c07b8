"""Commands that outgrew `cli`, one module each; `cli` adds them to its group."""
