class LoadError(Exception):
    """A model cannot be loaded; the text names the file and what is wrong with it."""
