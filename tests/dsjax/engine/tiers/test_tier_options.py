"""Which options do not go with pages that are kept beside the devices, or told of: the tests of `tiers/options.py`."""

import pytest

from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError

DISK, EVENTS = (
    {"disk_cache": "pages", "disk_cache_bytes": 1 << 30},
    {"kv_events_config": {"enable_kv_cache_events": True}},
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disk_cache_bytes": 1 << 30}, "--disk-cache-bytes is given without --disk-cache"),
        ({"disk_cache": "pages"}, "--disk-cache is given without --disk-cache-bytes"),
        (DISK | {"num_processes": 2}, "a mesh of several processes yet; leave it out, or use --host-cache-bytes$"),
        (DISK | {"enable_prefix_caching": False}, "--disk-cache keeps pages of the prefix cache"),
        (DISK | {"record_steps": "steps"}, "--record-steps does not go with --disk-cache"),
        ({"kv_events_config": {"topics": "kv"}}, "--kv-events-config has the unknown field topics"),
    ],
)
def test_what_does_not_go_together_is_named(options, message):
    with pytest.raises(UserError, match=message):
        EngineArgs(**options)


def test_events_are_read_where_they_are_given_and_need_the_prefix_cache():
    pytest.importorskip("zmq")
    assert EngineArgs(**EVENTS, **DISK).kv_events.publishes
    assert EngineArgs(**DISK).kv_events is None
    with pytest.raises(UserError, match="--kv-events-config tells of the prefix cache's pages"):
        EngineArgs(**EVENTS, enable_prefix_caching=False)
