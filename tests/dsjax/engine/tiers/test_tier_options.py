"""Options of pages that are kept beside the devices, or told of: the tests of `tiers/options.py`."""

import pytest

from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError


def test_events_are_read_where_they_are_given():
    pytest.importorskip("zmq")
    assert EngineArgs(kv_events_config={"enable_kv_cache_events": True}).kv_events.publishes
    assert EngineArgs().kv_events is None
    with pytest.raises(UserError, match="--kv-events-config has the unknown field topics"):
        EngineArgs(kv_events_config={"topics": "kv"})
