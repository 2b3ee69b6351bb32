"""`quintet bench` and the scripts beside it, on whole instances with a simulated device."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.bench import plot
from engine.cli import main
from engine.instance import Instance
from quintet_client import Client

ROOT = Path(__file__).parents[1]
MODEL = str(ROOT / "scripts/shapes/qwen3-0.6b")

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def address() -> Any:
    # Fast prefill, so that tests are about the host.
    with Instance.start(["--model", MODEL, "--device", "sim:h200,flops=1e17"]) as instance:
        yield instance.address


def run(*words: str) -> int:
    return main(["bench", *words])


@slow
def test_online_at_a_rate(address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Result, plot and table of a Poisson load of mixed work."""
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    flags = ["--rate", "20", "--requests", "20", "--work", "chat,batch", "--slo-ttft-ms", "60000", "--seed", "3"]
    assert run("online", "--address", address, *flags, "-o", str(out), "--plot", str(picture)) == 0
    document = json.loads(out.read_text())
    total = document["result"]
    assert (total["requests"], total["completed"], total["errors"]) == (20, 20, {})
    calls = document["requests"]
    assert total["output_tokens"] == sum(call["output_tokens"] for call in calls)
    assert {(call["work_class"], call["output_tokens"]) for call in calls} == {("chat", 256), ("batch", 128)}
    assert set(document["by_class"]) == {"chat", "batch"}
    assert total["goodput"]["share"] == 1.0
    assert 0 < total["ttft_ms"]["p50"] <= total["ttft_ms"]["p99"] <= total["e2e_ms"]["max"]
    assert total["client_cpu_share"] > 0
    conditions = document["conditions"]
    assert conditions["server"]["device"] == "sim:h200,flops=1e17"
    assert {"cpu", "cpus", "python", "load_average_1min", "flags"} <= set(conditions)
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "TTFT" in shown
    assert "20 of 20 requests" in shown


@slow
def test_online_with_clients_that_wait(address: str, tmp_path: Path) -> None:
    lengths, out = tmp_path / "lengths.jsonl", tmp_path / "out.json"
    lengths.write_text('{"prompt_tokens": 9, "output_tokens": 4}\n')
    flags = ["--concurrency", "4", "--requests", "30", "--lengths", str(lengths), "-o", str(out)]
    assert run("online", "--address", address, *flags) == 0
    calls = json.loads(out.read_text())["requests"]
    assert len(calls) == 30
    assert {(call["prompt_tokens"], call["output_tokens"]) for call in calls} == {(9, 4)}
    for call in calls:
        at_once = sum(other["due"] <= call["due"] < other["ended"] for other in calls)
        assert at_once <= 4


@slow
def test_an_interrupted_run_shows_what_it_has(address: str, tmp_path: Path) -> None:
    lengths, out = tmp_path / "lengths.jsonl", tmp_path / "out.json"
    lengths.write_text('{"prompt_tokens": 9, "output_tokens": 40}\n')
    flags = ["--concurrency", "4", "--requests", "1000000", "--lengths", str(lengths), "-o", str(out)]
    command = [sys.executable, "-m", "engine.cli", "bench", "online", "--address", address, *flags]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as bench, Client(address) as client:
        while not client.get_load().replicas[0].running:
            time.sleep(0.1)
        time.sleep(0.5)
        bench.send_signal(signal.SIGINT)
        shown, _ = bench.communicate(timeout=30)
    assert bench.returncode == 130
    assert "interrupted after" in shown
    document = json.loads(out.read_text())
    assert document["interrupted"]
    assert 0 < document["result"]["completed"] == len(document["requests"])


@slow
def test_offline_asks_for_whole_answers(address: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert run("offline", "--address", address, "--requests", "12", "-o", str(out)) == 0
    total = json.loads(out.read_text())["result"]
    assert (total["completed"], total["output_tokens"]) == (12, 12 * 128)
    assert total["ttft_ms"] == {}
    assert total["e2e_ms"]["p50"] > 0


@slow
def test_requests_that_fail_are_counted_by_code(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt beyond the context: every request is refused, and the command says so."""
    lengths, out = tmp_path / "lengths.jsonl", tmp_path / "out.json"
    lengths.write_text('{"prompt_tokens": 50000, "output_tokens": 4}\n')
    flags = ["--concurrency", "2", "--requests", "3", "--lengths", str(lengths), "-o", str(out)]
    assert run("online", "--address", address, *flags) == 1
    assert json.loads(out.read_text())["result"]["errors"] == {"INVALID_ARGUMENT": 3}
    assert "3 of 3 requests ended with INVALID_ARGUMENT" in capsys.readouterr().out


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("online", "--address", "127.0.0.1:1", "--rate", "1", "--requests", "1") == 1
    assert "no server answers at 127.0.0.1:1" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plot, "why_not", lambda: "--plot needs matplotlib")
    assert run("online", "--address", "127.0.0.1:1", "--rate", "1", "--plot", "x.png") == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err


def test_matplotlib_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert "pip install matplotlib" in plot.why_not()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["online"], "one of the arguments --rate --concurrency is required"),
        (["online", "--rate", "1", "--concurrency", "1"], "not allowed with"),
        (["online", "--rate", "0"], "above 0"),
        (["online", "--rate", "1", "--work", "talk"], "must name chat, agent, batch or a mix of these, got 'talk'"),
        (["online", "--rate", "1", "--lengths", "/nowhere"], "/nowhere"),
        (["host", "--model", MODEL, "--batch", "1,0"], "must be at least 1, got 0"),
    ],
)
def test_flags_that_cannot_be(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*words)
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


@slow
def test_host_measures_the_loops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of a device of 20 ms steps, which any machine keeps busy, and what they must add up to."""
    out = tmp_path / "out.json"
    flags = ["--model", MODEL, "--device", "sim:h200,launch=2e-2", "--batch", "3", "--depth", "2", "--seconds", "3.3"]
    assert run("host", *flags, "--output-tokens", "40", "-o", str(out)) == 0
    (case,) = json.loads(out.read_text())["cases"]
    assert case["device_step_us"] == pytest.approx(20_400, rel=0.03)
    assert 0.5 < case["busy_share"] <= 1.0
    assert case["steps_per_second"] == pytest.approx(case["busy_share_of_wall"] / case["device_step_us"] * 1e6)
    assert 2.0 < case["rows"] <= 3.0
    assert case["turnaround_us"] > case["device_step_us"]
    for process in ("scheduler", "worker", "sink"):
        assert 0 < case[f"{process}_running_us"] < 20_400
    assert "busy" in capsys.readouterr().out


def test_host_wants_a_model_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("host", "--model", "/nowhere/model") == 1
    assert "/nowhere/model" in capsys.readouterr().err


def script(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *words], capture_output=True, text=True, timeout=100, check=False
    )


@slow
def test_the_ring_names_its_limit(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    lengths = ["--streams", "8", "--prompt-tokens", "32", "--output-tokens", "32"]
    done = script("bench_ring.py", "--model", MODEL, *lengths, "--seconds", "4", "-o", str(out))
    assert done.returncode == 0, done.stderr
    assert "The limit is" in done.stdout
    loaded = json.loads(out.read_text())["loaded"]
    assert set(loaded["processes"]) == {
        *("server-0", "tokenizer-0", "scheduler-0", "worker-0-0", "detokenizer-0"),
        "client",
        "supervisor",
    }
    for process in loaded["processes"].values():
        assert process["us_per_token"] * loaded["tokens_per_second"] == pytest.approx(process["cpu_share"] * 1e6)
    assert 0 < loaded["rows_per_step"] <= 8


@slow
def test_a_short_soak_reports_memory_and_probes(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = script("soak.py", "--model", MODEL, "--streams", "20", "--minutes", "0.05", "-o", str(out))
    result = json.loads(out.read_text())
    assert result["result"]["errors"] == {}, done.stdout
    assert result["probes"]["count"] > 5
    assert result["probes"]["failed"] == 0
    assert all(min(its["quarters"]) > 10e6 for its in result["memory"].values())
    assert "health probes" in done.stdout
