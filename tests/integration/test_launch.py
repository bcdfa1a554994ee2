"""The launcher's supervision: success, failure of either side, signals; nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.config_files import write_config

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_name("launch_driver.py")

# A service with a child that has left its session and ignores SIGTERM, as a daemon would.
SERVICE = """
import os, signal, subprocess, sys, time
from pathlib import Path
marker = Path(sys.argv[1]).parent
orphan = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
middle = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[2]], start_new_session=True)"
subprocess.run([sys.executable, "-c", middle, orphan, str(marker)])
(marker / "service_up").touch()
time.sleep(600)
"""
TRAINER_WAITS = """
import sys, time
from pathlib import Path
marker = Path(sys.argv[1]).parent
while not (marker / "service_up").exists():
    time.sleep(0.02)
"""
SUMMARY = """
import json
from dapo_megatron.observability.summary import SUMMARY_KEYS, write_summary
write_summary(marker, dict.fromkeys(SUMMARY_KEYS) | {"steps": 3, "accuracy_before_sampled": 0.25, "accuracy_after_sampled": 0.75})
"""


class Scene:
    """A configuration, stand-ins, and a look at what still runs from the run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = write_config(folder)
        self.run_dir = folder / "runs" / "toy"

    def start(self, service: str, trainer: str, under_torchrun: bool = False) -> subprocess.Popen[str]:
        (self.folder / "service.py").write_text(service)
        (self.folder / "trainer.py").write_text(trainer)
        second = ("rank:" if under_torchrun else "") + str(self.folder / "trainer.py")
        command = [sys.executable, str(DRIVER), str(self.config), str(self.folder / "service.py"), second]
        env = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT)

    def left_running(self, patience_s: float = 10.0) -> list[str]:
        """Command lines that mention this test's folder, after giving the kernel a moment."""
        deadline = time.monotonic() + patience_s
        while True:
            found = [
                " ".join(process.info["cmdline"])[-120:]
                for process in psutil.process_iter(["cmdline", "status"])
                if str(self.folder) in " ".join(process.info["cmdline"] or [])
                and process.info["status"] != psutil.STATUS_ZOMBIE
            ]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    def wait_for(self, name: str, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not (self.run_dir / name).exists():
            assert time.monotonic() < deadline, f"{name} did not appear"
            time.sleep(0.02)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_success_closes_with_the_table_and_ends_the_service(scene: Scene) -> None:
    out, err = scene.start(SERVICE, TRAINER_WAITS + SUMMARY).communicate(timeout=60)
    assert "0.250 -> 0.750" in out, err
    assert scene.left_running() == []
    assert (scene.run_dir / "resolved_config.yaml").is_file()
    assert not (scene.folder / "runs" / ".toy.lock").exists()


def test_an_earlier_run_is_kept_under_another_name(scene: Scene) -> None:
    (scene.run_dir).mkdir(parents=True)
    (scene.run_dir / "metrics.jsonl").write_text("{}\n")
    for number in (1, 2):
        out, _ = scene.start(SERVICE, TRAINER_WAITS + SUMMARY).communicate(timeout=60)
        assert f"an earlier run of this name was kept as toy.{number}" in out
    assert (scene.folder / "runs" / "toy.1" / "metrics.jsonl").is_file()
    assert (scene.folder / "runs" / "toy.2" / "summary.json").is_file()


def test_a_second_start_of_a_living_run_is_refused_and_leaves_it_alone(scene: Scene) -> None:
    first = scene.start(SERVICE, TRAINER_WAITS + "time.sleep(600)")
    scene.wait_for("service_up")
    _, err = scene.start(SERVICE, "").communicate(timeout=30)
    assert "a run 'toy' is active here" in err
    assert (scene.run_dir / "service_up").exists()
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=30)
    assert scene.left_running() == []


def test_a_failing_trainer_stops_the_service_and_names_the_cause(scene: Scene) -> None:
    process = scene.start(SERVICE, TRAINER_WAITS + "raise ValueError('step 3: the batch is odd')")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: the trainer failed: ValueError: step 3: the batch is odd" in err
    assert "trainer.log" in err
    assert err.count("error:") == 1
    assert scene.left_running() == []


def test_a_failing_service_stops_the_trainer_and_names_the_cause(scene: Scene) -> None:
    process = scene.start("raise RuntimeError('engine 0 did not start')", "import time\ntime.sleep(600)")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: the rollout service failed: RuntimeError: engine 0 did not start" in err
    assert "rollout.log" in err
    assert scene.left_running() == []


def test_the_cause_is_the_service_when_the_trainer_only_reports_its_death(scene: Scene) -> None:
    service = SERVICE.replace("time.sleep(600)\n", "time.sleep(1.0)\nraise MemoryError('object store full')\n")
    trainer = TRAINER_WAITS + "class ActorDiedError(Exception): ...\nraise ActorDiedError('the actor died')"
    process = scene.start(service, trainer)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "error: the rollout service failed: MemoryError: object store full" in err
    assert scene.left_running() == []


def test_a_killed_trainer_is_named_with_its_signal(scene: Scene) -> None:
    process = scene.start(SERVICE, TRAINER_WAITS + "import os\nos.kill(os.getpid(), 9)")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the trainer ended without saying why" in err
    assert "the trainer: killed by SIGKILL (usually the kernel's out-of-memory killer)" in err


def test_a_trainer_without_a_summary_is_a_failure(scene: Scene) -> None:
    process = scene.start(SERVICE, TRAINER_WAITS)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "without writing summary.json" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything_also_what_ignores_sigterm(scene: Scene, number: int, code: int) -> None:
    trainer = TRAINER_WAITS + "import signal\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(600)"
    process = scene.start(SERVICE, trainer)
    scene.wait_for("service_up")
    time.sleep(0.5)
    # driver, two guards, service, its daemon, trainer
    assert len(scene.left_running(patience_s=0.0)) == 6
    process.send_signal(number)
    if number == signal.SIGINT:
        time.sleep(0.5)
        process.send_signal(number)  # a second one does not wait for the grace
    process.communicate(timeout=30)
    assert process.returncode == code
    assert scene.left_running() == []
    assert not (scene.folder / "runs" / ".toy.lock").exists()


def test_sigkill_of_the_launcher_leaves_nothing_and_the_next_run_starts_at_once(scene: Scene) -> None:
    process = scene.start(SERVICE, TRAINER_WAITS + "time.sleep(600)")
    scene.wait_for("service_up")
    process.kill()
    process.communicate(timeout=30)
    assert scene.left_running() == []
    again = scene.start(SERVICE, TRAINER_WAITS + SUMMARY)
    again.communicate(timeout=60)
    assert again.returncode == 0


def test_the_failing_rank_under_torchrun_is_named_with_its_own_exception(scene: Scene) -> None:
    scene.config.write_text(scene.config.read_text() + "parallel:\n  nproc_per_node: 2\n")
    trainer = (
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    time.sleep(0.5)\n"
        "    raise KeyError('decoder.layers.3')\n"
        "time.sleep(600)\n"
    )
    process = scene.start(SERVICE, trainer, under_torchrun=True)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "error: trainer rank 1 failed: KeyError: 'decoder.layers.3'" in err
    assert "stderr.log" in err
    assert scene.left_running() == []


def test_a_trainer_alone_waits_for_a_living_service_and_says_how_to_start_it(scene: Scene) -> None:
    scene.run_dir.mkdir(parents=True)
    # What a service leaves behind when it is killed: its process is gone.
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    announced = {"pid": gone.pid, "host": socket.gethostname()}
    (scene.run_dir / "service.json").write_text(json.dumps(announced))
    command = [sys.executable, "-m", "dapo_megatron.cli", "train", str(scene.config), "ray.start_timeout_s=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, cwd=ROOT)
    assert done.returncode == 1
    assert f"waiting for the rollout service (dapo rollout {scene.config})" in done.stdout.replace("\n", "")
    assert "no rollout service announced itself" in done.stderr
    assert "ray.start_timeout_s=1" in done.stderr
