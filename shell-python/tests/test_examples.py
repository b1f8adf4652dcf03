"""The examples run, and the READMEs' programs, and the documentation's."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import immwire
import pytest
from conftest import PATIENCE
from immwire import bootstrap, moe

HERE = Path(__file__).parent.parent
ON_GPUS = [HERE / "examples" / name for name in ("graph_pages.py", "gpu_moe_layer.py")]
EXAMPLES = sorted(set((HERE / "examples").glob("*.py")) - set(ON_GPUS))
READMES = "".join(folder.joinpath("README.md").read_text() for folder in (HERE.parent, HERE))
PROGRAMS = re.findall(r"^```python\n(.*?)^```", READMES, re.DOTALL | re.MULTILINE)


def run(*args, **environment):
    return subprocess.run(
        [sys.executable, *args],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples(example):
    ended = run(example)
    assert ended.returncode == 0, ended.stderr
    assert not ended.stderr
    assert len(ended.stdout.splitlines()) == 1


@pytest.mark.parametrize("example", ON_GPUS, ids=lambda path: path.stem)
def test_the_examples_for_gpus_say_what_they_need(example):
    ended = run(example, CUDA_VISIBLE_DEVICES="")
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"{example.name} needs")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.splitlines()[0])
def test_readme(program):
    expected = re.findall(r"# prints (.*)$", program, re.MULTILINE)
    assert expected
    ended = run("-c", program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == expected


@pytest.mark.parametrize("module", [immwire, bootstrap, moe], ids=lambda module: module.__name__)
def test_documentation(module):
    results = doctest.testmod(module)
    assert results.attempted
    assert not results.failed


def test_the_parameter_server_is_short():
    program = (HERE / "examples" / "parameter_server.py").read_text()
    code = [line for line in program.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(code) <= 65
