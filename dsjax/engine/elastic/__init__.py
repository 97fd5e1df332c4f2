"""A mesh that changes while it serves: followers, generations, programs compiled ahead."""
