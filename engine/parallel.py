"""Whether ranks can divide a model, checked before any of them starts."""

from collections.abc import Callable
from typing import TypeVar

from proto.division import Division
from proto.model import ModelConfig

T = TypeVar("T")

_LARGEST = 64  # the most ranks that the advice tries


def refuse_division(config: ModelConfig, ranks: int) -> str:
    """Say why `ranks` ranks cannot share the model, naming the flag; "" = they can."""
    unfit = _unfit(config, ranks)
    if not unfit:
        return ""
    fitting = [str(size) for size in range(1, _LARGEST + 1) if not _unfit(config, size)]
    return (
        f"--tensor-parallel-size {ranks} does not divide this model's {' and '.join(unfit)}; "
        f"sizes that do: {', '.join(fitting)}"
    )


def _unfit(config: ModelConfig, ranks: int) -> list[str]:
    division = Division(0, ranks)
    heads = f"attention heads ({config.num_heads}, on {config.num_kv_heads} KV heads)"
    features = {"intermediate_size": config.intermediate_size, "expert size": config.expert_size}
    return [
        *([] if _divides(division.share_heads, config) else [heads]),
        *([] if _divides(division.share_equally, config.vocab_size) else [f"vocabulary ({config.vocab_size})"]),
        *(f"{name} ({size})" for name, size in features.items() if not _divides(division.share_features, size)),
    ]


def _divides(share: Callable[[T], object], whole: T) -> bool:
    try:
        share(whole)
    except ValueError:
        return False
    return True
