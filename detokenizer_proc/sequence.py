"""One output sequence on its way from ids to text."""

from collections.abc import Sequence as Ids

from detokenizer_proc.decoding import TextDecoder, TextStream
from detokenizer_proc.stops import StopSearch, compile_stops
from proto.messages import Opening, Timing, column


class OutputSequence:
    """What is known of one (rid, attempt, index).

    Text goes through three stations: the stream completes characters, the search holds back what may begin a
    stop string, and after a resume the characters that the caller has already are taken off.
    """

    __slots__ = (
        "_early_tokens",
        "_search",
        "_stream",
        "_surplus",
        "attempt",
        "characters",
        "has_output",
        "logprobs",
        "prompt_tokens",
        "resumed_stop",
        "stopped",
        "timing",
    )

    def __init__(self, opening: Opening, timing: Timing, decoder: TextDecoder) -> None:
        self.attempt = opening.attempt
        self.prompt_tokens = opening.prompt_tokens
        self.logprobs = opening.logprobs
        self.timing: Timing | None = timing  # until the first delta took it
        self.characters = 0  # given out so far
        self.has_output = False
        self.stopped = False  # a stop string ended it: what else comes is dropped
        self._early_tokens = opening.min_new_tokens
        tail: list[int] = column(opening.prompt_tail).tolist()
        self._stream: TextStream = decoder.open(tail, opening.prompt_tokens, opening.skip_special_tokens)
        self._search: StopSearch | None = None
        if opening.stop_strings:
            self._search = StopSearch(compile_stops(opening.stop_strings), opening.include_stop)
        self._surplus = ""  # of a resume: text that its ids give and the caller does not have
        self.resumed_stop = ""
        if opening.resume is not None:
            _, text, self.resumed_stop = self.push(column(opening.resume.output_ids).tolist(), 0)
            self.characters = opening.resume.characters
            self._surplus = text[self.characters :]

    def push(self, ids: Ids[int], start: int) -> tuple[int, str, str]:
        """Take ids from output position `start` on.

        Returns how many count (all, or up to the one that completed a stop string), the text that may be
        shown now, and the stop string found ("" = none).
        """
        stream, search = self._stream, self._search
        if ids:
            self.has_output = True
        if search is None:
            if len(ids) == 1:
                return 1, stream.push(ids[0]), ""
            return len(ids), "".join([stream.push(number) for number in ids]), ""
        shown = []
        for place, number in enumerate(ids):
            text = stream.push(number)
            if start + place < self._early_tokens:
                shown.append(text)
                continue
            text, stop = search.feed(text)
            shown.append(text)
            if stop:
                return place + 1, "".join(shown), stop
        return len(ids), "".join(shown), ""

    def end(self) -> str:
        """Text that only the end lets out: what was held back, then an incomplete character.

        A half character of the prompt is not output while there is none.
        """
        held = self._search.release() if self._search is not None else ""
        return held + self._stream.flush() if self.has_output else held

    def give(self, text: str) -> tuple[int, str]:
        """Count text as given; returns its first character's position and the text itself."""
        if self._surplus:
            text, self._surplus = self._surplus + text, ""
        position = self.characters
        self.characters += len(text)
        return position, text
