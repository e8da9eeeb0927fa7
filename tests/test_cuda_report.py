"""native/cuda/report.py: what it reads in the output of ptxas, and that a spill is an error."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "native" / "cuda" / "report.py"
LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN10criticalkv9l1_kernelILNS_8row_typeE4ELi256EEEvNS_7l1_argsE' for 'sm_86'
ptxas info    : Function properties for _ZN10criticalkv9l1_kernelILNS_8row_typeE4ELi256EEEvNS_7l1_argsE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 130 registers, used 1 barriers, 34048 bytes smem, 424 bytes cmem[0]
ptxas info    : Compiling entry function '_ZN10criticalkv9move_rowsI5uint2EEvNS_15compaction_argsEi' for 'sm_86'
ptxas info    : Function properties for _ZN10criticalkv9move_rowsI5uint2EEvNS_15compaction_argsEi
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 62 registers, used 1 barriers, 104 bytes cumulative stack size
ptxas info    : Compiling entry function '_ZN10criticalkvL16attention_totalsENS_14attention_argsE' for 'sm_86'
ptxas info    : Function properties for _ZN10criticalkvL16attention_totalsENS_14attention_argsE
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers
"""


@pytest.fixture(scope="module")
def report():
    spec = importlib.util.spec_from_file_location("cuda_report", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_reads_registers_shared_memory_and_spills(report):
    assert report.parse(LOG) == {
        "l1_kernel q4_0 d=256": report.Usage(registers=130, shared=34048, stack=0),
        "move_rows 8 bytes": report.Usage(registers=62, shared=0, stack=24),
        "attention_totals": report.Usage(registers=30, shared=0, stack=0),
    }


def compiler(folder, log):
    """A program that says what nvcc would."""
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{log}END\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("log", "status"),
    [
        (LOG, 1),
        (
            LOG.replace(
                "8 bytes stack frame, 4 bytes spill stores, 12", "0 bytes stack frame, 0 bytes spill stores, 0"
            ),
            0,
        ),
        ("", 1),
    ],
)
def test_spills_and_missing_kernels_are_errors(report, tmp_path, monkeypatch, capsys, log, status):
    monkeypatch.setattr(sys, "argv", ["report.py", "--arch", "86", "90", "--nvcc", compiler(tmp_path, log)])
    assert report.main() == status
    if log == LOG:
        assert "move_rows 8 bytes on sm_90" in capsys.readouterr().out


def test_without_nvcc_it_is_skipped(report, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["report.py", "--nvcc", str(tmp_path / "none")])
    assert report.main() == report.SKIPPED
    assert "skipped" in capsys.readouterr().out
