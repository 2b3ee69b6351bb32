"""Messages, options and models with the values that most tests want: a test names only what it is about."""

from typing import Any

import msgspec
import numpy as np

from proto.config import SchedulerOptions, StageConfig, WorkerOptions
from proto.ids import Address, StageKind
from proto.messages import (
    I32,
    AdmitRow,
    Sampling,
    StageInfo,
    StageState,
    StepPlan,
    WorkerFacts,
    World,
    column,
)
from proto.model import ModelConfig, ModelManifest

GREEDY = Sampling(temperature=0)


def i32(*values: int) -> bytes:
    """A column of ids, slots or pages."""
    return np.array(values, I32).tobytes()


def ids_of(data: bytes) -> list[int]:
    """The values of a column."""
    return [int(value) for value in column(data)]


# ------------------------------------------------------------------ models and options


def make_model(**changes: Any) -> ModelConfig:
    """One small Llama layer."""
    values: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 50,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 8,
        "norm_eps": 1e-5,
        "max_position_embeddings": 40,
    }
    return ModelConfig(**(values | changes))


def make_manifest(config: ModelConfig, **changes: Any) -> ModelManifest:
    """A model without files: its weights are dummies."""
    values: dict[str, Any] = {
        "name": "tiny",
        "source": "",
        "weight_format": "none",
        "weight_files": (),
        "config": config,
        "tokenizer_json": "",
        "eos_ids": (2,),
    }
    return ModelManifest(**(values | changes))


def make_worker_options(config: ModelConfig | None = None, **changes: Any) -> WorkerOptions:
    """A worker on the CPU, with 6 rows and steps of 64 tokens; `config`: with a dummy model of that shape."""
    values: dict[str, Any] = {
        "manifest": make_manifest(config or make_model()),
        "device": "cpu",
        "dtype": "auto",
        "load_format": "auto",
        "seed": 0,
        "page_size": 4,
        "num_pages": None,
        "kv_bytes": None,
        "gpu_memory_utilization": 0.9,
        "max_model_len": None,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "threads": None,
    }
    return WorkerOptions(**(values | changes))


def make_scheduler_options(**changes: Any) -> SchedulerOptions:
    """Everything on, at depth 2, with 8 rows and steps of 64 tokens."""
    values: dict[str, Any] = {
        "pipeline_depth": 2,
        "prefix_caching": True,
        "chunked_prefill": True,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_queue": 1000,
        "debug_preempt_every": 0,
    }
    return SchedulerOptions(**(values | changes))


def make_facts(**changes: Any) -> WorkerFacts:
    """What a worker with 64 pages of 4 tokens says of itself."""
    values: dict[str, Any] = {
        "num_pages": 64,
        "page_size": 4,
        "max_model_len": 200,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 8192,
        "vocab_size": 1000,
        "device": "fake",
        "dtype": "float32",
        "kv_bytes_per_token": 1,
    }
    return WorkerFacts(**(values | changes))


def make_stage_config(kind: StageKind, run_dir: str, options: msgspec.Struct, incarnation: int = 1) -> StageConfig:
    """The document that a stage's process starts with, under a supervisor of incarnation 1."""
    return StageConfig(
        kind=kind,
        index=0,
        incarnation=incarnation,
        supervisor_incarnation=1,
        run_dir=run_dir,
        death_fd=-1,
        log_level="info",
        options=msgspec.Raw(msgspec.json.encode(options)),
    )


# ------------------------------------------------------------------ messages


def make_stage(
    kind: StageKind, index: int = 0, incarnation: int = 1, state: StageState = StageState.READY, **changes: Any
) -> StageInfo:
    """One process, as a World tells of it."""
    values: dict[str, Any] = {"address": Address(kind, index), "incarnation": incarnation, "pid": 1, "state": state}
    return StageInfo(**(values | changes))


def make_world(*stages: StageInfo) -> World:
    """All that live, in an instance that serves."""
    return World(stages)


def make_row(
    slot: int, ids: list[int], pages: list[int], start: int = 0, min_len: int = 0, stops: tuple[int, ...] = ()
) -> AdmitRow:
    """A greedy row of a plan."""
    return AdmitRow(
        slot=slot,
        ids=i32(*ids),
        start=start,
        pages=i32(*pages),
        sampling=GREEDY,
        min_len=min_len,
        stop_ids=i32(*stops),
    )


def make_plan(step: int = 1, **changes: Any) -> StepPlan:
    """A plan of epoch 1 that follows the one before and does nothing but what `changes` say."""
    return StepPlan(epoch=1, step=step, previous=step - 1, **changes)


def behind_window(plan: StepPlan, window: int, alone: bool, page_size: int = 4) -> StepPlan:
    """The same plan for a model with layers behind a window, whose pages have the numbers of the other layers'.

    `alone`: all layers are.
    """
    admits, slots, pages = [], [], []
    for row in plan.admits:
        has, hits = column(row.pages), row.start // page_size
        seen = has[max((row.start - window + 1) // page_size, 0) : hits]
        admits.append(msgspec.structs.replace(row, pages=b"" if alone else row.pages, window_pages=seen.tobytes()))
        slots += [row.slot] * (len(has) - hits)
        pages += has[hits:].tolist()
    full = 0 if alone else len(plan.append_slots) // 4
    return msgspec.structs.replace(
        plan,
        admits=tuple(admits),
        append_slots=plan.append_slots[: 4 * full] + i32(*slots) + plan.append_slots,
        append_pages=plan.append_pages[: 4 * full] + i32(*pages) + plan.append_pages,
        append_groups=b"\0" * full + b"\1" * (len(slots) + len(plan.append_slots) // 4),
    )
