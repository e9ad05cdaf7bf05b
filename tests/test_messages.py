"""What handlers on the scheduler are asked by peers that say anything, while a fit goes on."""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from distributed.comm import connect
from distributed.core import clean_exception
from distributed.protocol import to_serialize
from faults import Calls
from nets import CNN3
from probes import wait_until
from ranks import RULES, RUN_ID
from reference import fit_daskps, identical, make_net, separable

import daskps
from daskps._launch import open_run
from daskps._messages import FIELDS, checked, ignoring, refuse_invalid
from daskps._spec import CLOSE, HELLO, JOIN, LEFT, OPEN, PAUSED, RENEW, SCHEDULER_PLUGIN
from daskps._wire import error_of
from daskps.exceptions import (
    ClusterTooSmallError,
    DaskpsError,
    InstallationError,
    InvalidMessageError,
)

GOOD = {
    OPEN: {
        "run_id": RUN_ID,
        "client": "Client-1",
        "version": daskps.__version__,
        "n_workers": 2,
        "most": 100,
        "rules": list(RULES),
        "workers": ["tcp://127.0.0.1:1", 0],
        "resources": {"GPU": 1},
    },
    RENEW: {"run_id": RUN_ID, "join": True},
    CLOSE: {"run_id": RUN_ID, "keys": ["daskps-shard-1"]},
    PAUSED: {"keys": ["x", "y-0"]},
    JOIN: {"run_id": RUN_ID, "rank": 1, "generation": 0, "capacity": 64, "shared_memory": True},
    HELLO: {"worker": "tcp://127.0.0.1:1", "process": "0", "version": daskps.__version__},
    LEFT: {"worker": "tcp://127.0.0.1:1", "run_id": RUN_ID, "generation": 0},
}

ODD = [
    None, True, 0, -1, 2**31, 2**63, -(2**63), 0.5, float("nan"), float("inf"), "", "1", "x" * 2000, b"",
    b"\0" * 32, [], ["x"], [None] * 11, {}, {"x": "y"}, {"x": {"y": []}}, list(RULES)[::-1],
]  # fmt: skip


def odd_message(generator, operation):
    """A message that differs from a good one in one field or more."""
    message = dict(GOOD[operation])
    for _ in range(generator.choice([1, 1, 1, 2, 3])):
        name = generator.choice(list(message) or ["x"])
        kind = generator.choice(["value", "value", "missing", "more"])
        if kind == "missing":
            message.pop(name, None)
        elif kind == "more":
            message[generator.choice(["x", "self", "client_id"])] = generator.choice(ODD)
        else:
            message[name] = generator.choice(ODD)
    return message


def is_refused(operation, message):
    try:
        refuse_invalid(operation, message)
    except InvalidMessageError:
        return True
    return False


class TestRefuseInvalid:
    @pytest.mark.parametrize("operation", FIELDS)
    def test_lets_pass_what_is_good(self, operation):
        refuse_invalid(operation, GOOD[operation])

    def test_lets_pass_what_may_be_missing(self):
        nothing = dict.fromkeys(("n_workers", "workers", "resources"))
        refuse_invalid(OPEN, {**GOOD[OPEN], **nothing})

    @pytest.mark.parametrize(("operation", "field"), [(o, f) for o in FIELDS for f in FIELDS[o]])
    def test_names_the_field_what_is_allowed_and_what_came(self, operation, field):
        message = {**GOOD[operation], field: {"odd": []}}
        with pytest.raises(InvalidMessageError, match=rf"{field} of {operation} must be .*got \{{'odd'"):
            refuse_invalid(operation, message)
        del message[field]
        with pytest.raises(InvalidMessageError, match="has the fields"):
            refuse_invalid(operation, message)
        with pytest.raises(InvalidMessageError, match="has the fields"):
            refuse_invalid(operation, {**GOOD[operation], "odd": 1})

    @pytest.mark.parametrize(
        ("operation", "field", "value"),
        [
            (JOIN, "capacity", 0),
            (JOIN, "capacity", 2**63),
            (JOIN, "capacity", True),
            (JOIN, "rank", -1),
            (OPEN, "n_workers", 0),
            (OPEN, "rules", list(RULES)[:-1]),
            (OPEN, "rules", list(RULES._replace(round=float("nan")))),
            (OPEN, "rules", list(RULES._replace(round="1s"))),
            (OPEN, "rules", list(RULES._replace(close=1e12))),
            (OPEN, "rules", list(RULES._replace(wire_dtype="int8"))),
            (OPEN, "rules", list(RULES._replace(transport=["auto"]))),
            (OPEN, "workers", [b"x"]),
            (OPEN, "resources", {"GPU": "1"}),
            (LEFT, "generation", "0"),
        ],
    )
    def test_is_strict(self, operation, field, value):
        assert is_refused(operation, {**GOOD[operation], field: value})

    def test_raises_nothing_else_whatever_comes(self):
        generator = random.Random(0)
        refused = sum(
            is_refused(operation, odd_message(generator, operation))
            for operation in FIELDS
            for _ in range(3000)
        )
        assert refused > 0.8 * 3000 * len(FIELDS)


class TestHandlers:
    def test_are_called_with_what_is_good_only(self):
        heard = []

        async def handler(**message):
            heard.append(message)
            return len(heard)

        async def scenario():
            assert await checked(RENEW, handler)(**GOOD[RENEW]) == 1
            with pytest.raises(InvalidMessageError):
                await checked(RENEW, handler)(run_id=RUN_ID)
            await ignoring(LEFT, handler)(**GOOD[LEFT])
            await ignoring(LEFT, handler)(client="Client-1", run_id=[])

        asyncio.run(scenario())
        assert heard == [GOOD[RENEW], GOOD[LEFT]]

    def test_answer_with_a_refusal_that_is_raised_where_it_arrives(self):
        """Raised on the scheduler, its traceback would be printed there too."""

        async def handler(**message):
            raise ClusterTooSmallError("the fit asked for two")

        answer = asyncio.run(checked(RENEW, handler)(**GOOD[RENEW]))
        assert answer["status"] == "uncaught-error"  # as Dask's own answers, which its peers raise
        kind, error, _ = clean_exception(answer["exception"].data)
        assert (kind, str(error)) == (ClusterTooSmallError, "the fit asked for two")

    def test_tell_another_version_before_they_tell_what_is_odd(self):
        async def handler(**message):
            raise AssertionError(message)

        with pytest.raises(InstallationError, match=r"the client has 0\.0\.7: install"):
            asyncio.run(checked(OPEN, handler)(version="0.0.7", novel=True))


# On a cluster


UNPICKLED = []


class Trap:
    def __reduce__(self):
        return UNPICKLED.append, (1,)


@pytest.mark.parametrize("field", FIELDS[JOIN])
def test_a_pickle_in_a_request_to_join_is_refused_and_stays_one(client, cluster, session_client, field):
    with open_run(session_client, 2, 2):
        pickled = {**GOOD[JOIN], field: to_serialize(Trap())}
        heard = client.sync(joined_all, cluster.scheduler_address, [pickled])[0]
    assert (heard["status"], heard["kind"]) == ("refused", "InvalidMessageError")
    assert f"{field} of {JOIN} must be" in heard["reason"]
    assert UNPICKLED == []


def call(client, operation, message):
    """What an operation answers, or the error that it raises."""
    try:
        return client.sync(partial(getattr(client.scheduler, operation), **message))
    except Exception as error:
        return error


async def joined(address, message):
    """What a stranger hears that asks to join."""
    comm = await connect(address, deserialize=False)
    try:
        await comm.write({"op": JOIN, "reply": False, **message})
        return await asyncio.wait_for(comm.read(), 20)
    finally:
        comm.abort()


async def joined_all(address, messages):
    return [await joined(address, message) for message in messages]


async def stream(operation, messages, dask_scheduler):
    """What the scheduler does with messages that come through a stream."""
    for message in messages:
        await dask_scheduler.stream_handlers[operation](**message)


def open_runs(cluster):
    return cluster.scheduler.plugins[SCHEDULER_PLUGIN].runs


def n_entries(cluster):
    plugin = cluster.scheduler.plugins[SCHEDULER_PLUGIN]
    lender = plugin.lender
    held = [lender.processes, lender.asking, lender.leases.held(), lender.leases.waiting()]
    return [len(value) for value in held]


def foreign(generator, operation, run_id):
    """Odd, and of the run that goes on, or of none."""
    while is_refused(operation, message := odd_message(generator, operation)) is False:
        pass
    if message.get("run_id") == RUN_ID and generator.random() < 0.5:
        message["run_id"] = run_id
    return message


def fuzz(client, cluster, n):
    """What comes of messages to all handlers that are odd, stale, foreign or the same again."""
    generator = random.Random(1)
    (run_id,) = open_runs(cluster)
    many = dict.fromkeys((HELLO, LEFT), 32 * n)  # in a stream, where nobody waits for an answer
    messages = {
        operation: [foreign(generator, operation, run_id) for _ in range(many.get(operation, n))]
        for operation in FIELDS
    }
    messages[OPEN].append({**GOOD[OPEN], "run_id": run_id})
    messages[RENEW].append(GOOD[RENEW])
    messages[JOIN] += [GOOD[JOIN], {**GOOD[JOIN], "comm": 1}]
    messages[JOIN] += [
        {**GOOD[JOIN], "run_id": run_id, "rank": rank, "capacity": capacity}
        for rank in (0, 1, 2, 2**31)
        for capacity in (64, 2**60)
    ]
    messages[HELLO].append(GOOD[HELLO])
    messages[LEFT] += [GOOD[LEFT], {**GOOD[LEFT], "run_id": run_id}]
    for operation in (HELLO, LEFT):
        client.run_on_scheduler(stream, operation, messages.pop(operation))
    heard = client.sync(joined_all, cluster.scheduler_address, messages.pop(JOIN))
    found = {JOIN: [error_of(h["kind"], h["reason"]) if h["status"] == "refused" else h for h in heard]}
    for operation, said in messages.items():
        found[operation] = [call(client, operation, message) for message in said]
    return found


def test_odd_messages_are_refused_and_leave_nothing_and_a_fit_that_goes_on_is_unharmed(
    client, cluster, caplog
):
    X, y = separable(120, 3)
    net = make_net(CNN3, module__n=3, max_epochs=4, train_split=None)
    expected = fit_daskps(client, net, X, y, n_workers=2)
    wait_until(lambda: n_entries(cluster)[1:] == [0, 0, 0])  # the ranks have left
    before, found = n_entries(cluster), []
    with ThreadPoolExecutor(1) as pool:
        begin = Calls(lambda: found.append(pool.submit(fuzz, client, cluster, 150)), epoch=1)
        end = Calls(lambda: found.append(found.pop().result(60)), epoch=3)
        net.set_params(callbacks=[("begin", begin), ("end", end)])
        fitted = fit_daskps(client, net, X, y, n_workers=2)
    assert identical(fitted, expected)
    assert fitted.report_.events == []
    n_ignored = sum(record.message.startswith("ignored a message") for record in caplog.records)
    assert n_ignored == 2 * 32 * 150
    assert n_ignored + sum(map(len, found[0].values())) > 10_000
    for operation, outcomes in found[0].items():
        assert len(outcomes) >= 150
        odd = [outcome for outcome in outcomes if not isinstance(outcome, DaskpsError)]
        assert odd == [], operation
    wait_until(lambda: n_entries(cluster) == before, what=lambda: f"{before}, now {n_entries(cluster)}")
