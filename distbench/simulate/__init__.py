"""Simulation of a step on other hardware: recorded once in a child process, replayed by a clock and an allocator."""
