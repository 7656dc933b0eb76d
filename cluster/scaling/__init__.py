"""How many replicas a pool should have. Plain Python, without Ray."""
