"""The start-up self-test of --deterministic: a request's logits do not depend on its surroundings."""

from dataclasses import replace

import numpy as np
import torch

from proto.messages import WorkerFacts
from worker.cuda.step import GpuStep
from worker.cuda.tiles import cut_chunks
from worker.device import BatchInvarianceError
from worker.steps.batch import I32Array, StepBatch
from worker.steps.prompts import LENGTHS, step


def check_batch_invariance(gpu: GpuStep, facts: WorkerFacts, stream: torch.cuda.Stream, most: int) -> None:
    """Compare logits bitwise: prompts alone, all in one step, and their last ids as decode rows.

    `most`: as `cut_chunks` takes it. Writes into the first pages, so call it before anything is served. Raises
    BatchInvarianceError.
    """
    size = facts.page_size
    room = min(pages.dummy_page for pages in gpu.attention.groups.values()) * size
    generator = np.random.default_rng(0)
    prompts: list[I32Array] = []
    for length in LENGTHS:
        taken = sum(-(-len(prompt) // size) * size for prompt in prompts)
        tokens = length + sum(map(len, prompts))
        fits = length <= facts.max_model_len and tokens <= facts.max_num_batched_tokens
        if fits and taken + length + size <= room and len(prompts) < facts.max_num_seqs:
            prompts.append(generator.integers(0, facts.vocab_size, length, dtype=np.int32))

    def logits(batch: StepBatch) -> torch.Tensor:
        with torch.inference_mode(), torch.cuda.stream(stream):
            gpu.attention.plan(cut_chunks(batch, most, size, facts.window))
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
            raise BatchInvarianceError(
                f"--deterministic: logits {name} differ from those of prompts alone, by up to {worst:g}, on this GPU"
            )
