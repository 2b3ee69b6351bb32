"""The documents that the stages of an instance start with, made from its flags."""

from dataclasses import dataclass
from typing import Any

import msgspec
import psutil

from engine.config import MEMORY_SHARE, PAGE_SIZE, ServeConfig
from engine.flags import flags_of
from proto.config import OPTIONS, Options, StageConfig
from proto.ids import Address, StageKind
from proto.model import ModelManifest

_TEMPLATE_SECONDS = 5.0
_MAX_MESSAGE_BYTES = 64 << 20
_CPU_KV_BYTES = 2 << 30
_CPU_KV_SHARE = 0.25  # at most this share of the memory that is free at start

MODULES: dict[StageKind, str] = {
    StageKind.SERVER: "server",
    StageKind.TOKENIZER: "tokenizer_proc",
    StageKind.SCHEDULER: "scheduler",
    StageKind.WORKER: "worker",
    StageKind.DETOKENIZER: "detokenizer_proc",
}
"""The module that `python -P -m` runs for each kind."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the stages' documents need beside the flags."""

    manifest: ModelManifest
    port: int
    run_dir: str
    death_fd: int
    supervisor_incarnation: int


def stage_config(config: ServeConfig, around: Surroundings, address: Address, incarnation: int) -> StageConfig:
    """Make the document of one start of one stage."""
    return StageConfig(
        kind=address.kind,
        index=address.index,
        rank=address.rank,
        incarnation=incarnation,
        supervisor_incarnation=around.supervisor_incarnation,
        run_dir=around.run_dir,
        death_fd=around.death_fd,
        log_level=config.log_level,
        options=msgspec.Raw(msgspec.json.encode(stage_options(config, around, address.kind))),
    )


def stage_options(config: ServeConfig, around: Surroundings, kind: StageKind) -> Options:
    """Fill a stage's options by name, from the flags and from what is derived from them."""
    flags = {name: getattr(config, name) for name, flag in flags_of(ServeConfig).items() if not flag.supervisor}
    values = flags | derived_options(config, around)
    options = OPTIONS[kind]
    return msgspec.convert({name: values[name] for name in options.__struct_fields__}, options)


def derived_options(config: ServeConfig, around: Surroundings) -> dict[str, Any]:
    """Compute the options that no flag gives as a stage needs them."""
    return {
        "manifest": around.manifest,
        "port": around.port,
        "reuse_port": True,
        "served_model_names": config.names,
        "num_tokenizers": 1,
        "num_schedulers": config.data_parallel_size,
        "num_detokenizers": 1,
        "max_message_bytes": _MAX_MESSAGE_BYTES,
        "template_timeout": _TEMPLATE_SECONDS,
        "max_num_seqs": config.batch_seqs,
        "max_num_batched_tokens": config.batch_tokens,
        "page_size": PAGE_SIZE,
        "kv_bytes": kv_bytes(config),
        "gpu_memory_utilization": config.gpu_memory_utilization or MEMORY_SHARE,
    }


def kv_bytes(config: ServeConfig) -> int | None:
    """Compute the memory of a worker's KV pool. None = the worker takes its share of what its device has free."""
    if config.kv_cache_memory_bytes is not None or config.num_pages is not None:
        return config.kv_cache_memory_bytes
    if config.on_gpu or config.gpu_memory_utilization is not None:
        return None
    # The machine's memory is not ours alone, as a GPU's is, and all workers share it.
    total = min(_CPU_KV_BYTES, int(_CPU_KV_SHARE * psutil.virtual_memory().available))
    return total // (config.data_parallel_size * config.tensor_parallel_size)


def command_line(config: ServeConfig, python: str, module: str, kind: StageKind, path: str) -> list[str]:
    """Return how a stage's process is started. With -P, no file in the working directory runs in our module's place."""
    return [*config.wrappers.get(kind, ()), python, "-P", "-m", module, path]
