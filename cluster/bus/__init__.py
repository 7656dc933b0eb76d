"""The token bus: new tokens on their way from an engine's process to the ingress, over plain TCP."""
