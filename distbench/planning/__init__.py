"""Redistribution as data: states, legal steps, bytes, and the exact cheapest path under a cost model. Without torch."""
