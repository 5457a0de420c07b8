"""A step on hardware that is not here: recorded once in a child process, replayed by a clock and an allocator."""
