import json
import pickle

import pytest

from daskps import _spec
from daskps._spec import Contribution, Rules, Ticket


def test_names_on_the_cluster_carry_the_protocol():
    names = [_spec.SCHEDULER_PLUGIN, _spec.WORKER_PLUGIN, _spec.TOPIC]
    operations = [_spec.OPEN, _spec.JOIN, _spec.CLOSE, _spec.HELLO, _spec.LEFT, _spec.FORGET]
    assert all(name.endswith(f"-{_spec.PROTOCOL}") for name in names)
    assert all(name.endswith(f"_{_spec.PROTOCOL}") for name in operations)
    assert len({*names, *operations}) == len(names) + len(operations)


def test_ticket_is_a_value():
    ticket = Ticket("run", 0, 1, 2)
    assert pickle.loads(pickle.dumps(ticket)) == ticket
    assert {ticket: "seat"}[Ticket("run", 0, 1, 2)] == "seat"


@pytest.mark.parametrize(
    "value",
    [Ticket("run", 0, 1, 2), Contribution("run", 0, 1, 0, 1.0, "mean", 1, "float64")],
)
def test_specs_cannot_be_changed(value):
    with pytest.raises(AttributeError):
        value.rank = 5


def test_rules_travel_as_a_list_of_plain_values():
    rules = Rules(30.0, 1.0, 600.0, 3600.0, 30.0, 2.0, 0.25, "auto", 2**22, None, "warn")
    sent = json.loads(json.dumps(list(rules)))
    assert Rules(*sent) == rules
    with pytest.raises(AttributeError):
        rules.round = 1.0
