"""Every message travels unchanged, and no change of one goes unseen."""

from enum import IntEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto.channel import decode_as, encode
from proto.messages import INBOXES, SCHEMA_LISTING, Message

GOLDEN = Path(__file__).parent / "golden" / "messages.txt"
UPDATE = f"python -c 'from proto.messages import SCHEMA_LISTING; print(SCHEMA_LISTING, end=\"\")' > {GOLDEN}"


def strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, bounds of msgpack included."""
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(1 << 63), (1 << 64) - 1),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        str: st.text(st.characters(exclude_categories=["Cs"])),  # lone surrogates cannot travel
        bytes: st.binary(max_size=64),
        NoneType: st.none(),
    }
    if kind in simple:
        return simple[kind]
    if isinstance(kind, type) and issubclass(kind, IntEnum):
        return st.sampled_from(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        return st.builds(kind, **{field.name: strategy(field.type) for field in fields})
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return strategy(args[0])
    if origin is UnionType:
        return st.one_of(*map(strategy, args))
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(strategy(args[0]), max_size=4).map(tuple)
    if origin is tuple:
        return st.tuples(*map(strategy, args))
    if origin is dict:
        return st.dictionaries(strategy(args[0]), strategy(args[1]), max_size=4)
    raise AssertionError(f"teach this test the type {kind}")


def every_message() -> list[type[Message]]:
    def below(base: type[Message]) -> list[type[Message]]:
        return [kind for sub in base.__subclasses__() for kind in (sub, *below(sub))]

    return [kind for kind in below(Message) if kind.__module__.startswith("proto.")]


@pytest.mark.parametrize("kind", every_message(), ids=lambda kind: kind.__name__)
def test_a_message_comes_back_as_it_went(kind: type[Message]) -> None:
    @settings(max_examples=25, deadline=None)
    @given(strategy(kind))
    def round_trip(message: Message) -> None:
        assert decode_as(encode(message), kind) == message

    round_trip()


@pytest.mark.parametrize("inbox", INBOXES.values(), ids=[kind.label for kind in INBOXES])
def test_an_inbox_tells_its_messages_apart(inbox: Any) -> None:
    @settings(max_examples=50, deadline=None)
    @given(strategy(inbox))
    def round_trip(message: Message) -> None:
        back = msgspec.msgpack.decode(encode(message), type=inbox)
        assert type(back) is type(message)

    round_trip()


def test_messages_have_unique_tags_and_no_derived_state() -> None:
    kinds = every_message()
    tags = [kind.__struct_config__.tag for kind in kinds]
    assert len(set(tags)) == len(tags)
    # Decoding would run it again.
    assert not [kind for kind in kinds if hasattr(kind, "__post_init__")]


def test_the_listing_is_the_reviewed_one() -> None:
    assert GOLDEN.read_text() == SCHEMA_LISTING, f"messages changed; if that is meant, run\n  {UPDATE}"
