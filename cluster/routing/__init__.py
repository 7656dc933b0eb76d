"""Which pool and which replica a request goes to, and whether it may come in. Plain Python, without Ray."""
