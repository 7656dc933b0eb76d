"""Who may use the server, how much of it, and what is written down: keys, limits, audit, the bus' TLS."""
