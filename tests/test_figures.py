"""What the documentation shows is made by commands that can be run."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from daskps import cli

DOCS = Path(__file__).parents[1] / "docs"

if not DOCS.exists():
    pytest.skip("the documentation is not here", allow_module_level=True)

_spec = importlib.util.spec_from_file_location("measure", DOCS / "figures" / "measure.py")
measure = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(measure)


@pytest.mark.parametrize("name", measure.FIGURES)
def test_every_command_can_be_parsed_and_planned(name):
    arguments = ["speedup", *shlex.split(measure.FIGURES[name])]
    assert len(cli._plan(cli._parser().parse_args(arguments)).trials()) > 1


def test_every_figure_that_a_page_includes_is_made_and_is_there():
    pages = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    included = set(re.findall(r"\{include\} figures/(\S+)\.md", pages))
    assert included == set(measure.FIGURES)
    assert all((DOCS / "figures" / f"{name}.md").exists() for name in included)


def test_what_was_measured_gives_table_and_picture_and_what_was_not_says_what_to_run(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("agg")
    from experiments import PLAN, outcome_of, results_of

    monkeypatch.setattr(measure, "FOLDER", tmp_path)
    measure.render("fashion-mnist")
    assert "**Not measured yet.**" in (tmp_path / "fashion-mnist.md").read_text()
    results_of(PLAN, outcome_of).save(tmp_path / "fashion-mnist.json")
    measure.render("fashion-mnist")
    text = (tmp_path / "fashion-mnist.md").read_text()
    assert text.startswith("    daskps speedup --data fashion-mnist --grid 1x1,1x2,2x1")
    assert "| batch | 2x1 | 1.77 |" in text
    assert "![fashion-mnist](figures/fashion-mnist.png)" in text
    assert (tmp_path / "fashion-mnist.png").stat().st_size > 10_000
