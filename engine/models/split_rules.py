"""Rules by which byte-level BPE tokenizers split text into words before merging: `tokenizer.ggml.pre` by name.

A GGUF file names the rule only; the rules are those of the models' own tokenizer.json files, and
"default" is llama.cpp's. Patterns apply one after the other, each to the pieces that the one before left.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SplitRule:
    patterns: tuple[str, ...]
    adds_bos: bool = False  # when the file has no add_bos_token
    ignores_merges: bool = False  # a word that is a token stays whole, whatever the merges say
    nfc: bool = False  # normalises text to composed characters first


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_TAIL}"
_TEKKEN_UPPER, _TEKKEN_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_TEKKEN_UPPER}*{_TEKKEN_LOWER}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_TEKKEN_UPPER}+{_TEKKEN_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_LLAMA3_RULE = SplitRule((_LLAMA3,), adds_bos=True, ignores_merges=True)
_DIGITS_RULE = SplitRule((r"\p{N}", _GPT2))

SPLIT_RULES = {
    "default": SplitRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": SplitRule((_GPT2,)),
    "smollm": _DIGITS_RULE,
    "starcoder": _DIGITS_RULE,
    "codeshell": _DIGITS_RULE,
    "refact": _DIGITS_RULE,
    "command-r": _DIGITS_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "falcon3": _LLAMA3_RULE,
    "qwen2": SplitRule((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": SplitRule((_QWEN2,)),
    "tekken": SplitRule((_TEKKEN,), adds_bos=True, ignores_merges=True),
}
