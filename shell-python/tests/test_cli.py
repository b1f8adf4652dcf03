"""The command, as the wheel starts it."""

import json
import signal
import subprocess
import sys

from conftest import PATIENCE

COMMAND = [sys.executable, "-m", "immwire"]


def run(*args):
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=60, check=False)


def test_it_says_what_it_is():
    version = run("--version")
    assert version.returncode == 0
    assert version.stdout.startswith("immwire ")
    nonsense = run("nonsense")
    assert nonsense.returncode == 2
    assert "nonsense" in nonsense.stderr


def test_doctor_finds_its_own_child():
    diagnosis = json.loads(run("doctor", "--json").stdout)
    # The child that it writes to is the command once more, started as this one was.
    assert diagnosis["probes"]["process_vm_writev"] == "works"


def test_what_lies_where_it_is_called_is_not_run(tmp_path):
    # As pip installs it, which looks for modules where it lies itself.
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "immwire"
    script.write_text("import sys\nfrom immwire.__main__ import main\nsys.exit(main())\n")
    (tmp_path / "here" / "immwire").mkdir(parents=True)
    strange = "import pathlib\npathlib.Path(__file__ + '.ran').touch()\nraise SystemExit(1)\n"
    for name in ("immwire/__init__.py", "immwire/__main__.py", "signal.py"):
        (tmp_path / "here" / name).write_text(strange)
    command = [sys.executable, str(script), "doctor", "--json"]
    done = subprocess.run(
        command, cwd=tmp_path / "here", capture_output=True, text=True, timeout=60, check=False
    )
    assert json.loads(done.stdout)["probes"]["process_vm_writev"] == "works", done.stderr
    assert not list(tmp_path.rglob("*.ran"))


def recv(*args):
    return subprocess.Popen(
        [*COMMAND, "recv", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_files_are_pushed(tmp_path):
    source = tmp_path / "file"
    source.write_bytes(b"bytes" * 100_000)
    with recv("--dir", str(tmp_path / "inbox"), "--once") as receiver:
        address = receiver.stdout.readline().strip()
        assert run("push", str(source), address).returncode == 0
        assert receiver.wait(PATIENCE) == 0
    assert (tmp_path / "inbox" / "file").read_bytes() == source.read_bytes()


def test_ctrl_c_ends_it_in_order(tmp_path):
    with recv("--dir", str(tmp_path)) as receiver:
        assert receiver.stdout.readline()
        receiver.send_signal(signal.SIGINT)
        assert receiver.wait(PATIENCE) == 0
        assert "Traceback" not in receiver.stderr.read()
