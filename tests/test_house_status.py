"""`quintet status` against a server without a ring."""

import json

import pytest

from engine.cli import main
from quintet_client.v1 import control_pb2
from tests.fake_server import FakeServer, serving


def test_shows_processes_and_load(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with serving(FakeServer()) as fake:
        assert main(["status", "--address", fake.address]) == 0
    out = capsys.readouterr().out
    assert f"fake at {fake.address}, cpu float32, up 2 min 5 s" in out
    worker = next(line for line in out.splitlines() if "quintet worker 0 rank 0" in line)
    assert worker.split()[-6:] == ["ready", "4242", "500", "MB", "12.5", "s"]
    replica = out.splitlines()[-1]
    assert replica.split() == ["0", "2", "5", "10", "of", "100", "30", "60", "25%"]


def test_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeServer()) as fake:
        assert main(["status", "--json", "--address", fake.address]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["address"] == fake.address
    assert status["in_flight_requests"] == 7
    assert status["processes"] == [
        {
            "kind": "worker",
            "index": 0,
            "rank": 0,
            "pid": 4242,
            "title": "quintet worker 0 rank 0",
            "state": "ready",
            "rss_bytes": 500_000_000,
            "cpu_seconds": 12.5,
            "restarts": 0,
            "counters": {"steps": 7.0},
            "histograms": {},
        }
    ]
    assert status["replicas"][0]["pages_free"] == 60


def test_counters_are_shown_with_unit_and_meaning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    fake = FakeServer()
    spread = control_pb2.Histogram(bounds=[1.0], counts=[3, 1], sum=0.5)
    fake.processes.append(
        control_pb2.Process(
            kind=control_pb2.PROCESS_KIND_SCHEDULER, title="quintet scheduler 0", histograms={"plan_seconds": spread}
        )
    )
    with serving(fake):
        assert main(["status", "--counters", "--address", fake.address]) == 0
    out = capsys.readouterr().out
    steps = next(line for line in out.splitlines() if " steps " in line)
    assert steps.split() == ["quintet", "worker", "0", "rank", "0", "steps", "7", "steps", "steps", "run"]
    assert "plan_seconds  4 values, mean 0.125  seconds  time to make a plan" in out


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--address", "127.0.0.1:1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "no server answers at 127.0.0.1:1" in err
