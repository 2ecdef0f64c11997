"""The parts of the self-test that need no processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from lightning_hetero import HeteroError
from lightning_hetero import selftest as package
from lightning_hetero.layout import resolve_layouts
from lightning_hetero.selftest import selftest
from lightning_hetero.selftest_cases import (
    Case,
    Contract,
    Setup,
    SmallModule,
    all_layouts,
    factorizations,
    hybrid_sizes,
    make_samples,
    show_layouts,
)


def test_layouts_cover_every_way_to_divide_the_devices() -> None:
    assert factorizations(6) == [(6, 1), (3, 2), (2, 3), (1, 6)]
    assert hybrid_sizes(8) == [4, 2]
    for devices in (1, 2, 3, 4, 6, 8):
        names = [show_layouts(layouts, devices) for layouts in all_layouts(devices)]
        assert len(names) == len(set(names)), "no layout twice"
        pairs = {tuple(word for word in name.replace(",", "").split() if "x" in word) for name in names}
        assert len(pairs) == len(factorizations(devices)) ** 2
        for layouts in all_layouts(devices):
            resolve_layouts(layouts, "llm", devices)
    assert "vision 4x1 sharded over 2, llm 2x2 sharded" in [show_layouts(each, 4) for each in all_layouts(4)]


@pytest.mark.parametrize("devices", [1, 2, 3, 6, 8, 16])
def test_every_divisor_of_the_devices_splits_the_model(devices: int) -> None:
    module = SmallModule(devices)
    sizes = [*module.vision.tensor_parallel_heads.values(), *module.llm.tensor_parallel_heads.values()]
    assert not any(size % devices for size in (*sizes, module.llm.embed.num_embeddings))


def test_samples_differ() -> None:
    samples = make_samples([1, 1, 0, 2])
    assert [len(sample["images"]) for sample in samples] == [1, 1, 0, 2]
    assert not (samples[0]["input_ids"] == samples[1]["input_ids"]).all()
    assert all((sample["labels"] >= 0).any() for sample in samples)


def contracts(*runs: Callable[[], tuple[float, Sequence[str]]]) -> Callable[[Setup], list[Contract]]:
    return lambda setup: [
        Contract("gradient", "is right", 1e-10, [Case(f"case {i}", run) for i, run in enumerate(runs)])
    ]


def fine() -> tuple[float, Sequence[str]]:
    print("noise")
    return 1e-15, ()


def wrong() -> tuple[float, Sequence[str]]:
    return float("inf"), ["vision: gradient of vision.w"]


def raises() -> tuple[float, Sequence[str]]:
    raise RuntimeError("a rank is gone")


def test_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "reports" / "selftest.json"
    for runs, passed, lines in (
        ((fine, fine), True, []),
        ((fine, wrong), False, ["FAILED gradient, case 1: vision: gradient of vision.w"]),
        ((raises, fine), False, ["ENDED in gradient, case 0: RuntimeError: a rank is gone"]),
    ):
        monkeypatch.setattr(package, "contracts", contracts(*runs))
        report = selftest(1, "cpu", output=file)
        assert report.passed is passed
        report.print()
        text = capsys.readouterr().out
        assert "noise" not in text
        assert all(line in text for line in lines)
        saved = json.loads(file.read_text())
        assert saved == json.loads(json.dumps(report.to_dict()))
        assert saved["passed"] is passed
    assert saved["running"] == "gradient, case 0"
    assert saved["contracts"][0]["worst_error"] is None


def test_the_file_names_the_case_that_ended_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends() -> tuple[float, Sequence[str]]:
        raise KeyboardInterrupt

    monkeypatch.setattr(package, "contracts", contracts(fine, ends))
    with pytest.raises(KeyboardInterrupt):
        selftest(1, "cpu", output=tmp_path / "selftest.json")
    saved = json.loads((tmp_path / "selftest.json").read_text())
    assert (saved["passed"], saved["running"]) == (False, "gradient, case 1")
    assert len(saved["contracts"][0]["cases"]) == 1


def test_refuses_devices_that_are_not_there() -> None:
    with pytest.raises(HeteroError, match="this machine has"):
        selftest(1000, "gpu", output=None)
    with pytest.raises(HeteroError, match="must be at least 1"):
        selftest(0, "cpu", output=None)
