"""Redistribution of a DTensor from one layout to another by every planner, and the expected results."""
