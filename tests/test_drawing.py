import sys
from itertools import pairwise

import pytest
from reports import lost_one_of_three, report_of

from daskps.report import FitReport


@pytest.fixture
def plt():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


class TestReport:
    def test_stacks_the_seconds_of_every_epoch_and_rank(self, plt):
        ax = report_of(2, n_epochs=3, compute=0.9, idle=0.1).plot()
        compute, wait, sync = ax.containers
        assert [bars.get_label() for bars in ax.containers] == ["compute", "wait", "sync"]
        assert [bar.get_height() for bar in compute] == pytest.approx([90] * 6)
        assert [bar.get_height() for bar in wait] == pytest.approx([2.5] * 6)
        assert [bar.get_y() for bar in sync] == pytest.approx([92.5] * 6)

    def test_bars_stand_side_by_side_and_epochs_apart(self, plt):
        bars = report_of(2, n_epochs=2).plot().containers[0]
        left = [bar.get_x() for bar in bars]
        assert [after - before for before, after in pairwise(left)] == pytest.approx([1, 2, 1])

    def test_says_what_the_axes_are_with_units(self, plt):
        ax = report_of(4).plot()
        assert ax.get_ylabel() == "time of a rank (s)"
        assert ax.get_xlabel() == "epoch (ranks 0 to 3 side by side)"
        assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "2", "3"]
        assert ax.get_title() == "4 rank(s), sync_every='batch', batch_size=32"

    def test_an_epochs_number_stands_under_the_ranks_that_it_had(self, plt):
        ax = lost_one_of_three().plot()
        assert ax.get_xticks().tolist() == [1, 5, 8.5, 12.5]

    @pytest.mark.parametrize("n_epochs", [1, 20, 100])
    def test_no_two_labels_overlap(self, plt, n_epochs):
        ax = report_of(4, n_epochs=n_epochs).plot()
        ax.figure.canvas.draw()
        boxes = [label.get_window_extent() for label in ax.get_xticklabels()]
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes))
        legend = ax.get_legend().get_window_extent()
        assert legend.x0 >= ax.get_window_extent().x1
        assert legend.x1 <= ax.figure.bbox.x1

    def test_draws_where_it_is_told(self, plt):
        ax = plt.subplots()[1]
        assert report_of(1).plot(ax) is ax
        assert ax.get_xlabel() == "epoch (rank 0)"

    def test_of_nothing_measured_is_empty(self, plt):
        ax = FitReport(2, "batch", 32).plot()
        assert len(ax.patches) == 0
        assert ax.get_legend() is None


def test_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"Drawing needs matplotlib: pip install 'daskps\[plot\]'"):
        report_of(2).plot()
