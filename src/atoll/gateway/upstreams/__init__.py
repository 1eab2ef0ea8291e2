"""Whatever answers a request: OpenAI-compatible endpoints, litellm's providers, the local engine, recorded answers."""
