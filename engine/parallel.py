"""Whether a model can be divided between ranks, said before any of them starts."""

from proto.model import ModelConfig

_LARGEST = 64  # ranks that are tried for the advice


def refuse_division(config: ModelConfig, ranks: int) -> str:
    """What keeps `ranks` ranks from sharing the model, naming the flag; "" = nothing."""
    unfit = _unfit(config, ranks)
    if not unfit:
        return ""
    fitting = [str(size) for size in range(1, _LARGEST + 1) if not _unfit(config, size)]
    return (
        f"--tensor-parallel-size {ranks} does not divide this model's {' and '.join(unfit)}; "
        f"sizes that do: {', '.join(fitting)}"
    )


def _unfit(config: ModelConfig, ranks: int) -> list[str]:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    found = []
    # Up to one rank for each KV head any number will do; beyond, every KV head is copied to as many ranks.
    if ranks > kv_heads and (ranks % kv_heads or heads % ranks):
        found.append(f"attention heads ({heads}, on {kv_heads} KV heads)")
    if config.vocab_size % ranks:
        found.append(f"vocabulary ({config.vocab_size})")
    for name, size in (("intermediate_size", config.intermediate_size), ("expert size", config.expert_size)):
        if 0 < size < ranks:
            found.append(f"{name} ({size})")
    return found
