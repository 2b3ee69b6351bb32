"""What the double raises where a GPU would be silent."""

from tests.flashinfer_double.streams import SimulationError


class MetadataError(SimulationError):
    """Metadata that would make a GPU compute something else without a word."""


def need(condition: bool, text: str) -> None:
    if not condition:
        raise MetadataError(text)
