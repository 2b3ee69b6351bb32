"""Models: mathematics only. `FAMILIES` says which class computes a `ModelConfig.family`."""

from worker.models.base import Model
from worker.models.bloom import Bloom
from worker.models.gemma import Gemma
from worker.models.granite import Granite
from worker.models.llama import Llama
from worker.models.moe import Mixtral, Qwen3Moe
from worker.models.olmo2 import Olmo2
from worker.models.phi3 import Phi3

FAMILIES: dict[str, type[Model]] = {
    "llama": Llama,
    "mistral": Llama,
    "qwen2": Llama,
    "qwen3": Llama,
    "mixtral": Mixtral,
    "qwen3_moe": Qwen3Moe,
    "gemma2": Gemma,
    "gemma3": Gemma,
    "bloom": Bloom,
    "phi3": Phi3,
    "olmo2": Olmo2,
    "granite": Granite,
}
