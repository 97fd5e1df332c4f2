"""Public measurements of serving, and what the planner says of each of them; no part of the product."""
