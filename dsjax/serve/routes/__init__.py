"""The endpoints, a file for each kind."""
