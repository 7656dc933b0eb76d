"""A cluster simulated around the router's own code; real runs share its loads and figures."""
