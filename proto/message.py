"""The base of every ring message, apart from `proto.messages` so that a part of them can stand in a file of its own."""

import msgspec


class Message(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Base of all messages; subclasses set a unique `tag`."""
