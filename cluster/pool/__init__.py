"""A pool: the replicas that serve one length bucket, and the client that the ingress calls them with."""
