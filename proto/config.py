"""The one JSON document that a stage starts with: `python -P -m scheduler RUN/scheduler-0.json`.

Written by `engine.documents` from the command line, so that any stage can be started by hand, under a
debugger or a profiler.
"""

from pathlib import Path

import msgspec

from proto.ids import Address, StageKind
from proto.model import ModelManifest


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str
    port: int  # the real one: the supervisor has bound it
    reuse_port: bool  # True: share the port with the supervisor's placeholder and sibling servers
    served_model_names: tuple[str, ...]
    num_tokenizers: int
    num_schedulers: int
    num_detokenizers: int
    max_in_flight_requests: int
    max_in_flight_bytes: int
    max_message_bytes: int
    max_stream_buffer_bytes: int  # a stream ends when its client leaves more than this unread
    log_requests: bool


class TokenizerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    manifest: ModelManifest
    template_timeout: float  # seconds


class DetokenizerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    manifest: ModelManifest


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pipeline_depth: int
    prefix_caching: bool
    chunked_prefill: bool
    max_num_batched_tokens: int
    max_num_seqs: int
    max_queue: int  # requests that may wait; more are refused as EXHAUSTED
    debug_preempt_every: int  # steps between forced preemptions; 0 = never


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    manifest: ModelManifest
    device: str  # "cpu", "reference", "cuda", "sim:h200", …
    dtype: str  # "auto", "float32", "bfloat16", "float16"
    load_format: str  # "auto", or "dummy": random weights
    seed: int  # random weights of load_format "dummy" follow from it
    page_size: int
    num_pages: int | None  # None = as many as kv_bytes holds
    kv_bytes: int | None  # None = gpu_memory_utilization of what is free
    gpu_memory_utilization: float
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    threads: int | None  # threads of each worker; None = its share of the cores
    pipeline_depth: int = 2  # cuda: steps in flight, whose host memory is made ready at start
    enforce_eager: bool = False  # cuda: no CUDA graphs
    attention_backend: str = "auto"  # by name: see worker/cpu/backends.py and worker/cuda/backends.py
    kv_cache_dtype: str = "auto"  # "auto" = as `dtype`; otherwise one that the device offers, see proto/devices.py
    deterministic: bool = False  # cuda: logits do not depend on the batch; elsewhere they never do
    tensor_parallel_size: int = 1  # ranks that share a replica's model
    data_parallel_size: int = 1  # replicas

    @property
    def num_workers(self) -> int:
        """Worker processes of all replicas: they divide this machine's cores, memory and GPUs."""
        return self.data_parallel_size * self.tensor_parallel_size


Options = ServerOptions | TokenizerOptions | DetokenizerOptions | SchedulerOptions | WorkerOptions

OPTIONS: dict[StageKind, type[Options]] = {
    StageKind.SERVER: ServerOptions,
    StageKind.TOKENIZER: TokenizerOptions,
    StageKind.DETOKENIZER: DetokenizerOptions,
    StageKind.SCHEDULER: SchedulerOptions,
    StageKind.WORKER: WorkerOptions,
}


class StageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that one stage is told at its start."""

    kind: StageKind
    index: int  # see `Address`
    rank: int = 0
    incarnation: int  # counts up over all starts of an instance
    supervisor_incarnation: int
    run_dir: str
    death_fd: int  # read end of the supervisor's death pipe; -1 = started by hand
    log_level: str
    options: msgspec.Raw  # a struct of the kind's own type, see `options_of`

    @property
    def address(self) -> Address:
        return Address(self.kind, self.index, self.rank)


def load_config(path: str) -> StageConfig:
    """Read a stage's document. Raises msgspec.ValidationError naming the bad field, or OSError."""
    return msgspec.json.decode(Path(path).read_bytes(), type=StageConfig)


def options_of(config: StageConfig) -> Options:
    """The stage's own options, of the type that its kind wants."""
    return msgspec.json.decode(config.options, type=OPTIONS[config.kind])
