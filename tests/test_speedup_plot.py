from dataclasses import replace

import pytest
from experiments import BASE_SECONDS, PLAN, outcome_of, results_of

from daskps import _speedup_plot
from daskps._experiment import Cell


@pytest.fixture
def draw():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    yield _speedup_plot.draw
    matplotlib.pyplot.close("all")


WIDE = replace(
    PLAN, grid=tuple(Cell(K, 1) for K in (1, 2, 4, 8)), modes=("batch", "epoch"), fit_to=(1, 2, 4)
)


def test_points_stand_at_their_cores_and_speedups(draw):
    left = draw(results_of(PLAN)).axes[0]
    points = [container.lines[0] for container in left.containers]
    assert [round(point.get_xdata()[0]) for point in points] == [1, 1, 2, 2, 2, 2]
    expected = [BASE_SECONDS / outcome_of(trial).epoch_seconds for trial in PLAN.trials()[1:]]
    assert [point.get_ydata()[0] for point in points] == pytest.approx(expected)


def test_a_curve_for_each_mode_goes_through_what_follows_the_model(draw):
    left, right = draw(results_of(WIDE)).axes
    curves = [line for line in left.lines if len(line.get_xdata()) == 8]
    assert [list(curve.get_xdata()) for curve in curves] == [list(range(1, 9))] * 2
    assert curves[0].get_ydata()[7] == pytest.approx(2.0 / (96 * (0.002 + 0.018 / 8 + 0.002)))
    lines = [line for line in right.lines if len(line.get_xdata()) == 7]
    assert lines[0].get_ydata() == pytest.approx([0.4 + 0.2 * K for K in range(2, 9)])


def test_one_colour_for_each_mode_and_hollow_where_the_model_has_not_looked(draw):
    left = draw(results_of(WIDE)).axes[0]
    points = [container.lines[0] for container in left.containers]
    assert [point.get_color() for point in points] == [points[0].get_color(), points[1].get_color()] * 4
    assert points[0].get_color() != points[1].get_color()
    assert [point.get_markerfacecolor() == "white" for point in points] == [False] * 6 + [True] * 2


def test_axes_have_units_and_the_legend_is_beside_them(draw):
    figure = draw(results_of(PLAN))
    left, right = figure.axes
    assert left.get_xlabel() == "cores (workers x threads)"
    assert left.get_ylabel() == "speedup over plain skorch on one core"
    assert right.get_ylabel() == "S for a batch (ms)"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["batch", "H=8", "1 thread(s) a worker", "2 thread(s) a worker", "linear"]
    figure.canvas.draw()
    assert figure.legends[0].get_window_extent().x0 >= right.get_window_extent().x1


def test_s_of_a_single_number_of_workers_is_a_dash_behind_its_points(draw):
    right = draw(results_of(PLAN)).axes[1]
    dashes = [line for line in right.lines if line.get_marker() == "_"]
    assert [line.get_ydata()[0] for line in dashes] == pytest.approx([0.8, 0.05])
    assert min(line.get_markersize() for line in dashes) > 20


def test_points_of_s_stand_at_their_workers_also_where_there_are_many_threads(draw):
    grid = tuple(Cell(K, threads) for K in (1, 2) for threads in (1, 16))
    right = draw(results_of(replace(PLAN, grid=grid))).axes[1]
    assert all(line.get_xdata()[0] == pytest.approx(2, abs=0.05) for line in right.lines)


def test_title_says_emulated(draw):
    plan = replace(PLAN, base=replace(PLAN.base, emulate=(0.002, 0.0005)))
    assert draw(results_of(plan)).get_suptitle().startswith("EMULATED: steps wait")
    assert "EMULATED" not in draw(results_of(PLAN)).get_suptitle()
