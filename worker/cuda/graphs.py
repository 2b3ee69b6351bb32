"""CUDA graphs of decode steps, one for each of a few batch sizes."""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import partial

import torch

from worker.cuda.sampling import Mode
from worker.cuda.step import GpuStep
from worker.loader.load import Progress


def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """Return 1, 2, 4, 8, then every 8 to 64, every 16 to 256, every 32 beyond; the last is max_rows itself."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_rows, 32)]
    return (*(size for size in sizes if size < max_rows), max_rows)


class DecodeGraphs:
    """For each bucket a graph of the forward pass to the logits, and one of sampling in each mode.

    They share one memory pool: a graph's own memory is free for others once it has run, since all run on one stream.
    Results lie in the buffers of `GpuStep`, outside the pool.
    """

    def __init__(self, step: GpuStep, stream: torch.cuda.Stream, max_rows: int) -> None:
        self.sizes = bucket_sizes(max_rows)
        self._step = step
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._forward: dict[int, torch.cuda.CUDAGraph] = {}
        self._sample: dict[tuple[int, Mode], torch.cuda.CUDAGraph] = {}

    def bucket(self, rows: int) -> int:
        """Return the smallest bucket that holds so many rows."""
        return self.sizes[bisect_left(self.sizes, rows)]

    def capture(self, sizes: Iterable[int], progress: Progress) -> None:
        """Capture the largest first, so that the pool has its full size after the first and the others fit in."""
        order = sorted(sizes, reverse=True)
        for done, size in enumerate(order):
            progress("capturing CUDA graphs", done, len(order))
            self._pad_inputs(size)
            self._forward[size] = self._record(partial(self._step.decode, size), size)
            for mode in Mode:
                self._sample[size, mode] = self._record(partial(self._step.sample, size, mode))
        progress("capturing CUDA graphs", len(order), len(order))

    def decode(self, bucket: int) -> None:
        """Replay the forward pass, for which attention has been planned."""
        self._forward[bucket].replay()

    def sample(self, bucket: int, mode: Mode) -> None:
        self._sample[bucket, mode].replay()

    def _record(self, work: Callable[[], None], planned: int = 0) -> torch.cuda.CUDAGraph:
        """Run `work` once, which loads modules, then capture it; `planned`: rows of attention, 0 = it has none."""
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if planned:
                self._step.attention.plan_graph(None, planned)
            work()
            if planned:
                self._step.attention.plan_graph(None, planned)
            torch.cuda.synchronize()
            # Not by torch.cuda.graph, which collects garbage each time: many seconds for a hundred graphs.
            # Only this thread is held to a capture's rules: NCCL has one that looks at events.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph

    def _pad_inputs(self, size: int) -> None:
        """Make all rows padding: position 0 of the padding slot, on the dummy page."""
        with torch.cuda.stream(self._stream):
            self._step.inputs[:size].fill_(self._step.state.padding_slot)
            self._step.inputs[size : 2 * size].zero_()
            for pages in self._step.attention.groups.values():
                pages.kv_indices[:size].fill_(pages.dummy_page)
