"""`quintet status` against a server without a ring."""

import json

import pytest

from engine.cli import main
from tests.fake_server import FakeServer, serving


def test_shows_processes_and_load(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with serving(FakeServer()) as fake:
        assert main(["status", "--address", fake.address]) == 0
    out = capsys.readouterr().out
    assert f"fake at {fake.address}, cpu float32, up 2 min 5 s" in out
    worker = next(line for line in out.splitlines() if "quintet worker 0 rank 0" in line)
    assert worker.split()[-7:] == ["ready", "4242", "500", "MB", "12.5", "s", "0"]
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
        }
    ]
    assert status["replicas"][0]["pages_free"] == 60


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--address", "127.0.0.1:1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "no server answers at 127.0.0.1:1" in err
