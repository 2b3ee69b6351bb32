"""The description of a model, as a document that every stage can read.

`engine.models` writes one ModelManifest before any stage starts (from a Hugging Face directory or a
GGUF file); the tokenizer, the detokenizer and the worker read it. No stage parses a config of its own.
"""

from typing import Literal

import msgspec

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
WeightFormat = Literal["safetensors", "gguf", "none"]


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rotary position embedding (Su et al. 2021) and its context extensions.

    Fields beyond `theta` are read only by the types named beside them.
    """

    type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0  # all but default: context multiplier
    original_max_position: int = 0  # dynamic, llama3, yarn, longrope: context the model was trained on
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn (Peng et al. 2023)
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope: None = derived from factor (and mscale)
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    short_factors: tuple[float, ...] = ()  # longrope (Ding et al. 2024): divisors of the rotary_dim / 2 frequencies
    long_factors: tuple[float, ...] = ()  # longrope: the same, where sequences beyond original_max_position are served


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape of a decoder-only transformer, in units of elements."""

    family: str  # key into worker.models.FAMILIES
    vocab_size: int  # rows of the embedding, which may exceed the tokenizer's ids
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over head_dim of q and k before RoPE (Qwen3)
    wide_qk_norm: bool = False  # RMSNorm over all heads of q, and over all of k, before RoPE (OLMo 2)
    windows: tuple[int, ...] = ()  # per layer: 0 = full attention, W = the last W positions; () = all full
    rope: RopeConfig = RopeConfig()
    rotary_dim: int = 0  # the first dimensions of a head, which rotate (Phi-4-mini); 0 = all of them
    windowed_rope: RopeConfig | None = None  # for layers with a window, if it differs (Gemma 3)
    alibi: bool = False  # linear biases by distance (Press et al. 2022) in place of rotary positions (BLOOM)
    attention_scale: float = 0.0  # factor on attention scores; 0 = 1/√head_dim
    attention_soft_cap: float = 0.0  # c > 0: attention scores s become c·tanh(s/c) (Gemma 2)
    logit_soft_cap: float = 0.0  # the same for logits
    embedding_multiplier: float = 1.0  # factor on embeddings (Granite)
    residual_multiplier: float = 1.0  # factor on what attention and MLP add to the residual (Granite)
    logit_divisor: float = 1.0  # logits are divided by it (Granite)
    num_experts: int = 0  # MLPs in a mixture; 0 = dense
    experts_per_token: int = 0
    expert_size: int = 0  # intermediate size of one expert
    renormalise_experts: bool = False  # weights of a token's experts are made to sum to 1
    dense_layers: tuple[int, ...] = ()  # layers of a mixture that have one MLP of intermediate_size instead
    dtype: str = "bfloat16"  # the checkpoint's own: what `--dtype auto` means

    @property
    def window(self) -> int:
        """The largest window of a layer: no layer that has one sees further back. 0 = no layer has one."""
        return max(self.windows, default=0)

    @property
    def windowed_layers(self) -> int:
        return sum(window > 0 for window in self.windows)

    @property
    def attention_weights(self) -> int:
        """Elements of one layer's attention matrices, without biases."""
        return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)

    @property
    def mlp_weights(self) -> int:
        """Elements of one dense MLP's matrices, without biases: with a gate, which BLOOM's MLPs lack."""
        return (2 + self._gated) * self.hidden_size * self.intermediate_size

    @property
    def expert_weights(self) -> int:
        """Elements of one expert's matrices."""
        return 3 * self.hidden_size * self.expert_size

    @property
    def router_weights(self) -> int:
        return self.hidden_size * self.num_experts

    @property
    def head_weights(self) -> int:
        """Elements of the embedding, and as many of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def expert_layers(self) -> int:
        """Layers that have experts instead of one dense MLP."""
        return self.num_layers - len(self.dense_layers) if self.num_experts else 0

    @property
    def parameters(self) -> int:
        """Elements of all weights; a tied embedding counts once."""
        mixture = self.router_weights + self.num_experts * self.expert_weights
        dense = self.mlp_weights + self.mlp_bias * ((1 + self._gated) * self.intermediate_size + self.hidden_size)
        attention = self.attention_weights + self.out_bias * self.hidden_size
        heads, kv_heads = self.num_heads, self.num_kv_heads
        attention += self.qkv_bias * self.head_dim * (heads + 2 * kv_heads)
        attention += self.head_dim * (self.qk_norm * 2 + self.wide_qk_norm * (heads + kv_heads))
        return (
            self.num_layers * attention
            + self.expert_layers * mixture
            + (self.num_layers - self.expert_layers) * dense
            + self._norms * self.hidden_size
            + self.head_weights * (1 if self.tie_word_embeddings else 2)
        )

    @property
    def _gated(self) -> bool:
        return self.family != "bloom"

    @property
    def _norms(self) -> int:
        """Vectors of hidden_size that norms hold, except those of q and k."""
        if self.family == "bloom":
            return 2 * (2 * self.num_layers + 2)  # weight and bias, and one norm behind the embedding
        return (4 if self.family in ("gemma2", "gemma3") else 2) * self.num_layers + 1

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of K and V that one token adds over all layers."""
        return self.num_layers * self.num_kv_heads * self.head_dim * 2 * element_bytes


class ModelManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that has been found, fetched and read: all that stages need to know of it."""

    name: str  # what the operator asked for: a path, org/name, "demo"
    source: str  # the directory or file that was found
    weight_format: WeightFormat
    weight_files: tuple[str, ...]  # absolute paths, in load order
    config: ModelConfig
    tokenizer_json: str  # absolute path of a `tokenizers` file
    chat_template: str | None = None  # Jinja source
    bos_token: str = ""  # for the chat template; "" = none
    eos_token: str = ""
    eos_ids: tuple[int, ...] = ()  # every id that ends generation unless ignore_eos
