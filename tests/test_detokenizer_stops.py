"""The search for stop strings against its rule, spelled out naively."""

from hypothesis import given, settings
from hypothesis import strategies as st

from detokenizer_proc.stops import StopSearch, compile_stops

# Two letters, so that prefixes, overlaps and ties are everywhere.
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=5).map(tuple)
PIECES = st.lists(st.text("ab€", max_size=6), max_size=8)


def naive(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """End and string of the stop that is complete first, the longest of them."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def held_back(text: str, stops: tuple[str, ...]) -> str:
    """The longest end of the text that a stop string begins with."""
    return max((text[i:] for i in range(len(text) + 1) if any(s.startswith(text[i:]) for s in stops)), key=len)


@given(STOPS, PIECES, st.booleans())
@settings(max_examples=500, deadline=None)
def test_however_text_is_cut_the_first_complete_stop_ends_it(
    stops: tuple[str, ...], pieces: list[str], include: bool
) -> None:
    search = StopSearch(compile_stops(stops), include)
    shown = text = ""
    for piece in pieces:
        text += piece
        new, stop = search.feed(piece)
        shown += new
        expected = naive(text, stops)
        if expected is not None:
            end, match = expected
            assert stop == match
            assert shown == text[: end if include else end - len(match)]
            return
        assert not stop
        assert shown + held_back(text, stops) == text
    assert shown + search.release() == text


def test_the_longest_wins_among_those_that_end_together() -> None:
    assert StopSearch(compile_stops(("c", "bc", "abc")), False).feed("xabcd") == ("x", "abc")


def test_the_first_complete_wins_over_one_that_begins_earlier() -> None:
    assert StopSearch(compile_stops(("abcd", "bc")), False).feed("xabcd") == ("xa", "bc")


def test_many_stop_strings_cost_one_transition_a_character() -> None:
    """The server's cap is 4096 bytes of stop strings: the automaton stays as small."""
    stops = tuple(f"{number:063d}" + "x" for number in range(64))
    automaton = compile_stops(stops)
    assert len(automaton.depths) <= sum(map(len, stops)) + 1
    search = StopSearch(automaton, False)
    text = "0" * 60 + "y"
    assert search.feed(text * 50) == (text * 50, "")
