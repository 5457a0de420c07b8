"""How often the gate cries wolf and how often it finds a slowdown, on launches of unchanged code."""
