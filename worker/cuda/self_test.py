"""The start-up self-test of --deterministic: a request's logits do not depend on its surroundings."""

from dataclasses import replace

import numpy as np
import torch

from worker.cuda.step import GpuStep
from worker.cuda.tiles import cut_chunks
from worker.steps.batch import I32Array, StepBatch
from worker.steps.prompts import LENGTHS, LawError, step


def check_law(
    gpu: GpuStep, stream: torch.cuda.Stream, most: int, max_tokens: int, max_len: int, window: int = 0
) -> None:
    """Compare logits bitwise: prompts alone, all in one step, and their last ones as decode rows. Raises LawError.

    `most` and `window`: as `cut_chunks` takes them. Writes into the first pages; to be called before anything is
    served.
    """
    size, vocabulary = gpu.attention.shape.page_size, gpu.logits.shape[1]
    room = min(pages.dummy_page for pages in gpu.attention.groups.values()) * size
    generator = np.random.default_rng(0)
    prompts: list[I32Array] = []
    for length in LENGTHS:
        taken = sum(-(-len(prompt) // size) * size for prompt in prompts)
        fits = length <= max_len and length + sum(map(len, prompts)) <= max_tokens and taken + length + size <= room
        if fits and len(prompts) < len(gpu.logits):
            prompts.append(generator.integers(0, vocabulary, length, dtype=np.int32))

    def logits(batch: StepBatch) -> torch.Tensor:
        with torch.inference_mode(), torch.cuda.stream(stream):
            gpu.attention.plan(cut_chunks(batch, most, size, window))
            ids, positions = (torch.from_numpy(a).to("cuda") for a in (batch.token_ids, batch.positions))
            hidden = gpu.model.hidden(ids, positions, gpu.attention)
            rows = torch.from_numpy(batch.logit_tokens).to("cuda")
            return gpu.model.logits(hidden[rows]).cpu()

    if not prompts:
        return
    alone = torch.cat([logits(step([prompt], size)) for prompt in prompts])
    together = logits(step(prompts, size))
    last = step([prompt[-1:] for prompt in prompts], size, [len(prompt) - 1 for prompt in prompts])
    decoded = logits(replace(last, decode_rows=len(prompts)))
    for name, found in (("in one batch", together), ("of decode rows", decoded)):
        if not torch.equal(alone, found):
            worst = (alone - found).abs().max().item()
            raise LawError(
                f"--deterministic: logits {name} differ from those of prompts alone, by up to {worst:g}, on this GPU"
            )
