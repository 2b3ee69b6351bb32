from worker.device import DeviceError


class LoadError(DeviceError):
    """A model cannot be loaded; the text names the file and what is wrong with it."""
