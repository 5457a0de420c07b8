"""How a DTensor is moved from one layout to another, by every planner; and what must come out."""
