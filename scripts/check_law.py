#!/usr/bin/env python3
"""Hold a model against the law of docs/architecture.md and print what was found.

(a) Logits and tokens of every request are bitwise those that it gets alone: in one batch at pipeline depths 1 to 3,
    with the prefix cache, in chunks of 16 and of 512, preempted again and again, in a pool that is too small.
(b) Against transformers in float32, teacher-forced: no logit differs by more than 5e-4, and greedy tokens are the
    same up to the first position where the reference's two best logits lie within 1e-3; at most 1 % of the
    sequences may be excused so.

Exits 1 on a breach. Run it from the repository: .venv/bin/python scripts/check_law.py
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TQDM_DISABLE", "1")  # read when tqdm is imported: transformers would fill stderr

from engine.models import prepare  # noqa: E402
from proto.config import WorkerOptions  # noqa: E402
from proto.model import ModelManifest  # noqa: E402
from tests.pair import Pair, Story  # noqa: E402
from worker.cpu.start import start as start_cpu  # noqa: E402

MAX_LOGIT_ERROR = 5e-4
TIE_GAP = 1e-3
MAX_EXCUSED = 0.01
WARM_TOKENS = 4  # output tokens of the run that fills the prefix cache

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "Der schnelle braune Fuchs springt",
    "대한민국의 수도는",
    "日本で一番高い山は",
    "السماء زرقاء لأن",
    "🙂🙃👩‍👩‍👧‍👦 What do these emoji mean?",
    "x",
    "Question: why is the sky blue?\nAnswer:",
    "SELECT name, COUNT(*) FROM people WHERE",
    "The quick brown fox jumps over the lazy dog. " * 8,
    "To be, or not to be, that is the question: " * 3 + "whether",
    "<html><head><title>Test</title></head><body>",
    "Water boils at 100 degrees Celsius. Iron melts at",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, two astronauts",
    "List three fruits:\n1.",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 12,
)


@dataclass(frozen=True)
class Variant:
    """Surroundings in which requests must not notice that they are not alone."""

    name: str
    settings: dict[str, Any]
    warm: bool = False  # fill the prefix cache first
    must_preempt: bool = False


def variants(tiny_pool: int) -> list[Variant]:
    return [
        Variant("together, depth 1", {"depth": 1}),
        Variant("together, depth 2", {"depth": 2}),
        Variant("together, depth 3", {"depth": 3}),
        Variant("prefix cache", {"depth": 2, "prefix_caching": True}, warm=True),
        Variant("chunks of 16", {"depth": 2, "max_num_batched_tokens": 16}),
        Variant("chunks of 512", {"depth": 2, "max_num_batched_tokens": 512}),
        Variant("preempted every 3 steps", {"depth": 2, "debug_preempt_every": 3}, must_preempt=True),
        Variant(
            "preempted every 5 steps, prefix cache, depth 3",
            {"depth": 3, "debug_preempt_every": 5, "prefix_caching": True},
            must_preempt=True,
        ),
        Variant(f"pool of {tiny_pool} pages", {"depth": 2, "num_pages": tiny_pool}, must_preempt=True),
    ]


class Bench:
    """One loaded model and the requests that it is held against."""

    def __init__(
        self, manifest: ModelManifest, prompts: list[list[int]], tokens: int, page_size: int, dtype: str, device: str
    ) -> None:
        self.prompts = prompts
        self.tokens = tokens
        # All can start, none can be denied, but only half of what they grow by is there.
        starts = [-(-(len(prompt) + 1) // page_size) for prompt in prompts]
        ends = [-(-(len(prompt) + tokens - 1) // page_size) for prompt in prompts]
        self.tiny_pool = max(max(ends) + 1, (sum(starts) + sum(ends)) // 2)
        self.options = WorkerOptions(
            manifest=manifest,
            device=device,
            dtype=dtype,
            load_format="auto",
            seed=0,
            page_size=page_size,
            num_pages=2 * (sum(ends) + len(ends)),
            kv_bytes=None,
            gpu_memory_utilization=0.5,
            max_model_len=None,
            max_num_seqs=max(len(prompts), 32),
            max_num_batched_tokens=2048,
            threads=None,
        )
        self.runner = start_cpu(self.options, lambda _text, _done, _total: None)

    def alone(self, keep_logits: bool) -> list[Story]:
        """Every request in an engine of its own, one step at a time."""
        stories = []
        for prompt in self.prompts:
            pair = Pair(self.runner, self.options, depth=1, keep_logits=keep_logits)
            rid = pair.submit(prompt, self.tokens)
            pair.run()
            stories.append(pair.stories[rid])
        return stories

    def play(self, variant: Variant) -> tuple[list[Story], Pair]:
        pair = Pair(self.runner, self.options, **variant.settings)
        if "num_pages" in variant.settings:
            pair.promise_short_outputs()
        if variant.warm:
            for prompt in self.prompts:
                pair.submit(prompt, WARM_TOKENS)
            pair.run()
        rids = [pair.submit(prompt, self.tokens) for prompt in self.prompts]
        pair.run()
        return [pair.stories[rid] for rid in rids], pair


def count_equal(stories: Sequence[Story], expected: Sequence[Story]) -> int:
    """Output positions with bitwise equal logits and the same token."""
    equal = 0
    for story, wanted in zip(stories, expected, strict=True):
        for output, (token, wanted_token) in enumerate(zip(story.tokens, wanted.tokens, strict=False)):
            position = len(story.prompt) + output
            digests = {*story.digests[position], *wanted.digests[position]}
            equal += len(digests) == 1 and token == wanted_token
    return equal


def check_variants(bench: Bench, expected: list[Story], dtype: str) -> bool:
    """Part (a). Returns whether the law holds."""
    total = sum(len(story.tokens) for story in expected)
    holds = total == len(bench.prompts) * bench.tokens
    for variant in variants(bench.tiny_pool):
        begin = time.monotonic()
        stories, pair = bench.play(variant)
        equal = count_equal(stories, expected)
        counters = pair.scheduler.counters()
        notes = [f"{pair.steps} steps"]
        if counters["preemptions"]:
            notes.append(f"{counters['preemptions']:.0f} preemptions")
        if counters["prefix_hit_tokens"]:
            notes.append(f"{counters['prefix_hit_tokens']:.0f} tokens from the cache")
        right = equal == total
        if variant.must_preempt and not counters["preemptions"]:
            right = False
            notes.append("BREACH: it was to preempt")
        if variant.warm and not counters["prefix_hit_tokens"]:
            right = False
            notes.append("BREACH: it was to hit the cache")
        holds &= right
        print(
            f"{dtype:9} {variant.name:48} {equal}/{total} bitwise equal {'' if equal == total else 'BREACH '}"
            f"({', '.join(notes)}, {time.monotonic() - begin:.1f} s)",
            flush=True,
        )
    return holds


# --------------------------------------------------------------------------- (b) transformers


def load_reference(manifest: ModelManifest) -> Any:
    """The same model in transformers, float32, read by transformers' own loaders."""
    import torch
    import transformers
    from transformers import modeling_gguf_pytorch_utils

    auto: Any = transformers.AutoModelForCausalLM
    gguf: Any = modeling_gguf_pytorch_utils
    source = Path(manifest.source)
    if manifest.weight_format != "gguf":
        return auto.from_pretrained(source, dtype=torch.float32)
    # from_pretrained(gguf_file=…) does the same, but wants accelerate for it
    config = transformers.AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    model = auto.from_config(config, dtype=torch.float32)
    weights = gguf.load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    missing = set(model.load_state_dict(weights, strict=False).missing_keys)
    if missing - {"lm_head.weight"} or (missing and not config.tie_word_embeddings):
        raise RuntimeError(f"{source} does not give the reference {', '.join(sorted(missing))}")
    model.tie_weights()
    model.eval()
    return model


def reference_logits(model: Any, story: Story) -> npt.NDArray[np.float32]:
    """[output tokens, vocab]: what the reference thinks before each of our tokens, given ours before it."""
    import torch

    ids = torch.tensor([[*story.prompt, *story.tokens[:-1]]])
    with torch.inference_mode():
        logits: npt.NDArray[np.float32] = model(ids).logits[0, len(story.prompt) - 1 :].numpy()
    return logits


def check_reference(bench: Bench, stories: list[Story]) -> bool:
    """Part (b). Returns whether the law holds."""
    begin = time.monotonic()
    model = load_reference(bench.options.manifest)
    worst, excused, wrong = 0.0, 0, 0
    for story in stories:
        theirs = reference_logits(model, story)
        first = len(story.prompt)
        ours = np.stack([story.logits[first + output] for output in range(len(story.tokens))])
        worst = max(worst, float(np.abs(ours - theirs).max()))
        differing = np.flatnonzero(theirs.argmax(axis=1) != np.array(story.tokens))
        if len(differing):
            best = np.sort(theirs[differing[0]])[-2:]
            if best[1] - best[0] < TIE_GAP:
                excused += 1
            else:
                wrong += 1
    holds = worst <= MAX_LOGIT_ERROR and not wrong and excused <= MAX_EXCUSED * len(stories)
    equal = len(stories) - excused - wrong
    print(
        f"float32   against transformers: largest |Δlogit| {worst:.1e} (limit {MAX_LOGIT_ERROR:g}); greedy tokens: "
        f"{equal}/{len(stories)} sequences equal, {excused} excused by a gap under {TIE_GAP:g}, "
        f"{wrong} wrong {'' if holds else 'BREACH '}({time.monotonic() - begin:.1f} s)",
        flush=True,
    )
    return holds


def tokenize(manifest: ModelManifest, texts: Sequence[str]) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(manifest.tokenizer_json)
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--model", default="demo", help="as of quintet serve (default: demo)")
    parser.add_argument("--prompts", type=Path, help="file with one prompt a line (default: built-in ones)")
    parser.add_argument("--count", type=int, default=20, help="how many prompts (default: 20)")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each (default: 64)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens a page (default: 16)")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "reference"])
    parser.add_argument("--no-reference", action="store_true", help="leave out the comparison with transformers")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    manifest = prepare(arguments.model)
    texts = arguments.prompts.read_text().splitlines() if arguments.prompts else PROMPTS
    prompts = tokenize(manifest, [text for text in texts if text][: arguments.count])
    if not prompts or not all(prompts):
        print("a prompt without tokens cannot be run", file=sys.stderr)
        return 2
    print(f"{manifest.name}: {len(prompts)} prompts of {min(map(len, prompts))}..{max(map(len, prompts))} tokens")
    holds = True
    for dtype in arguments.dtype:
        begin = time.monotonic()
        bench = Bench(manifest, prompts, arguments.tokens, arguments.page_size, dtype, arguments.device)
        loaded = time.monotonic()
        compare = dtype == "float32" and not arguments.no_reference
        expected = bench.alone(keep_logits=compare)
        print(f"{dtype:9} alone ({loaded - begin:.1f} s to load, {time.monotonic() - loaded:.1f} s)", flush=True)
        holds &= check_variants(bench, expected, dtype)
        if compare:
            holds &= check_reference(bench, expected)
    print("the law holds" if holds else "THE LAW IS BROKEN")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
