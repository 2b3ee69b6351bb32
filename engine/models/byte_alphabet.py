"""How byte-level BPE spells bytes as printable characters (Radford et al. 2019, GPT-2)."""


def byte_alphabet() -> list[str]:
    """The character for each of the 256 bytes."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    substitutes = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(substitutes)) for byte in range(256)]
