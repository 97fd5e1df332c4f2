"""What the tests of all rooms of the engine share: the fake executor, tiny models, processes of a group, what tests of interrupts need."""

import signal

import pytest


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from layouts import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("tiny"), mtp=True)


@pytest.fixture(scope="module")
def v4_checkpoint(tmp_path_factory):
    import v4_engine

    return v4_engine.write(tmp_path_factory.mktemp("v4"))


@pytest.fixture(scope="module")
def v4_tokens(v4_checkpoint):
    """Greedy and drawn tokens of one device."""
    import v4_engine

    return v4_engine.one_devices(v4_checkpoint)


@pytest.fixture
def patient_disk(monkeypatch):
    """Have engines wait for their disk as long as a busy machine may take to write, list and read pages."""
    from dsjax.engine.tiers import disk_pages, offload_tiers

    for module, name in (
        (disk_pages, "LISTING_SECONDS"),
        (disk_pages, "END_SECONDS"),
        (offload_tiers, "CLOSE_SECONDS"),
        (offload_tiers, "PATIENCE"),
    ):
        monkeypatch.setattr(module, name, 60.0)


@pytest.fixture
def interrupts_are_raised():
    """As in a shell's foreground: a job in the background begins with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
