"""Redistribution as data: states, legal steps, bytes, and the exact cheapest path under a cost model. No torch here."""

from distbench.planning.cost_profile import TorchCost
from distbench.planning.direct_exchange import Exchange, plan_direct, plan_exchange
from distbench.planning.graph import Move, legal_steps
from distbench.planning.placement_states import Box, NotHandled, State, box_of, parse_state, state_of
from distbench.planning.pricing import Problem, least_received_bytes, priced_steps
from distbench.planning.search import NoPath, cheapest_route, forget_prices, least_peak_route

__all__ = [
    "Box",
    "Exchange",
    "Move",
    "NoPath",
    "NotHandled",
    "Problem",
    "State",
    "TorchCost",
    "box_of",
    "cheapest_route",
    "forget_prices",
    "least_peak_route",
    "least_received_bytes",
    "legal_steps",
    "parse_state",
    "plan_direct",
    "plan_exchange",
    "priced_steps",
    "state_of",
]
