"""Everything that touches torch. One process here is one rank."""
