"""``lightning-hetero selftest`` as a user runs it, and the table that its files become."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.e2e.process import CLI, ROOT, run

pytestmark = pytest.mark.slow  # the same code runs in tests/dist; this is the command as a user starts it

CONTRACTS = {"gradient": 7, "ragged": 6, "clip": 4, "random streams": 4}  # cases on two devices


def test_two_devices(tmp_path: Path) -> None:
    text = run(*CLI, "selftest", "--devices", "2", "--accelerator", "cpu", cwd=tmp_path)
    rows = {line.split("│")[1].strip(): line.split("│") for line in text.splitlines() if line.startswith("│")}
    assert text.count("Self-test on 2 x") == 1, "by one rank"

    report = json.loads((tmp_path / "selftest.json").read_text())
    assert report["passed"] is True
    assert report["running"] is report["error"] is None
    assert (report["accelerator"], list(report["devices"].values())) == ("cpu", [2])
    assert {"torch", "lightning", "python", "cuda", "nccl", "date"} <= report.keys()
    assert {contract["name"]: len(contract["cases"]) for contract in report["contracts"]} == CONTRACTS
    for contract in report["contracts"]:
        assert contract["passed"] is True
        assert contract["worst_error"] <= min(contract["tolerance"], 1e-12)
        assert rows[contract["name"]][-2].strip() == "passed"
    print(f"{report['seconds']:.0f} s")

    table = run(sys.executable, str(ROOT / "docs" / "verified.py"), "selftest.json", cwd=tmp_path)
    assert "gradient: 7, " in table.splitlines()[2]
    assert "| passed |" in table.splitlines()[2]


BROKEN = """
from dataclasses import replace
from unittest.mock import patch

from lightning_hetero import selftest
from lightning_hetero.cli import main
from tests.harness.mutations import scaled_gradient


def first_of_each(setup, original=selftest.contracts):
    return [replace(contract, cases=contract.cases[:1]) for contract in original(setup)]


with patch.object(selftest, "contracts", first_of_each), scaled_gradient("vision", 2.0):
    main()
"""


def test_a_broken_build_fails_and_the_file_says_where(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    with pytest.raises(AssertionError, match="exited with 1"):
        run(sys.executable, str(script), "selftest", "--devices=2", "--accelerator=cpu", cwd=tmp_path)
    report = json.loads((tmp_path / "selftest.json").read_text())
    assert report["passed"] is False
    assert report["running"] is None, "the others still ran"
    outcome = {contract["name"]: contract["passed"] for contract in report["contracts"]}
    assert outcome == {"gradient": False, "ragged": False, "clip": False, "random streams": True}
    (case,) = report["contracts"][0]["cases"]
    assert case["failures"][0].startswith("vision: gradient of vision.")
    assert "FAILED gradient, vision 2x1 sharded, llm 2x1 sharded: vision:" in (tmp_path / "stdout.txt").read_text()
