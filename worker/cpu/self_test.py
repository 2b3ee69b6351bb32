"""The start-up self-test of batch invariance: a request's logits do not depend on its surroundings."""

import numpy as np
import torch

from proto.messages import WorkerFacts
from worker.cpu.step import CpuStep
from worker.device import BatchInvarianceError
from worker.steps.batch import I32Array
from worker.steps.prompts import CHUNK, LENGTHS, step


def check_batch_invariance(cpu: CpuStep) -> None:
    """Compare logits bitwise: prompts alone, all in one step, and in chunks of 16. Raises BatchInvarianceError.

    Writes into the first pages, so call it before anything is served. Also the warm-up that compiles kernels.
    """
    facts, size = cpu.facts, cpu.facts.page_size
    generator = np.random.default_rng(0)
    lengths = [min(n, facts.max_model_len) for n in LENGTHS]
    if sum(-(-n // size) for n in lengths) > pages_of_all_layers(facts):
        lengths = lengths[:1]
    prompts = [generator.integers(0, facts.vocab_size, n, dtype=np.int32) for n in lengths]
    alone = torch.cat([cpu.logits(step([prompt], size)) for prompt in prompts])
    together = cpu.logits(step(prompts, size))
    chunked = torch.cat([_in_chunks(cpu, prompt) for prompt in prompts])
    for name, logits in (("in one batch", together), ("in chunks", chunked)):
        if not torch.equal(alone, logits):
            worst = (alone - logits).abs().max().item()
            raise BatchInvarianceError(
                f"logits of prompts {name} differ from those of prompts alone, by up to {worst:g}, on this machine"
            )


def pages_of_all_layers(facts: WorkerFacts) -> int:
    """Return how many pages a step may name that are the same for all layers."""
    return min(pages for pages in (facts.num_pages, facts.window_pages) if pages)


def _in_chunks(cpu: CpuStep, prompt: I32Array) -> torch.Tensor:
    for start in range(0, len(prompt), CHUNK):
        logits = cpu.logits(step([prompt[start : start + CHUNK]], cpu.facts.page_size, [start]))
    return logits
