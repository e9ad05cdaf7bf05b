"""What a rank's task answers, with a stand-in for Dask's worker."""

import threading
from unittest.mock import Mock

import pytest

from daskps import _tasks, _worker_plugin
from daskps._answers import Left
from daskps._spec import WORKER_PLUGIN, Order, Ticket
from daskps._tasks import _or_left
from daskps._worker_plugin import DaskpsWorkerPlugin
from daskps.exceptions import RunAbortedError

ORDER = Order(
    Ticket("run", 0, 0, 2), epoch=0, first=True, seed=1, shuffle=False, settings=b"", predictions=False
)


class TestConsequence:
    """Of what happened to the run elsewhere."""

    @pytest.fixture
    def plugin(self, monkeypatch):
        plugin = DaskpsWorkerPlugin()
        worker = Mock(plugins={WORKER_PLUGIN: plugin}, stream_handlers={})
        plugin.setup(worker)
        monkeypatch.setattr(_tasks, "get_worker", lambda: worker)
        return plugin

    @staticmethod
    @_or_left
    def aborted(order, shard, opening):
        raise RunAbortedError("the connection is closed")

    def test_is_an_answer_as_soon_as_the_scheduler_has_ended_the_generation(self, plugin, monkeypatch):
        monkeypatch.setattr(_worker_plugin, "_NEWS_SECONDS", 60.0)
        telling = threading.Timer(0.01, plugin.forget, ["run", 0])
        telling.start()
        assert self.aborted(ORDER, None, None) == Left("the connection is closed")
        telling.join()

    def test_is_raised_if_only_this_rank_knows(self, plugin, monkeypatch):
        monkeypatch.setattr(_worker_plugin, "_NEWS_SECONDS", 0.01)
        plugin.forget("run", 1)  # another generation
        with pytest.raises(RunAbortedError, match="the connection is closed"):
            self.aborted(ORDER, None, None)
