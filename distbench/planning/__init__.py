"""Redistribution as data: states, legal steps, bytes, and the exact cheapest path under a cost model. No torch here."""

from distbench.planning.direct_exchange import Exchange, Transfer, plan_exchange
from distbench.planning.graph import COLLECTIVES, Move, legal_steps
from distbench.planning.models import MeshCost, TorchCost
from distbench.planning.path_steps import PricedStep, least_received_bytes, priced_steps
from distbench.planning.pricing import Problem, StepPrice
from distbench.planning.search import NoPath, Route, cheapest_route, forget_prices
from distbench.planning.states import Box, NotHandled, State, box_of, local_shape, parse_state, state_of

__all__ = [
    "COLLECTIVES",
    "Box",
    "Exchange",
    "MeshCost",
    "Move",
    "NoPath",
    "NotHandled",
    "PricedStep",
    "Problem",
    "Route",
    "State",
    "StepPrice",
    "TorchCost",
    "Transfer",
    "box_of",
    "cheapest_route",
    "forget_prices",
    "least_received_bytes",
    "legal_steps",
    "local_shape",
    "parse_state",
    "plan_exchange",
    "priced_steps",
    "state_of",
]
