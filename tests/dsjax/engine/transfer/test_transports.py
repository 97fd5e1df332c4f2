"""Every transport hands chunks over as they were, from any device to any device, and none that was withdrawn. Also tests
`transfer/transport.py`, `transfer/jax_transport.py`, `transfer/nixl/nixl_transport.py` and `transfer/nixl/agent.py`."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import MagicMock

import jax
import ml_dtypes
import numpy as np
import pytest

from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.transfer import transport as table
from dsjax.engine.transfer.nixl import nixl_transport
from dsjax.engine.transfer.transport import BACKENDS, open_transport
from dsjax.errors import UserError


def _is_missing(name):
    return importlib.util.find_spec(BACKENDS[name].package) is None


NIXL = pytest.mark.skipif(_is_missing("nixl"), reason="NIXL is not installed (pip install 'dsjax[nixl]')")
EACH_BACKEND = [
    pytest.param(name, marks=pytest.mark.skipif(_is_missing(name), reason=f"{BACKENDS[name].package} is not installed"))
    for name in BACKENDS
]
SHAPES = {
    "latent": ((1, 16, 3, 4, 100), np.dtype(np.float32)),
    "rope": ((1, 16, 3, 4, 10), np.dtype(ml_dtypes.bfloat16)),
    "filled": ((1, 16, 3), np.dtype(bool)),
    "codes": ((1, 16, 3, 4, 7), np.dtype(ml_dtypes.float8_e4m3fn)),
}


def values(number):
    """Each value tells its place in a chunk, and the chunk."""
    count = lambda shape: (np.arange(np.prod(shape)).reshape(shape) + number) % 13  # noqa: E731
    return {name: count(shape).astype(dtype) for name, (shape, dtype) in SHAPES.items()}


def chunk(number, device=None):
    return jax.device_put(values(number), device or jax.devices()[0])


def is_chunk(pulled, number, device):
    for name, expected in values(number).items():
        assert pulled[name].devices() == {device}
        assert pulled[name].dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(pulled[name]), expected)


def published(sender, chunks):
    """Publish chunks; return their tickets by number."""
    return {number: sender.publish(number, one) for number, one in chunks.items()}


@pytest.fixture(params=EACH_BACKEND)
def ends(request):
    return [open_transport(request.param, jax.devices()[0], "127.0.0.1") for _ in range(2)]


def test_chunks_come_as_they_were_in_any_order_from_and_to_any_device(ends):
    (sender, receiver), devices = ends, jax.devices()
    chunks = {number: chunk(number, devices[number % 3]) for number in range(1, 7)}
    tickets = published(sender, chunks)
    for number in (3, 1, 6, 5):
        pulled = receiver.pull(sender.address, number, tickets[number], SHAPES, devices[number % 2])
        is_chunk(pulled, number, devices[number % 2])
        sender.withdraw(number, chunks[number], pulled=True)
    for number in (2, 4):
        sender.withdraw(number, chunks[number], pulled=False)
    for number in (7, 8):  # the second after its process was forgotten
        ticket = sender.publish(number, chunks[1])
        is_chunk(receiver.pull(sender.address, number, ticket, SHAPES, devices[0]), 1, devices[0])
        sender.withdraw(number, chunks[1], pulled=True)
        receiver.disconnect(sender.address)


def test_chunks_are_published_and_pulled_in_many_threads_at_once(ends):
    sender, receiver = ends
    device = jax.devices()[0]

    def hand_over(number):
        own = chunk(number)
        pulled = receiver.pull(sender.address, number, sender.publish(number, own), SHAPES, device)
        sender.withdraw(number, own, pulled=True)
        is_chunk(pulled, number, device)
        return number

    with ThreadPoolExecutor(8) as threads:
        assert sorted(threads.map(hand_over, range(1, 201))) == list(range(1, 201))


@pytest.fixture
def with_fake_agent(monkeypatch):
    """A NIXL transport whose agent reads nothing. `registered`: the memory that it knows."""
    agent = MagicMock(registered=[])
    agent.name = "fake"
    agent.register.side_effect = lambda memory: agent.registered.append(memory) or memory
    agent.deregister.side_effect = agent.registered.remove
    agent.describe.return_value = b""
    agent.disconnect.side_effect = RuntimeError("injected")
    monkeypatch.setattr(nixl_transport, "Agent", lambda: agent)
    return nixl_transport.NixlTransport(jax.devices()[0], "127.0.0.1")


def test_a_buffer_that_a_chunk_could_not_be_copied_into_is_registered_no_longer(with_fake_agent, monkeypatch):
    monkeypatch.setattr(nixl_transport, "_overwrite", MagicMock(side_effect=RuntimeError("no memory")))
    with pytest.raises(RuntimeError, match="no memory"):
        with_fake_agent.publish(1, chunk(1))
    assert with_fake_agent._agent.registered == []
    with_fake_agent._agent.describe.side_effect = RuntimeError("injected")
    with pytest.raises(RuntimeError, match="injected"):
        with_fake_agent.publish(2, chunk(2))
    assert with_fake_agent._agent.registered == []


def test_a_buffer_that_was_not_read_is_not_used_again(with_fake_agent):
    ticket, agent = with_fake_agent.publish(1, chunk(1)), with_fake_agent._agent
    agent.read.side_effect, before = ConnectionError("injected"), list(agent.registered)
    with pytest.raises(RuntimeError, match="injected"):  # what fails as the process is forgotten keeps no memory either
        with_fake_agent.pull("there", 1, ticket, SHAPES, jax.devices()[0])
    assert agent.registered == before


def test_nothing_is_kept_of_a_chunk_that_jaxs_server_did_not_take_nor_of_a_process_that_could_not_be_read():
    side = open_transport("jax", jax.devices()[0], "127.0.0.1")
    fail = MagicMock(side_effect=OSError("the link is down"))
    side._server = SimpleNamespace(await_pull=fail, connect=lambda address: SimpleNamespace(pull=fail))
    for call in (lambda: side.publish(1, chunk(1)), lambda: side.pull("there", 1, bytes(8), SHAPES, jax.devices()[0])):
        with pytest.raises(OSError, match="the link is down"):
            call()
    assert side._tickets == side._connections == {}


def test_a_chunk_has_a_random_number_at_jaxs_server_which_asks_nobody_who_they_are():
    sender, receiver = (open_transport("jax", jax.devices()[0], "127.0.0.1") for _ in range(2))
    chunks = {number: chunk(number) for number in (1, 2, 3)}
    tickets = published(sender, chunks)
    numbers = {int.from_bytes(ticket, "little") for ticket in tickets.values()}
    assert len(numbers) == 3
    assert min(numbers) > 2**32  # nobody comes upon it by counting; below that in one run of a billion
    for number in chunks:  # and by its ticket each can be pulled
        is_chunk(receiver.pull(sender.address, 9, tickets[number], SHAPES, jax.devices()[0]), number, jax.devices()[0])
        sender.withdraw(number, chunks[number], pulled=True)


def test_a_chunk_that_was_withdrawn_while_it_was_read_is_not_returned(with_fake_agent):
    ticket = with_fake_agent.publish(1, chunk(1))
    with pytest.raises(ConnectionError, match="withdrawn while it was read"):  # its mark is gone
        with_fake_agent.pull("there", 1, ticket, SHAPES, jax.devices()[0])
    assert not with_fake_agent._agent.disconnect.called, "its process has answered"


@NIXL
@pytest.mark.parametrize("ends", ["nixl"], indirect=True)
def test_nixl_returns_no_chunk_that_was_withdrawn(ends):
    sender, receiver = ends
    withdrawn, device = chunk(1), jax.devices()[0]
    old = sender.publish(1, withdrawn)
    sender.withdraw(1, withdrawn, pulled=False)
    with pytest.raises(ConnectionError, match="withdrawn"):
        receiver.pull(sender.address, 1, old, SHAPES, device)
    new = sender.publish(2, chunk(2))  # in the same buffer
    with pytest.raises(ConnectionError, match="withdrawn"):
        receiver.pull(sender.address, 1, old, SHAPES, device)
    is_chunk(receiver.pull(sender.address, 2, new, SHAPES, device), 2, device)


@NIXL
@pytest.mark.parametrize("ends", ["nixl"], indirect=True)
def test_nixl_registers_as_many_buffers_as_are_needed_at_the_same_time(ends):
    sender, receiver = ends
    device = jax.devices()[0]
    for number in range(1, 60, 2):
        pair = {each: chunk(each) for each in (number, number + 1)}
        for each, ticket in published(sender, pair).items():
            receiver.pull(sender.address, each, ticket, SHAPES, device)
            sender.withdraw(each, pair[each], pulled=True)
    [sends], [receives] = sender._sends._free.values(), receiver._receives._free.values()
    assert (len(sends), len(receives)) == (2, 1)
    assert receiver._agent._peers[sender.address].known == {0, 1}


def test_a_backend_that_is_not_installed_or_has_nobody_to_pull_from_is_refused(monkeypatch):
    with pytest.raises(UserError, match="--disaggregation-transfer-backend is given without --disaggregation-mode"):
        EngineArgs(disaggregation_transfer_backend="nixl")
    with pytest.raises(UserError, match="expected one of jax, nixl"):
        EngineArgs(disaggregation_mode="decode", disaggregation_transfer_backend="mooncake")
    monkeypatch.setattr(table.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"nixl_cu13, which is not installed: pip install 'dsjax\[nixl\]'"):
        EngineArgs(disaggregation_mode="decode", disaggregation_transfer_backend="nixl")
