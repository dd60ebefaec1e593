"""The 8-bit float of KV pages, compiled alone: its vectors do what its scalars do, with this machine's instructions and without."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MACHINES = {"plain": [], "native": ["-march=native"]}
if platform.machine() == "x86_64":  # the look-up of 128 bytes is newer than the rest of AVX-512
    MACHINES["without VBMI"] = ["-march=native", "-mno-avx512vbmi"]
COMPILER = shutil.which("g++") or shutil.which("c++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here: twinpool runs on torch alone")
@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_vectors_equal_scalars(machine: list[str], tmp_path: Path) -> None:
    out, source = tmp_path / "codes", Path(__file__).with_name("e4m3_codes.cpp")
    flags = ["-O2", "-std=c++20", "-w", "-ffp-contract=off", *machine, f"-I{ROOT / 'src/native'}"]
    subprocess.run([COMPILER, *flags, str(source), "-o", str(out)], check=True)
    ended = subprocess.run([str(out)], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")
