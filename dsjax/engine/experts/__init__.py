"""Expert balancing while serving: the decision and the exchange."""
