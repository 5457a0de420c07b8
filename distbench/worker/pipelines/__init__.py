"""Pipeline parallel: a model in stages, torch's stages and schedules over them, and how long each rank is idle."""
