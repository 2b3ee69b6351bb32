"""Models: mathematics only. `FAMILIES` says which class computes a `ModelConfig.family`."""

from worker.models.llama import Llama

FAMILIES = {"llama": Llama, "mistral": Llama, "qwen2": Llama, "qwen3": Llama}
