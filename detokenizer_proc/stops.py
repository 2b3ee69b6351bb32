"""Stop strings: which comes first in a text, and how much of the text must wait for the answer.

An automaton after Aho and Corasick ("Efficient string matching", 1975): its state is the longest suffix of the
text that begins a stop string, which is exactly what must be held back. One transition a
character, however many stop strings there are.

Rule: the stop string that is complete first wins; of those that the same character completes, the longest.
The rule looks at characters only, so how the text was cut into tokens or steps changes nothing.
"""

from collections import deque
from functools import lru_cache

import msgspec

_CODE_BITS = 21  # of a code point


class StopAutomaton(msgspec.Struct, frozen=True):
    """States are numbered from the root, 0."""

    steps: dict[int, int]  # state << 21 | code point → state
    fallbacks: list[int]  # state → the longest proper suffix of it that is a state
    depths: list[int]  # state → its length in characters
    matches: list[str]  # state → the longest stop string that ends there, "" = none


@lru_cache(maxsize=64)
def compile_stops(stops: tuple[str, ...]) -> StopAutomaton:
    """Build the automaton of some stop strings, none of them empty. Linear in their total length."""
    steps: dict[int, int] = {}
    depths = [0]
    matches = [""]
    children: list[list[tuple[int, int]]] = [[]]
    for stop in stops:
        state = 0
        for character in stop:
            key = state << _CODE_BITS | ord(character)
            if key not in steps:
                steps[key] = len(depths)
                children[state].append((ord(character), len(depths)))
                children.append([])
                depths.append(depths[state] + 1)
                matches.append("")
            state = steps[key]
        matches[state] = stop
    fallbacks = [0] * len(depths)
    queue = deque(child for _, child in children[0])
    while queue:
        state = queue.popleft()
        matches[state] = matches[state] or matches[fallbacks[state]]
        for code, child in children[state]:
            fallbacks[child] = _advance(steps, fallbacks, fallbacks[state], code)
            queue.append(child)
    return StopAutomaton(steps, fallbacks, depths, matches)


def _advance(steps: dict[int, int], fallbacks: list[int], state: int, code: int) -> int:
    while (after := steps.get(state << _CODE_BITS | code)) is None:
        if not state:
            return 0
        state = fallbacks[state]
    return after


class StopSearch:
    """One text being searched as it grows."""

    __slots__ = ("_automaton", "_held", "_include", "_state")

    def __init__(self, automaton: StopAutomaton, include_stop: bool) -> None:
        self._automaton = automaton
        self._include = include_stop
        self._state = 0
        self._held = ""  # the end of the text, as long as the state: it may be the beginning of a stop string

    def feed(self, text: str) -> tuple[str, str]:
        """Search more text; returns what may be shown now, and the stop string found ("" = none).

        With a stop string found the shown text ends before it (after it with `include_stop`), the rest is
        dropped, and the search is over.
        """
        automaton = self._automaton
        state = self._state
        for place, character in enumerate(text):
            state = _advance(automaton.steps, automaton.fallbacks, state, ord(character))
            if match := automaton.matches[state]:
                end = len(self._held) + place + 1
                return (self._held + text)[: end if self._include else end - len(match)], match
        whole = self._held + text
        self._state = state
        shown = len(whole) - automaton.depths[state]
        self._held = whole[shown:]
        return whole[:shown], ""

    def release(self) -> str:
        """Return what is held back: the text ends here without a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
