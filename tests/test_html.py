import re
from xml.etree import ElementTree

import pytest
from reports import lost_one_of_three, report_of

from daskps.report import FitReport


def parsed(report):
    """Well-formed, so that a notebook shows the same as we do."""
    return ElementTree.fromstring(report._repr_html_().replace("&nbsp;", " "))


def test_has_the_figures_with_units_and_the_advice():
    report = report_of(2, compute=0.009, idle=0.001)
    text = " ".join(parsed(report).itertext())
    assert "2 rank(s), sync_every='batch', batch_size=32" in text
    assert all(value in text for value in report.summary().values())
    assert report.advice() in text
    assert "compute (s)" in text


def test_has_a_row_for_each_rank_over_all_epochs():
    rows = [[cell.text for cell in row][:4] for row in parsed(report_of(2)).iter("tr")]
    assert rows[-2:] == [["0", "300.00", "18.75", "56.25"], ["1", "300.00", "18.75", "56.25"]]


def test_bars_are_as_long_as_times_and_fit_their_cell():
    widths = [float(w) for w in re.findall(r"width:([0-9.]+)px", report_of(2)._repr_html_())]
    assert len(widths) == 6
    assert sum(widths[:3]) == pytest.approx(320, abs=0.2)
    assert widths[0] / widths[2] == pytest.approx(300 / 56.25, rel=0.01)


def test_names_workers_that_were_lost_in_lines_that_may_break_anywhere():
    (events,) = parsed(lost_one_of_three()).iter("ul")
    assert [line.text for line in events] == [
        "epoch 3: tls://a-long-name.example:4127 was lost; the epoch begins again"
    ]
    assert events.get("style") == "overflow-wrap:anywhere"
    assert not list(parsed(report_of(2)).iter("ul"))


def test_what_nothing_measured_is_also_html():
    assert "Nothing was measured" in " ".join(parsed(FitReport(2, "epoch", 32)).itertext())


def test_text_of_the_fit_is_escaped():
    report = report_of(1)
    report.startup_seconds = {"<b>": 1.0}
    assert "&lt;b&gt;" in report._repr_html_()
