"""Credentials of two deployments."""

from dsjax.messaging import Credentials
from dsjax.messaging.cluster_key import ClusterKey

KEY = Credentials(ClusterKey("k" * 32, "the test"))
OTHER = Credentials(ClusterKey("o" * 32, "the other test"))
