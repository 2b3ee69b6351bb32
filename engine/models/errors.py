"""The one error of this package."""


class ModelError(Exception):
    """A model cannot be used. The message names what was tried, the file, the key and what is wrong."""
