"""A GPU, FlashInfer and our Triton kernels, as far as the worker uses them, on a CPU.

    with simulate(seed) as gpu:
        ...plain torch code: device="cuda", torch.cuda.Stream, CUDAGraph, pinned and non_blocking copies...

Inside, tensors made on "cuda" are `DeviceTensor`s, torch.cuda is replaced, and the worker's seam
(`worker.cuda.flashinfer_api`) leads to the double. Nothing in the worker knows.

**Lazy.** Every operation on a device tensor is queued in the current stream and done late: streams get on in a random
legal order drawn from `seed`, and a pinned buffer is read or written when its copy is done. So what a GPU would
punish at times is punished here nearly always: a pinned buffer refilled while its copy is in flight, a stream that
does not wait for another, a tensor whose last reference died while another stream still uses it (freed memory is
poisoned in the order of the stream that allocated it), fresh memory used as if it were zero.

**Strict.** FlashInfer's classes check dtypes, lengths, order, dtype and shape of q, the frozen shape of a graph
wrapper, and, when the device gets there, that the schedule in the int workspace is the one of the last `plan` of this
wrapper and agrees with the metadata in device memory. They raise MetadataError. A host tensor among device tensors
raises, and so does `.numpy()` of a device tensor; `.item()`, `.tolist()`, `.cpu()`, boolean indexing and blocking
copies make the host wait, which `torch.cuda.set_sync_debug_mode("error")` refuses here too.

**Graphs.** `torch.cuda.graph` records operations with the memory they use. In a capture, waiting, pageable
copies and `plan` raise CaptureError. `replay` raises if a tensor that the graph uses has died since, or if a wrapper's
buffers moved; each replay first poisons what the graphs of the pool have freed. `graph.reads(tensor)` tells whether a
buffer is among the graph's.

For tests of what a step costs:

    with gpu.timeline.launch_path() as account:   # raises at waits (but Event.synchronize) and pageable copies
        runner.launch(plan)
    account.replays, account.eager, account.waits  # graphs replayed, operations outside graphs, events waited for

    gpu.peek(tensor)      # a host copy, after all queued work; for assertions
    gpu.timeline.advance(n)  # let the device get on a little

Errors on the device surface at whatever call lets it get on, as with CUDA. What is not emulated: times (events give
this machine's), several devices, forks of streams inside a capture, memory fragmentation, bf16 rounding of
intermediate results, and kernels that read beyond their rows.
"""

from tests.flashinfer_double.gpu import Gpu
from tests.flashinfer_double.library import simulate
from tests.flashinfer_double.streams import CaptureError, SimulationError
from tests.flashinfer_double.strict import MetadataError

__all__ = ["CaptureError", "Gpu", "MetadataError", "SimulationError", "simulate"]
