"""Find, fetch and read a model into a manifest that every stage can read; without torch."""

from engine.models.errors import ModelError
from engine.models.progress import Progress, ProgressLines
from engine.models.resolve import prepare, read_config

__all__ = ["ModelError", "Progress", "ProgressLines", "prepare", "read_config"]
