"""``lightning-hetero check`` as a user runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.e2e.process import CLI, ROOT, run

pytestmark = pytest.mark.slow  # the same code runs in tests/dist; this is the command as a user starts it

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))

BROKEN = """
from lightning_hetero.cli import main
from tests.harness.mutations import scaled_gradient

with scaled_gradient("vision", 2.0):
    main()
"""


@pytest.mark.parametrize("recipe", RECIPES, ids=[recipe.stem for recipe in RECIPES])
def test_every_recipe_passes(tmp_path: Path, recipe: Path) -> None:
    text = run(*CLI, "check", "--config", str(recipe), cwd=tmp_path)
    assert "PASSED with tolerance 1e-10" in text
    assert "Covered: 1 step, " in text
    assert text.count("Gradients of step 0") == 1, "by one rank"
    assert {path.name for path in tmp_path.iterdir()} == {"stdout.txt", "stderr.txt"}, "it leaves nothing behind"


def test_a_build_that_doubles_one_modules_gradient_fails(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    with pytest.raises(AssertionError, match="exited with 1"):
        run(sys.executable, str(script), "check", "--config", str(RECIPES[0]), cwd=tmp_path)
    failed = [line for line in (tmp_path / "stdout.txt").read_text().splitlines() if line.startswith("FAILED")]
    assert failed[0].startswith("FAILED vision: gradient of vision.")
    assert "2 times that of one process" in failed[0]
    assert not any(line.startswith("FAILED llm") for line in failed)
