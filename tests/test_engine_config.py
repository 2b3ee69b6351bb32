"""From the command line to the documents that stages start with; run directory and port."""

import argparse
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from engine.arguments import size, size_text
from engine.cli import main, serve
from engine.config import ServeConfig
from engine.documents import (
    Surroundings,
    command_line,
    derived_options,
    kv_bytes,
    stage_config,
    stage_options,
)
from engine.flags import flags_of
from engine.port import Port, PortError
from engine.rundir import RunDir, RunDirError
from proto.channel import MAX_IPC_PATH, inbox_path
from proto.config import OPTIONS, SchedulerOptions, ServerOptions, WorkerOptions, load_config, options_of
from proto.ids import Address, StageKind
from tests.engine_fakes.fake_serve import MANIFEST

ROOT = Path(__file__).parent.parent
AROUND = Surroundings(MANIFEST, port=50099, run_dir="/run/q", death_fd=9, supervisor_incarnation=1)


def parse(flags: str = "") -> ServeConfig:
    return parse_words(shlex.split(flags))


def parse_words(words: list[str]) -> ServeConfig:
    return parse_alone(["--model", "demo", *words])


def parse_alone(words: list[str]) -> ServeConfig:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return serve.config_of(parser.parse_args(["serve", *words]))


def test_ranks_may_be_gpus() -> None:
    config = parse("--tensor-parallel-size 4 --device cuda")
    assert (config.tensor_parallel_size, config.device) == (4, "cuda")


def options(config: ServeConfig, kind: StageKind) -> object:
    return stage_options(config, AROUND, kind)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--tensor-parallel-size", "0"], "argument --tensor-parallel-size: must be between 1 and 64, got 0"),
        (
            ["--tensor-parallel-size", "2", "--device", "sim:h200"],
            "error: --tensor-parallel-size 2 needs --device cpu, reference or cuda, got --device sim:h200",
        ),
        (
            ["--pipeline-parallel-size", "4"],
            "argument --pipeline-parallel-size: pipeline parallelism is not built yet: must be 1, got 4",
        ),
        (
            ["--data-parallel-size", "2"],
            "argument --data-parallel-size: data parallelism is not built yet: must be 1, got 2",
        ),
        (
            ["--quantization", "awq"],
            "argument --quantization: quantization at load is not built yet: must be none, got awq",
        ),
        (["--kv-cache-dtype", "int8"], "argument --kv-cache-dtype: must be one of auto, fp8, fp8_e4m3; got 'int8'"),
        (["--kv-cache-dtype", "fp8"], "error: --kv-cache-dtype fp8_e4m3 needs --device cuda, got --device cpu"),
        (
            ["--kv-cache-dtype", "fp8_e4m3", "--device", "sim:h200"],
            "error: --kv-cache-dtype fp8_e4m3 needs --device cuda, got --device sim:h200",
        ),
        (
            ["--swap-space", "4"],
            "argument --swap-space: swapping KV pages to host memory is not built yet: must be 0, got 4",
        ),
        (
            ["--device", "tpu"],
            "error: --device must be one of cpu, reference, cuda, sim:h200, sim:h100 and sim:custom,…; got 'tpu'",
        ),
        (
            ["--dtype", "int8"],
            "argument --dtype: must be one of auto, bfloat16, float32, float16, float, half; got 'int8'",
        ),
        (["--dtype", "half"], "error: --dtype float16 needs --device cuda, got --device cpu"),
        (["--model", ""], "argument --model: must not be empty"),
        (["--served-model-name", "a", ""], "argument --served-model-name: must not be empty"),
        (["--port", "70000"], "argument --port: must be between 0 and 65535, got 70000"),
        (["--port", "http"], "argument --port: must be a whole number, got 'http'"),
        (["--max-num-seqs", "0"], "argument --max-num-seqs: must be between 1 and 65536, got 0"),
        (
            ["--gpu-memory-utilization", "nan"],
            "argument --gpu-memory-utilization: must be a number above 0 and at most 1, got 'nan'",
        ),
        (
            ["--gpu-memory-utilization", "1.5"],
            "argument --gpu-memory-utilization: must be a number above 0 and at most 1, got '1.5'",
        ),
        (["--drain-timeout", "-1"], "argument --drain-timeout: must be a number above 0, got '-1'"),
        (
            ["--kv-cache-memory-bytes", "2 parsecs"],
            "argument --kv-cache-memory-bytes: must be a size such as 512MiB, 80GB or a number of bytes, got '2 pars",
        ),
        (
            ["--max-stream-buffer-bytes", "1k"],
            "argument --max-stream-buffer-bytes: must be at least 64KiB, got '1k'",
        ),
        (
            ["--wrap", "gpu=nsys"],
            "argument --wrap: must begin with one of server, tokenizer, scheduler, worker, detokenizer; got 'gpu'",
        ),
        (["--wrap", "worker"], "argument --wrap: needs a command after 'worker='"),
        (["--wrap", "worker='a"], 'argument --wrap: No closing quotation in "\'a"'),
        (["--wrap", "worker=a", "--wrap", "worker=b"], "error: --wrap may be given once for each kind of stage"),
        (
            ["--max-num-seqs", "64", "--max-num-batched-tokens", "32"],
            "error: --max-num-batched-tokens must be at least --max-num-seqs (64), since every running",
        ),
        (["--max-model"], "unrecognized arguments: --max-model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_flag_is_named_with_its_value(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_words(words)
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


def test_vllms_flags_are_accepted_with_neutral_values() -> None:
    parse(
        "--tensor-parallel-size 1 --pipeline-parallel-size 1 --data-parallel-size 1 --quantization none "
        "--kv-cache-dtype auto --swap-space 0 --enforce-eager --dtype float"
    )


def test_flags_reach_the_stages() -> None:
    config = parse(
        "--served-model-name a b --host 0.0.0.0 --max-model-len 2048 --max-num-seqs 8 --dtype float32 "
        "--max-num-batched-tokens 128 --no-enable-prefix-caching --no-enable-chunked-prefill --seed 3 "
        "--pipeline-depth 1 --num-pages 64 --threads 2 --debug-preempt-every 5 --disable-log-requests "
        "--max-queue 10 --max-in-flight-requests 20 --max-in-flight-bytes 1m --device reference"
    )
    server = options(config, StageKind.SERVER)
    assert isinstance(server, ServerOptions)
    assert (server.host, server.port, server.served_model_names) == ("0.0.0.0", 50099, ("a", "b"))
    assert (server.max_in_flight_requests, server.max_in_flight_bytes, server.log_requests) == (20, 1 << 20, False)
    scheduler = options(config, StageKind.SCHEDULER)
    assert scheduler == SchedulerOptions(
        pipeline_depth=1,
        prefix_caching=False,
        chunked_prefill=False,
        max_num_batched_tokens=128,
        max_num_seqs=8,
        max_queue=10,
        debug_preempt_every=5,
    )
    worker = options(config, StageKind.WORKER)
    assert isinstance(worker, WorkerOptions)
    assert (worker.device, worker.dtype, worker.seed, worker.threads) == ("reference", "float32", 3, 2)
    assert (worker.num_pages, worker.kv_bytes, worker.max_model_len) == (64, None, 2048)


@pytest.mark.parametrize(("given", "told"), [("fp8", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3"), ("auto", "auto")])
def test_what_k_and_v_are_kept_in_reaches_the_worker(given: str, told: str) -> None:
    worker = options(parse(f"--device cuda --kv-cache-dtype {given}"), StageKind.WORKER)
    assert isinstance(worker, WorkerOptions)
    assert worker.kv_cache_dtype == told


@pytest.mark.parametrize("device", ["cpu", "reference", "cuda"])
def test_determinism_is_taken_by_every_device(device: str) -> None:
    for flag, wanted in (("--deterministic", True), ("", False)):
        worker = options(parse(f"--device {device} {flag}"), StageKind.WORKER)
        assert isinstance(worker, WorkerOptions)
        assert worker.deterministic is wanted


def test_kv_memory_is_bounded_on_a_machine_that_is_not_ours_alone() -> None:
    default = kv_bytes(parse())
    assert default is not None
    assert 0 < default <= 2 << 30
    assert kv_bytes(parse("--kv-cache-memory-bytes 64m")) == 64 << 20
    assert kv_bytes(parse("--gpu-memory-utilization 0.5")) is None
    assert kv_bytes(parse("--device sim:h200")) is None


def test_every_running_row_fits_in_a_step() -> None:
    config = parse("--max-num-seqs 2000")
    assert config.batch_tokens >= config.batch_seqs == 2000


def test_every_flag_is_read_and_every_option_filled() -> None:
    """A flag is an option of some stage, or it says that the supervisor reads it; an option is a flag or derived."""
    flags = flags_of(ServeConfig)
    options = {name for kind in OPTIONS.values() for name in kind.__struct_fields__}
    assert {name for name, declared in flags.items() if not declared.supervisor} == options & set(flags)
    assert options - set(flags) <= set(derived_options(parse(), AROUND)) <= options


def test_what_the_supervisor_reads_is_read() -> None:
    source = "".join(path.read_text() for path in (ROOT / "engine").glob("*.py"))
    names = [name for name, declared in flags_of(ServeConfig).items() if declared.supervisor]
    assert [name for name in names if not re.search(rf"(config|self)\.{name}\b", source)] == []


def test_defaults_of_the_command_line_are_the_configurations() -> None:
    assert parse() == ServeConfig(model="demo")


@pytest.mark.parametrize("words", [["demo"], ["--model", "demo"], ["--port", "5", "demo"], ["demo", "--port", "5"]])
def test_the_model_is_named_with_or_without_its_flag(words: list[str]) -> None:
    assert parse_alone(words).model == "demo"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "one of the arguments MODEL --model is required"),
        (["a", "--model", "b"], "argument --model: not allowed with argument MODEL"),
    ],
)
def test_a_model_is_named_once(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_alone(words)
    assert error in capsys.readouterr().err


def test_a_document_can_be_read_back(tmp_path: Path) -> None:
    document = stage_config(parse(), AROUND, Address(StageKind.WORKER, 0), incarnation=5)
    path = tmp_path / "worker-0-0.json"
    path.write_bytes(msgspec.json.encode(document))
    assert options_of(load_config(str(path))) == options_of(document)


def test_a_wrapper_stands_in_front_of_its_stage_only() -> None:
    config = parse_words(["--wrap", "worker=nsys profile -o 'my report'"])
    worker = command_line(config, "python", "worker", StageKind.WORKER, "c.json")
    assert worker == ["nsys", "profile", "-o", "my report", "python", "-P", "-m", "worker", "c.json"]
    server = command_line(config, "python", "server", StageKind.SERVER, "c.json")
    assert server == ["python", "-P", "-m", "server", "c.json"]


def test_help_is_short_and_quick() -> None:
    """It must not import what only serving needs."""
    code = "import sys; from engine.cli import main; main(['serve', '--help'])"
    probe = f"try:\n {code}\nexcept SystemExit: pass\nprint([m for m in sys.modules if m in ('zmq', 'grpc', 'numpy')])"
    done = subprocess.run([sys.executable, "-P", "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")
    assert max(map(len, done.stdout.splitlines())) <= 110


def test_an_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["srve"])
    assert ended.value.code == 2
    assert "'srve'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("24GiB", 24 << 30),
        ("24G", 24 << 30),
        ("80GB", 80 * 10**9),
        ("1.5 mib", 3 << 19),
        ("4096", 4096),
        ("7k", 7168),
        ("1b", 1),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert size()(text) == value
    assert size()(size_text(value)) == value


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.2.3G", "12 parsecs", "0", "nan", "1e9"])
def test_texts_that_are_no_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be"):
        size()(text)


# --------------------------------------------------------------------------- run directory


def test_a_run_directory_is_private_and_leaves_nothing(tmp_path: Path) -> None:
    run_dir = RunDir(str(tmp_path))
    assert Path(run_dir.path).parent == tmp_path
    assert Path(run_dir.path).stat().st_mode & 0o777 == 0o700
    run_dir.remove()
    assert not list(tmp_path.iterdir())


def test_a_left_directory_is_swept_and_a_live_one_kept(tmp_path: Path) -> None:
    live = RunDir(str(tmp_path))
    code = f"from engine.rundir import RunDir; import os; print(RunDir({str(tmp_path)!r}).path); os._exit(9)"
    stale = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True).stdout.strip()
    assert Path(stale).is_dir()
    foreign = tmp_path / "quintet-recipes"
    foreign.mkdir()
    RunDir(str(tmp_path)).remove()
    assert not Path(stale).exists()
    assert Path(live.path).is_dir()
    assert foreign.is_dir(), "a directory that never was an instance's"
    live.remove()


def test_a_long_place_is_refused_or_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    with pytest.raises(RunDirError, match=rf"--run-dir .*x: inbox paths in it would have \d+ bytes; .* {MAX_IPC_PATH}"):
        RunDir(str(long))
    monkeypatch.setattr("tempfile.tempdir", str(long))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    run_dir = RunDir(None)
    assert run_dir.path.startswith("/tmp/quintet-")
    inbox_path(run_dir.path, Address(StageKind.DETOKENIZER, 255))
    run_dir.remove()


@pytest.mark.parametrize(("place", "why"), [("missing", "no such directory"), ("file", "no such directory")])
def test_a_bad_place_is_refused(place: str, why: str) -> None:
    # Not below pytest's folder: its names may be too long for sockets, which would be refused first.
    with tempfile.TemporaryDirectory(prefix="quintet-test-") as folder:
        Path(folder, "file").touch()
        with pytest.raises(RunDirError, match=why):
            RunDir(str(Path(folder, place)))


# --------------------------------------------------------------------------- port


def test_a_taken_port_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(PortError, match=f"--port {number}: 127.0.0.1:{number} is taken by another process"):
            Port("127.0.0.1", number)


def test_another_instances_placeholder_counts_as_taken() -> None:
    first = Port("127.0.0.1", 0)
    with pytest.raises(PortError, match="is taken"):
        Port("127.0.0.1", first.number)
    first.close()
    Port("127.0.0.1", first.number).close()


def test_our_servers_share_the_placeholders_port() -> None:
    port = Port("127.0.0.1", 0)
    servers = [socket.create_server(("127.0.0.1", port.number), reuse_port=True) for _ in range(2)]
    with socket.create_connection(("127.0.0.1", port.number), timeout=5):
        pass  # the placeholder does not listen, so no connection is lost to it
    for server in servers:
        server.close()
    port.close()


def test_a_port_with_connections_in_time_wait_is_free() -> None:
    """As after a drain, when our side closed first."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as server:
        number = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", number))
        server.accept()[0].close()
        client.close()
    Port("127.0.0.1", number).close()


def test_a_bad_host_is_refused_by_name() -> None:
    with pytest.raises(PortError, match=r"--host no\.such\.host\.invalid"):
        Port("no.such.host.invalid", 0)
    with pytest.raises(PortError, match=r"--host 203\.0\.113\.1 --port 50999: Cannot assign"):
        Port("203.0.113.1", 50999)


def test_an_ipv6_address_is_written_in_brackets() -> None:
    try:
        port = Port("::1", 0)
    except PortError:
        pytest.skip("no IPv6 here")
    assert port.address == f"[::1]:{port.number}"
    port.close()


def test_a_foreign_proto_package_is_named(tmp_path: Path) -> None:
    """proto-plus installs a package of that name: no traceback, but a sentence."""
    (tmp_path / "proto").mkdir()
    (tmp_path / "proto" / "__init__.py").touch()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "engine.cli", "serve", "--model", "demo"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 2
    assert f"`import proto` finds {tmp_path}" in done.stderr
    assert "Traceback" not in done.stderr
