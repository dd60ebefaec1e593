"""The thread pool of the kernels, compiled alone: a task that runs twice writes over memory of somebody else."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMPILER = shutil.which("g++") or shutil.which("c++")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("no C++ compiler here: twinpool runs on torch alone")
    out = tmp_path_factory.mktemp("pool") / "once"
    sources = [Path(__file__).with_name("pool_once.cpp"), ROOT / "src/native/pool.cpp"]
    flags = ["-O2", "-std=c++20", "-pthread", f"-I{ROOT / 'src/native'}"]
    subprocess.run([COMPILER, *flags, *map(str, sources), "-o", str(out)], check=True)
    return out


@pytest.mark.parametrize("threads", [2, 4])
def test_every_task_runs_once(program: Path, threads: int) -> None:
    ended = subprocess.run([str(program), str(threads), "1000000"], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "")
