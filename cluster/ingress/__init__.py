"""The HTTP side: OpenAI-shaped endpoints over a `PoolClient`; no ray and no torch in here."""
