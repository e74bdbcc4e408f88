"""The Prometheus endpoint: what it says, to whom, and that no client harms it or the run."""

from __future__ import annotations

import math
import re
import socket
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from echelon.common.errors import CommandError
from echelon.contracts.run_dir import RunDir
from echelon.observe.endpoint import Endpoint, Numbers
from tests.kit.refusals import refused
from tests.kit.run_folders import PAYLOADS, begun, evaluation, make_run, stretch, times, training
from tests.kit.started import Started


def parsed(text: str) -> dict[str, dict[str, float]]:
    """Series by name and labels, as prometheus_client's own parser reads them."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            ordered = sorted(sample.labels.items(), key=lambda label: (label[0] == "part", label[0] == "rank"))
            labels = ",".join(f'{name}="{value}"' for name, value in ordered)
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def seen(run: RunDir) -> dict[str, dict[str, float]]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Numbers(run))
    return parsed(generate_latest(registry).decode())


def test_the_latest_numbers_are_told(tmp_path: Path) -> None:
    records = [training(s, 1.0 / s, mfu=0.4) for s in range(1, 9)] + [evaluation(8, 0.5)]
    run = make_run(tmp_path, records, [{"exit_code": 1}, None], [begun(10)])
    times(run, 1, 3, stretch(0, 8, forward=0.03, data=0.01) | {"own_s": 0.04})
    found = {name.removeprefix("echelon_"): values for name, values in seen(run).items()}
    here = 'run="nano"'
    wanted = {"running": 1, "attempt": 1, "failed_attempts": 1, "step": 8, "steps": 10, "loss": 0.125, "eval_loss": 0.5}
    wanted |= {"mfu_ratio": 0.4, "tokens_per_second": 5e4, "learning_rate": 1e-3, "gradient_norm": 1.0}
    assert {name: found[name][here] for name in wanted} == wanted
    assert found["rank_own_step_seconds"] == {f'{here},rank="3"': 0.04}
    assert found["rank_time_ratio"][f'{here},rank="3",part="forward"'] == pytest.approx(0.75)
    assert "exit_code" not in found


def test_what_is_not_finite_has_its_word(tmp_path: Path) -> None:
    found = seen(make_run(tmp_path, [training(1, math.nan, grad_norm=math.inf)]))
    assert math.isnan(found["echelon_loss"]['run="nano"']) and found["echelon_gradient_norm"] == {'run="nano"': math.inf}
    assert found["echelon_exit_code"] == {'run="nano"': 0.0} and found["echelon_running"] == {'run="nano"': 0.0}


@pytest.mark.parametrize("payload", [*PAYLOADS, 'a"} 1\nx{y="', "\\", "\n# TYPE"])
def test_hostile_names_stay_in_their_label(tmp_path: Path, payload: str) -> None:
    run = make_run(tmp_path, [training(1, 1.0) | {payload: 1.0}], name=payload, ranks=payload)
    times(run, 0, 0, stretch(0, 8, forward=0.1) | {"line": payload, "host": payload})
    assert set(seen(run)) == set(seen(make_run(tmp_path / "b", [training(1, 1.0)]))) | {
        "echelon_rank_step",
        "echelon_rank_time_ratio",
    }


def ask(address: tuple[str, int], path: str = "/metrics", method: str = "GET") -> tuple[int, bytes, str]:
    request = urllib.request.Request(f"http://{address[0]}:{address[1]}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=180) as answer:
            return answer.status, answer.read(), answer.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), ""


@pytest.mark.parametrize(("port", "bind"), [(70_000, "127.0.0.1"), (0, "example")])
def test_an_address_that_cannot_be_listened_at_is_refused(port: int, bind: str) -> None:
    with refused(CommandError):
        Endpoint(port, bind)


def test_a_port_that_is_taken_is_said() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        refused(CommandError),
    ):
        Endpoint(taken.getsockname()[1])


def test_without_prometheus_client_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prometheus_client.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with refused(CommandError):
        Endpoint(0)


def test_clients_that_say_nothing_or_nonsense_keep_nobody_out(tmp_path: Path) -> None:
    endpoint = Endpoint(0)
    try:
        endpoint.serve(make_run(tmp_path, [training(1, 1.0)]))
        host, port = endpoint.address.removeprefix("http://").removesuffix("/metrics").split(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(20)]
        for each in silent[::2]:
            each.sendall(b"\x16\x03\x01\x00\xff" * 9)
        assert ask((host, int(port)))[0] == 200 and ask((host, int(port)), method="POST")[0] >= 400
        for each in silent:
            each.close()
    finally:
        endpoint.close()


RUN = "import time\nfrom pathlib import Path\nwhile not Path('go').exists(): time.sleep(0.02)\n"


def address_of(run: subprocess.Popen[bytes]) -> tuple[str, int]:
    """Where a run says that it serves; a warning may come before."""
    assert run.stderr is not None
    for line in run.stderr:
        if found := re.fullmatch(r"echelon: metrics at http://([\d.]+):(\d+)/metrics\n", line.decode()):
            return found[1], int(found[2])
    raise AssertionError("it does not say where it serves")


def test_a_run_serves_while_it_runs_and_leaves_nothing_behind(started: Started) -> None:
    run = started.run("--ranks", "1", "--name", "r", "--metrics-port", "0", started.script(RUN), fresh=True)
    text = ask(address_of(run))[1].decode()
    assert parsed(text)["echelon_running"] == {'run="r"': 1.0}
    (started.folder / "go").touch()
    run.communicate(timeout=120)
    assert run.returncode == 0
    started.all_gone()


def test_the_endpoint_ends_with_a_launcher_that_was_killed(started: Started) -> None:
    run = started.run("--ranks", "1", "--metrics-port", "0", started.script(RUN), fresh=True)
    assert address_of(run)
    run.kill()
    started.all_gone()
