"""Hardware files: what a device, its links and its host can do, each figure with where it comes from."""
