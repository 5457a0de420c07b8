"""Redistribution as data: states, legal steps, bytes, and the exact cheapest path under a cost model. No torch here."""

from distbench.planning.graph import COLLECTIVES, Move, legal_steps
from distbench.planning.pricing import Problem, StepPrice
from distbench.planning.search import NoPath, Route, cheapest_route
from distbench.planning.states import Box, NotHandled, State, box_of, local_shape, parse_state

__all__ = [
    "COLLECTIVES",
    "Box",
    "Move",
    "NoPath",
    "NotHandled",
    "Problem",
    "Route",
    "State",
    "StepPrice",
    "box_of",
    "cheapest_route",
    "legal_steps",
    "local_shape",
    "parse_state",
]
