"""Whether a model can be divided between ranks, said before any of them starts."""

from proto.model import ModelConfig

_LARGEST = 64  # ranks that are tried for the advice


def refuse_division(config: ModelConfig, ranks: int) -> str:
    """What keeps `ranks` ranks from sharing the model, naming the flag; "" = nothing."""
    uneven = _uneven(config, ranks)
    if not uneven:
        return ""
    fitting = [str(size) for size in range(1, _LARGEST + 1) if not _uneven(config, size)]
    return (
        f"--tensor-parallel-size {ranks} does not divide this model's {' and '.join(uneven)}; "
        f"sizes that do: {', '.join(fitting)}"
    )


def _uneven(config: ModelConfig, ranks: int) -> list[str]:
    sizes = {
        "attention heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "vocabulary": config.vocab_size,
        "expert size": config.expert_size,
    }
    found = [f"{name} ({size})" for name, size in sizes.items() if size % ranks]
    # Fewer KV heads than ranks are copied, each to the same number of ranks.
    if config.num_kv_heads % ranks and ranks % config.num_kv_heads:
        found.append(f"KV heads ({config.num_kv_heads})")
    return found
