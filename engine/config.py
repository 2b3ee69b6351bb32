"""What an instance is to be, and the documents that its stages start with."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import psutil

from proto.config import (
    DetokenizerOptions,
    Options,
    SchedulerOptions,
    ServerOptions,
    StageConfig,
    TokenizerOptions,
    WorkerOptions,
)
from proto.ids import Address, StageKind
from proto.model import ModelManifest

PAGE_SIZE = 16
_TEMPLATE_SECONDS = 5.0
_MAX_MESSAGE_BYTES = 64 << 20
_CPU_KV_BYTES = 2 << 30
_CPU_KV_SHARE = 0.25  # at most, of the memory that is free at start

MODULES: dict[StageKind, str] = {
    StageKind.SERVER: "server",
    StageKind.TOKENIZER: "tokenizer_proc",
    StageKind.SCHEDULER: "scheduler",
    StageKind.WORKER: "worker",
    StageKind.DETOKENIZER: "detokenizer_proc",
}
"""What `python -P -m` runs for each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The flags of `quintet serve`, checked. Seconds and bytes; None = chosen from the device, see properties."""

    model: str
    served_model_names: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 50051
    device: str = "cpu"
    dtype: str = "auto"
    load_format: str = "auto"
    seed: int = 0
    threads: int | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_pages: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    prefix_caching: bool = True
    chunked_prefill: bool = True
    pipeline_depth: int = 2
    enforce_eager: bool = False
    kv_cache_dtype: str = "auto"
    deterministic: bool = False
    debug_preempt_every: int = 0
    num_servers: int = 1
    max_in_flight_requests: int = 4096
    max_in_flight_bytes: int = 256 << 20
    max_stream_buffer_bytes: int = 1 << 20
    max_queue: int = 4096
    log_requests: bool = True
    run_dir: str | None = None
    ready_file: str | None = None
    drain_timeout: float = 30.0
    startup_timeout: float = 300.0
    stall_timeout: float = 10.0
    wrap: Mapping[StageKind, tuple[str, ...]] = field(default_factory=dict)
    log_level: str = "info"
    parent_fd: int = -1

    @property
    def simulated(self) -> bool:
        return self.device.startswith("sim:")

    @property
    def on_gpu(self) -> bool:
        """Runs, or is taken to run, on a GPU whose memory is ours."""
        return self.simulated or self.device == "cuda"

    @property
    def needs_weights(self) -> bool:
        return not self.simulated and self.load_format != "dummy"

    @property
    def names(self) -> tuple[str, ...]:
        """Names that a request may use for the model; the first is the one shown."""
        return self.served_model_names or (self.model,)

    @property
    def batch_seqs(self) -> int:
        """Rows that run at once."""
        return self.max_num_seqs or (512 if self.simulated else 256 if self.on_gpu else 64)

    @property
    def batch_tokens(self) -> int:
        """Tokens a step."""
        wanted = self.max_num_batched_tokens or (4096 if self.on_gpu else 512)
        # Every running row decodes in a step, so fewer tokens than rows would starve some.
        return wanted if self.max_num_batched_tokens else max(wanted, self.batch_seqs)

    @property
    def kv_bytes(self) -> int | None:
        """Memory for a worker's KV pool. None = the worker takes its share of what its device has free."""
        if self.kv_cache_memory_bytes is not None or self.num_pages is not None:
            return self.kv_cache_memory_bytes
        if self.on_gpu or self.gpu_memory_utilization is not None:
            return None
        # The machine's memory is not ours alone, as a GPU's is, and all workers share it.
        total = min(_CPU_KV_BYTES, int(_CPU_KV_SHARE * psutil.virtual_memory().available))
        return total // (self.data_parallel_size * self.tensor_parallel_size)

    @property
    def addresses(self) -> list[Address]:
        """Every stage of the instance, replica by replica."""
        servers = [Address(StageKind.SERVER, index) for index in range(self.num_servers)]
        replicas: list[Address] = []
        for replica in range(self.data_parallel_size):
            replicas.append(Address(StageKind.SCHEDULER, replica))
            replicas += (Address(StageKind.WORKER, replica, rank) for rank in range(self.tensor_parallel_size))
        return [*servers, Address(StageKind.TOKENIZER, 0), *replicas, Address(StageKind.DETOKENIZER, 0)]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the stages' documents need and the flags do not say."""

    manifest: ModelManifest
    port: int
    run_dir: str
    death_fd: int
    supervisor_incarnation: int


def stage_config(config: ServeConfig, around: Surroundings, address: Address, incarnation: int) -> StageConfig:
    """The document of one start of one stage."""
    return StageConfig(
        kind=address.kind,
        index=address.index,
        rank=address.rank,
        incarnation=incarnation,
        supervisor_incarnation=around.supervisor_incarnation,
        run_dir=around.run_dir,
        death_fd=around.death_fd,
        log_level=config.log_level,
        options=msgspec.Raw(msgspec.json.encode(_options(config, around, address.kind))),
    )


def command_line(config: ServeConfig, python: str, module: str, kind: StageKind, path: str) -> list[str]:
    """How a stage's process is started. -P: a file in the working directory must not run in our module's place."""
    return [*config.wrap.get(kind, ()), python, "-P", "-m", module, path]


def parse_wrap(text: str) -> tuple[StageKind, tuple[str, ...]]:
    """`worker='nsys profile -o w'`. Raises ValueError saying what is wrong."""
    name, _, command = text.partition("=")
    stages = {kind.label: kind for kind in MODULES}
    if name not in stages:
        raise ValueError(f"{name!r} is no stage; stages are {', '.join(stages)}")
    words = tuple(shlex.split(command))
    if not words:
        raise ValueError(f"no command after '{name}='")
    return stages[name], words


def _options(config: ServeConfig, around: Surroundings, kind: StageKind) -> Options:
    match kind:
        case StageKind.SERVER:
            return ServerOptions(
                host=config.host,
                port=around.port,
                reuse_port=True,
                served_model_names=config.names,
                num_tokenizers=1,
                num_schedulers=config.data_parallel_size,
                num_detokenizers=1,
                max_in_flight_requests=config.max_in_flight_requests,
                max_in_flight_bytes=config.max_in_flight_bytes,
                max_message_bytes=_MAX_MESSAGE_BYTES,
                max_stream_buffer_bytes=config.max_stream_buffer_bytes,
                log_requests=config.log_requests,
            )
        case StageKind.TOKENIZER:
            return TokenizerOptions(manifest=around.manifest, template_timeout=_TEMPLATE_SECONDS)
        case StageKind.DETOKENIZER:
            return DetokenizerOptions(manifest=around.manifest)
        case StageKind.SCHEDULER:
            return SchedulerOptions(
                pipeline_depth=config.pipeline_depth,
                prefix_caching=config.prefix_caching,
                chunked_prefill=config.chunked_prefill,
                max_num_batched_tokens=config.batch_tokens,
                max_num_seqs=config.batch_seqs,
                max_queue=config.max_queue,
                debug_preempt_every=config.debug_preempt_every,
            )
        case StageKind.WORKER:
            return WorkerOptions(
                manifest=around.manifest,
                device=config.device,
                dtype=config.dtype,
                load_format=config.load_format,
                seed=config.seed,
                page_size=PAGE_SIZE,
                num_pages=config.num_pages,
                kv_bytes=config.kv_bytes,
                gpu_memory_utilization=config.gpu_memory_utilization or 0.9,
                max_model_len=config.max_model_len,
                max_num_seqs=config.batch_seqs,
                max_num_batched_tokens=config.batch_tokens,
                threads=config.threads,
                tensor_parallel_size=config.tensor_parallel_size,
                pipeline_depth=config.pipeline_depth,
                enforce_eager=config.enforce_eager,
                kv_cache_dtype=config.kv_cache_dtype,
                deterministic=config.deterministic,
            )
        case _:
            raise AssertionError(f"{kind} has no options")
