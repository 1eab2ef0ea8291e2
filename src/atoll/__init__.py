"""Atoll: one OpenAI-compatible endpoint in front of many models."""

__version__ = "0.1.0"

__all__ = ["__version__"]
