"""Messages that a server would send to a tokenizer."""

from typing import Any

from proto.messages import ChatMessage, RequestParams, Sampling, Submit, TokenizeCall
from tests.builders import i32, make_facts

WORKER = make_facts(num_pages=4, page_size=16, max_model_len=64, vocab_size=601)


def make_params(**changes: Any) -> RequestParams:
    """Defaults of a call that sets nothing, with changes; `logprobs` goes to the sampling."""
    return RequestParams(Sampling(seed=7, logprobs=changes.pop("logprobs", -1)), **changes)


def make_submit(prompt: str | list[int] | list[ChatMessage], rid: int = 1, **changes: Any) -> Submit:
    """A Submit of a text, of ids or of a chat; `changes` are of Submit or of its params."""
    mine = {name: changes.pop(name) for name in ("attempt", "resume", "now") if name in changes}
    chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], ChatMessage)
    return Submit(
        rid=rid,
        attempt=mine.get("attempt", 0),
        text=prompt if isinstance(prompt, str) else None,
        token_ids=i32(*prompt) if isinstance(prompt, list) and not chat else None,
        chat=tuple(prompt) if chat else None,  # type: ignore[arg-type]
        now=mine.get("now", 0.0),
        arrival=123,
        params=make_params(**changes),
        resume=mine.get("resume"),
    )


def make_call(prompt: str | list[ChatMessage], rid: int = 1, add_special_tokens: bool = True) -> TokenizeCall:
    text = prompt if isinstance(prompt, str) else None
    chat = None if isinstance(prompt, str) else tuple(prompt)
    return TokenizeCall(rid, text, chat, 0.0, add_special_tokens)
