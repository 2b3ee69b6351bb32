"""Plots of a run: distributions of the latencies, and tokens over time. Needs matplotlib (extra `dev`)."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.bench.load import Call
from engine.bench.report import Slo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BINS = 100


def why_not() -> str:
    """Say what prevents a plot; "" = nothing."""
    if importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib: pip install matplotlib, or Quintet's extra `dev`"
    return ""


def plot(calls: Sequence[Call], slo: Slo, title: str, path: Path) -> None:
    """Write a PNG. Raises OSError."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    good = [call for call in calls if not call.error]
    figure, axes = plt.subplots(1, 4, figsize=(18, 4.2), layout="constrained")
    figure.suptitle(title)
    ttfts = [numbers["ttft_ms"] for call in good if "ttft_ms" in (numbers := call.clock.numbers())]
    _distribution(axes[0], "time to first token (ms)", ttfts, slo.ttft_ms)
    _distribution(axes[1], "inter-token latency (ms)", [gap * 1e3 for call in good for gap in call.clock.gaps])
    _distribution(axes[2], "end to end (ms)", [call.seconds * 1e3 for call in good])
    _ends(axes[3], good)
    figure.savefig(path, format="png", dpi=100)
    plt.close(figure)


def _distribution(axes: "Axes", name: str, values: list[float], limit: float | None = None) -> None:
    axes.set_xlabel(name)
    axes.set_ylabel("share at or below")
    axes.grid(alpha=0.3)
    if not values:
        return
    ordered = np.sort(np.asarray(values))
    axes.plot(ordered, np.arange(1, len(ordered) + 1) / len(ordered))
    if ordered[0] > 0 and ordered[-1] > 20 * ordered[0]:
        axes.set_xscale("log")
    if limit is not None:
        axes.axvline(limit, color="tab:red", linestyle="--", label="SLO")
        axes.legend()


def _ends(axes: "Axes", good: Sequence[Call]) -> None:
    """Plot output tokens a second, each request's spread evenly over its time."""
    axes.set_xlabel("time (s)")
    axes.set_ylabel("output tokens a second")
    axes.grid(alpha=0.3)
    if not good:
        return
    start = min(call.clock.started for call in good)
    edges = np.linspace(0, max(call.ended for call in good) - start, _BINS + 1)
    rates = np.zeros(_BINS)
    for call in good:
        first = (call.clock.first or call.clock.started) - start
        last = call.ended - start
        overlap = np.clip(np.minimum(edges[1:], last) - np.maximum(edges[:-1], first), 0, None)
        rates += call.clock.tokens / max(last - first, 1e-9) * overlap
    axes.plot((edges[1:] + edges[:-1]) / 2, rates / np.diff(edges))
