"""V3's configuration, and short ways to ask the planner and the model of a step."""

import pytest
from step_models import step_model

from dsjax.config import load_config
from dsjax.plan.cluster import load_cluster
from dsjax.plan.layout import parse_layout
from dsjax.plan.question import Question
from dsjax.plan.workload import Lengths, Objective, PlanOptions, Workload


@pytest.fixture(scope="session")
def v3():
    return load_config("deepseek-v3")


@pytest.fixture(scope="session")
def ask(v3):
    def make(cluster="h200-8", prompt=1000, output=500, objective=None, options=None, hosts=None, config=v3, **load):
        found = load_cluster(cluster)
        found = found.resized(hosts) if hosts else found
        work = Workload(Lengths(prompt), Lengths(output), **load)
        return Question(config, found, work, objective or Objective(), options or PlanOptions())

    return make


@pytest.fixture(scope="session")
def instance(ask):
    def make(mesh, cluster="h200-8", redundant=0, **asked):
        question = ask(cluster, **asked)
        return question.instance(parse_layout(mesh, redundant, question.config), {})

    return make


@pytest.fixture(scope="session")
def model(v3):
    def make(mesh="dp=32", cluster="h100-32", redundant=None, **kwargs):
        layout = parse_layout(mesh, redundant, v3)
        return step_model(v3, load_cluster(cluster), layout, **kwargs)

    return make
