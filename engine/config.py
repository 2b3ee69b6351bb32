"""The flags of `quintet serve`, declared once: --help, the parser and the stages' options all follow from here.

A flag that vLLM also has keeps vLLM's name and meaning. This module imports nothing heavy: `--help` needs it.
"""

import argparse
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from engine.arguments import choice, nonempty, number, only, size, size_text, whole
from engine.flags import flag
from engine.port import DEFAULT_HOST, DEFAULT_PORT
from proto.devices import OFFERS, is_simulated, refuse
from proto.ids import Address, StageKind

PAGE_SIZE = 16  # tokens of a KV page
MEMORY_SHARE = 0.9  # default of --gpu-memory-utilization
_LEAST_BUFFER = 64 << 10  # what a client that does read may leave unread for a moment
_DTYPES = {"auto": "auto"} | {dtype: dtype for offer in OFFERS.values() for dtype in offer.dtypes}
_DTYPES |= {"float": "float32", "half": "float16"}
_KV_CACHE_DTYPES = {"auto": "auto", "fp8": "fp8_e4m3"}
_KV_CACHE_DTYPES |= {dtype: dtype for offer in OFFERS.values() for dtype in offer.kv_cache_dtypes}

_MODEL = "model"
_ADDRESS = "address"
_BATCHING = "memory and batching"
_LIMITS = "limits"
_PROCESSES = "processes"

NOT_BUILT = {
    "--pipeline-parallel-size": ("1", "pipeline parallelism"),
    "--quantization": ("none", "quantization at load"),
    "--swap-space": ("0", "swapping KV pages to host memory"),
}
"""vLLM's flags whose feature is not built yet: the one value that each accepts, and the feature."""


class ConfigError(ValueError):
    """Flags that contradict each other; the text names them."""


def parse_wrap(text: str) -> tuple[StageKind, tuple[str, ...]]:
    """Parse `worker='nsys profile -o w'`."""
    label, _, command = text.partition("=")
    stages = {kind.label: kind for kind in StageKind if kind is not StageKind.SUPERVISOR}
    if label not in stages:
        raise argparse.ArgumentTypeError(f"must begin with one of {', '.join(stages)}; got {label!r}")
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} in {command!r}") from None
    if not words:
        raise argparse.ArgumentTypeError(f"needs a command after '{label}='")
    return stages[label], words


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The flags of `quintet serve`, checked. Seconds and bytes; None = chosen from the device, see properties.

    A stage gets a flag by having an option of the same name (`proto/config.py`); `supervisor=True` marks those that
    no stage gets as they stand. Raises ConfigError where flags contradict each other.
    """

    model: str = flag(
        _MODEL,
        "demo, a Hugging Face directory, a .gguf file, or org/name on the Hub",
        nonempty,
        "MODEL",
        supervisor=True,
    )
    served_model_names: tuple[str, ...] = flag(
        _MODEL,
        "names that requests may use for the model (default: --model)",
        nonempty,
        "NAME",
        default=(),
        name="served-model-name",
        extra={"nargs": "+"},
    )
    device: str = flag(
        _MODEL,
        "cpu, reference (slow, exact), cuda, sim:h200, sim:h100 or sim:custom,…",
        nonempty,
        "DEVICE",
        default="cpu",
    )
    dtype: str = flag(
        _MODEL,
        "data type: auto (the model's), bfloat16, float32 or float16 (cuda)",
        choice(_DTYPES),
        "DTYPE",
        default="auto",
    )
    load_format: str = flag(
        _MODEL,
        "auto loads the checkpoint, dummy draws random weights",
        str,
        extra={"choices": ("auto", "dummy")},
        default="auto",
    )
    seed: int = flag(_MODEL, "seed of the weights of --load-format dummy", whole(0, (1 << 63) - 1), "N", default=0)
    threads: int | None = flag(
        _MODEL, "threads of each worker (default: its share of the cores)", whole(1, 4096), "N", default=None
    )
    tensor_parallel_size: int = flag(
        _MODEL, "workers that share the model, its memory and the cores", whole(1, 64), "N", default=1
    )
    data_parallel_size: int = flag(
        _MODEL,
        "replicas of the model (more than one is not built yet)",
        only(1, "data parallelism"),
        "N",
        default=1,
    )

    host: str = flag(
        _ADDRESS, "address to listen on; 0.0.0.0 = every interface", nonempty, "HOST", default=DEFAULT_HOST
    )
    port: int = flag(_ADDRESS, "port to listen on; 0 = any free one", whole(0, 65535), "N", default=DEFAULT_PORT)
    ready_file: str | None = flag(
        _ADDRESS,
        "write address and process ids to this JSON file once requests are served",
        nonempty,
        "FILE",
        default=None,
        supervisor=True,
    )

    max_model_len: int | None = flag(
        _BATCHING,
        "tokens of a prompt and its output together (default: the model's limit)",
        whole(1),
        "N",
        default=None,
    )
    max_num_seqs: int | None = flag(
        _BATCHING, "sequences that run at once (default: 64; cuda 256, sim 512)", whole(1, 65536), "N", default=None
    )
    max_num_batched_tokens: int | None = flag(
        _BATCHING, "tokens in a step (default: 512; cuda and sim 4096)", whole(1), "N", default=None
    )
    num_pages: int | None = flag(
        _BATCHING, f"KV cache size in pages of {PAGE_SIZE} tokens, instead of bytes", whole(2), "N", default=None
    )
    kv_cache_memory_bytes: int | None = flag(
        _BATCHING,
        "KV cache of each worker (CPU default: a quarter of free memory, ≤ 2GiB)",
        size(),
        "SIZE",
        default=None,
        supervisor=True,
    )
    gpu_memory_utilization: float | None = flag(
        _BATCHING,
        f"share of memory for weights and KV cache (default on GPUs: {MEMORY_SHARE})",
        number(most=1),
        "SHARE",
        default=None,
    )
    kv_cache_dtype: str = flag(
        _BATCHING,
        "data type of the KV cache: auto (that of activations) or fp8 (cuda)",
        choice(_KV_CACHE_DTYPES),
        "DTYPE",
        default="auto",
    )
    attention_backend: str = flag(
        _BATCHING,
        "attention kernels; auto or a name that the device offers (an unknown one lists them)",
        nonempty,
        "NAME",
        default="auto",
    )
    prefix_caching: bool = flag(
        _BATCHING, "reuse the KV cache of equal prefixes (default: on)", default=True, name="enable-prefix-caching"
    )
    chunked_prefill: bool = flag(
        _BATCHING, "prefill long prompts in several steps (default: on)", default=True, name="enable-chunked-prefill"
    )
    pipeline_depth: int = flag(_BATCHING, "steps in flight between scheduler and worker", whole(1, 8), "N", default=2)
    enforce_eager: bool = flag(_BATCHING, "run without CUDA graphs (cuda)", default=False)
    deterministic: bool = flag(
        _BATCHING, "make logits independent of the batch (cuda; elsewhere they always are)", default=False
    )
    debug_preempt_every: int = flag(
        _BATCHING, "for tests: preempt a sequence every N steps; 0 = never", whole(0), "N", default=0
    )

    max_queue: int = flag(_LIMITS, "requests that wait for their first step", whole(1), "N", default=4096)
    max_in_flight_requests: int = flag(_LIMITS, "requests in flight at each gRPC server", whole(1), "N", default=4096)
    max_in_flight_bytes: int = flag(
        _LIMITS, "bytes of prompts in flight at each gRPC server", size(), "SIZE", default=256 << 20, show=size_text
    )
    max_stream_buffer_bytes: int = flag(
        _LIMITS,
        "output that a client may leave unread, ≥ 64KiB",
        size(_LEAST_BUFFER),
        "SIZE",
        default=1 << 20,
        show=size_text,
    )

    num_servers: int = flag(
        _PROCESSES, "gRPC server processes, which share the port", whole(1, 64), "N", default=1, supervisor=True
    )
    wrap: tuple[tuple[StageKind, tuple[str, ...]], ...] = flag(
        _PROCESSES,
        "run server, tokenizer, scheduler, worker or detokenizer under a tool",
        parse_wrap,
        "STAGE='CMD'",
        default=(),
        supervisor=True,
        extra={"action": "append"},
    )
    run_dir: str | None = flag(
        _PROCESSES,
        "where the instance makes its own directory (default: $XDG_RUNTIME_DIR)",
        nonempty,
        "DIR",
        default=None,
        supervisor=True,
    )
    startup_timeout: float = flag(
        _PROCESSES, "give up on a start after S seconds without progress", number(), "S", default=300.0, supervisor=True
    )
    drain_timeout: float = flag(
        _PROCESSES, "when stopping, let streams go on for S seconds", number(), "S", default=30.0, supervisor=True
    )
    stall_timeout: float = flag(
        _PROCESSES, "treat a process as hung after S seconds of silence", number(), "S", default=10.0, supervisor=True
    )
    log_level: str = flag(
        _PROCESSES,
        "least severe messages to log",
        str,
        extra={"choices": ("debug", "info", "warning", "error")},
        default="info",
        supervisor=True,
    )
    log_requests: bool = flag(
        _PROCESSES, "do not log a line for each request", default=True, name="disable-log-requests"
    )
    parent_fd: int = flag(  # the instance stops at its end of file
        _PROCESSES, argparse.SUPPRESS, whole(0), "N", default=-1, supervisor=True
    )

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens and self.max_num_seqs and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens must be at least --max-num-seqs ({self.max_num_seqs}), since every running "
                f"sequence takes one token of a step; got {self.max_num_batched_tokens}"
            )
        if len(self.wrappers) < len(self.wrap):
            raise ConfigError("--wrap may be given once for each kind of stage")
        refusal = refuse(
            self.device,
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            tensor_parallel_size=self.tensor_parallel_size,
        )
        if refusal:
            raise ConfigError(refusal)

    @property
    def simulated(self) -> bool:
        return is_simulated(self.device)

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
    def wrappers(self) -> Mapping[StageKind, tuple[str, ...]]:
        """Words in front of the command of a stage's process."""
        return dict(self.wrap)

    @property
    def batch_seqs(self) -> int:
        """Sequences that run at once."""
        return self.max_num_seqs or (512 if self.simulated else 256 if self.on_gpu else 64)

    @property
    def batch_tokens(self) -> int:
        """Tokens in a step."""
        wanted = self.max_num_batched_tokens or (4096 if self.on_gpu else 512)
        # Every running sequence decodes in a step, so fewer tokens than sequences would starve some.
        return wanted if self.max_num_batched_tokens else max(wanted, self.batch_seqs)

    @property
    def addresses(self) -> list[Address]:
        """Every stage of the instance, replica by replica."""
        servers = [Address(StageKind.SERVER, index) for index in range(self.num_servers)]
        replicas: list[Address] = []
        for replica in range(self.data_parallel_size):
            replicas.append(Address(StageKind.SCHEDULER, replica))
            replicas += (Address(StageKind.WORKER, replica, rank) for rank in range(self.tensor_parallel_size))
        return [*servers, Address(StageKind.TOKENIZER, 0), *replicas, Address(StageKind.DETOKENIZER, 0)]
