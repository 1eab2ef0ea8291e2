"""Self-hosted models and their KV caches."""
