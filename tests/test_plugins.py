"""How daskps comes to the scheduler and the workers, and what is said where it cannot."""

import asyncio

import dask
import pytest
from distributed.comm import CommClosedError

from daskps import InstallationError
from daskps._plugins import register
from daskps._spec import SCHEDULER_PLUGIN, WORKER_PLUGIN


class Unheard:
    """A client whose scheduler cannot bring a plugin to those who have to have it."""

    def __init__(self, error):
        self.error = error
        self.asked = []

    def sync(self, function, callback_timeout):
        return asyncio.run(asyncio.wait_for(function(), callback_timeout))

    async def register_plugin(self, plugin):
        self.asked.append(plugin.name)
        if plugin.name == WORKER_PLUGIN:
            if self.error is None:
                await asyncio.Event().wait()
            raise self.error


@pytest.mark.parametrize("error", [CommClosedError("in <TCP ...>: Stream is closed"), None])
def test_a_worker_that_does_not_answer_is_no_error_of_those_that_do(error):
    """Killed, or stopped, when a cluster gets its plugins: Dask raises, or waits."""
    client = Unheard(error)
    with dask.config.set({"daskps.timeouts.connect": "10ms"}):
        register(client)
    assert client.asked == [SCHEDULER_PLUGIN, WORKER_PLUGIN]


def test_workers_without_daskps_are_an_error_at_once():
    with pytest.raises(InstallationError, match="workers cannot load daskps"):
        register(Unheard(ImportError("no module named daskps")))
