"""Weights from files into a model's parameters."""

from worker.loader.errors import LoadError

__all__ = ["LoadError"]
