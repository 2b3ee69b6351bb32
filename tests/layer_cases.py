"""What tests of the forward pass share: options, loading, and playing sequences through it."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from proto.config import WorkerOptions
from proto.model import ModelManifest
from tests.builders import make_worker_options
from worker.cpu.self_test import pages_of_all_layers
from worker.cpu.start import load as load_step
from worker.cpu.step import CpuStep
from worker.steps.batch import I32Array
from worker.steps.prompts import step

Row = tuple[I32Array, int]  # ids to compute, and the position of the first


def worker_options(manifest: ModelManifest, **changes: Any) -> WorkerOptions:
    values: dict[str, Any] = {
        "manifest": manifest,
        "page_size": 16,
        "num_pages": 256,
        "gpu_memory_utilization": 0.5,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "threads": 1,  # tiny models gain nothing from a second one
    }
    return make_worker_options(**(values | changes))


def load(manifest: ModelManifest, **changes: Any) -> CpuStep:
    return load_step(worker_options(manifest, **changes), lambda text, done, total: None)


class Player:
    """Runs rows of several sequences, each in pages of its own, scattered over the pool."""

    def __init__(self, forward: CpuStep, sequences: int, length: int, seed: int = 0) -> None:
        self.forward = forward
        per_sequence = -(-length // forward.facts.page_size)
        order = np.random.default_rng(seed).permutation(pages_of_all_layers(forward.facts))[: sequences * per_sequence]
        self.pages = order.reshape(sequences, per_sequence).astype(np.int32)

    def run(self, rows: dict[int, Row], every_token: bool = False) -> torch.Tensor:
        """One step of {sequence: row}; logits of each row's last token, or of every token."""
        size = self.forward.facts.page_size
        batch = step([ids for ids, _ in rows.values()], size, [start for _, start in rows.values()])
        lengths = [start + len(ids) for ids, start in rows.values()]
        kv_indices = [self.pages[s][: -(-n // size)] for s, n in zip(rows, lengths, strict=True)]
        slots = []
        for sequence, (ids, start) in rows.items():
            positions = np.arange(start, start + len(ids))
            slots.append(self.pages[sequence][positions // size] * size + positions % size)
        changes: dict[str, Any] = {
            "kv_indices": np.concatenate(kv_indices),
            "kv_slots": np.concatenate(slots).astype(np.int32),
        }
        if every_token:
            changes["logit_tokens"] = np.arange(len(batch.token_ids), dtype=np.int32)
        return self.forward.logits(replace(batch, **changes))

    def chunked(self, sequence: int, ids: I32Array, chunk: int, start: int = 0) -> torch.Tensor:
        """Logits [len(ids), vocab] of ids from `start` on, computed `chunk` at a time."""
        parts = [
            self.run({sequence: (ids[i : i + chunk], start + i)}, every_token=True) for i in range(0, len(ids), chunk)
        ]
        return torch.cat(parts)


def prompt(length: int, vocab_size: int, seed: int) -> I32Array:
    return np.random.default_rng(seed).integers(0, vocab_size, length, dtype=np.int32)
