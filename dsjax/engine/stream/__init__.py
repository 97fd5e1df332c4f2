"""The stream of commands beyond one process: to the followers of a leader, and to a file."""
