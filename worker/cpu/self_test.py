"""The start-up self-test of the law: what a request gets does not depend on its surroundings."""

import numpy as np
import torch

from worker.cpu.forward import Forward
from worker.steps.batch import I32Array
from worker.steps.prompts import CHUNK, LENGTHS, LawError, step


def check_law(forward: Forward) -> None:
    """Compare logits bitwise: prompts alone, all in one step, and in chunks of 16. Raises LawError.

    Writes into the first pages; to be called before anything is served. Also the warm-up that compiles kernels.
    """
    generator = np.random.default_rng(0)
    lengths = [min(n, forward.max_model_len) for n in LENGTHS]
    if sum(-(-n // forward.page_size) for n in lengths) > pages_of_all_layers(forward):
        lengths = lengths[:1]
    prompts = [generator.integers(0, forward.vocab_size, n, dtype=np.int32) for n in lengths]
    alone = torch.cat([forward.forward(step([prompt], forward.page_size)) for prompt in prompts])
    together = forward.forward(step(prompts, forward.page_size))
    chunked = torch.cat([_in_chunks(forward, prompt) for prompt in prompts])
    for name, logits in (("in one batch", together), ("in chunks", chunked)):
        if not torch.equal(alone, logits):
            worst = (alone - logits).abs().max().item()
            raise LawError(f"logits of prompts {name} differ from those alone, by up to {worst:g}, on this machine")


def pages_of_all_layers(forward: Forward) -> int:
    """Pages that a step may name which has the same for all layers."""
    return min(pages for pages in (forward.num_pages, forward.window_pages) if pages)


def _in_chunks(forward: Forward, prompt: I32Array) -> torch.Tensor:
    for start in range(0, len(prompt), CHUNK):
        logits = forward.forward(step([prompt[start : start + CHUNK]], forward.page_size, [start]))
    return logits
