"""One output sequence on its way from ids to text."""

from collections.abc import Sequence as Ids

from detokenizer_proc.decoding import TextDecoder, TextStream
from detokenizer_proc.stops import StopSearch, compile_stops
from proto.messages import Opening, Timing, column


class OutputSequence:
    """One (rid, attempt, index).

    Text passes three places: the stream completes characters, the search holds back what may begin a stop string, and
    after a resume the characters that the caller has already are dropped.
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
        self.timing: Timing | None = timing  # until the first delta carries it
        self.characters = 0  # shown so far
        self.has_output = False
        self.stopped = False  # a stop string ended it: what else comes is dropped
        self._early_tokens = opening.min_new_tokens
        tail: list[int] = column(opening.prompt_tail).tolist()
        self._stream: TextStream = decoder.open_stream(tail, opening.prompt_tokens, opening.skip_special_tokens)
        self._search: StopSearch | None = None
        if opening.stop_strings:
            self._search = StopSearch(compile_stops(opening.stop_strings), opening.include_stop)
        self._surplus = ""  # text that resumed ids spell and the caller does not have yet
        self.resumed_stop = ""
        if opening.resume is not None:
            _, text, self.resumed_stop = self.append_ids(column(opening.resume.output_ids).tolist(), 0)
            self.characters = opening.resume.characters
            self._surplus = text[self.characters :]

    def append_ids(self, ids: Ids[int], start: int) -> tuple[int, str, str]:
        """Add ids from output position `start` on.

        Returns how many count (all, or up to the one that completed a stop string), the text that may be shown now,
        and the stop string found ("" = none).
        """
        stream, search = self._stream, self._search
        if ids:
            self.has_output = True
        if search is None:
            if len(ids) == 1:
                return 1, stream.feed_id(ids[0]), ""
            return len(ids), "".join([stream.feed_id(number) for number in ids]), ""
        shown = []
        for place, number in enumerate(ids):
            text = stream.feed_id(number)
            if start + place < self._early_tokens:
                shown.append(text)
                continue
            text, stop = search.feed(text)
            shown.append(text)
            if stop:
                return place + 1, "".join(shown), stop
        return len(ids), "".join(shown), ""

    def end(self) -> str:
        """End the text: return what was held back, then an incomplete character.

        A half character that the prompt ends in is not output as long as there is no output.
        """
        held = self._search.release() if self._search is not None else ""
        return held + self._stream.flush() if self.has_output else held

    def count_shown(self, text: str) -> tuple[int, str]:
        """Count text as shown; returns the position of its first character, and the text itself."""
        if self._surplus:
            text, self._surplus = self._surplus + text, ""
        position = self.characters
        self.characters += len(text)
        return position, text
