"""V3's configuration, and a short way to ask the planner."""

import pytest

from dsjax.config import load_config
from dsjax.plan.cluster import load_cluster
from dsjax.plan.question import Question
from dsjax.plan.workload import Lengths, Objective, PlanOptions, Workload


@pytest.fixture(scope="session")
def v3():
    return load_config("deepseek-v3")


@pytest.fixture(scope="session")
def ask(v3):
    def make(cluster="h200-8", prompt=1000, output=500, objective=None, options=None, hosts=None, **load):
        found = load_cluster(cluster)
        return Question(
            v3,
            found.resized(hosts) if hosts else found,
            Workload(Lengths(prompt), Lengths(output), **load),
            objective or Objective(),
            options or PlanOptions(),
        )

    return make
