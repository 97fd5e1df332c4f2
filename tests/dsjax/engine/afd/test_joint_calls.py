"""Calls of several attention processes for one layer: computed together, and nobody is waited for who does not come."""

import numpy as np
import pytest

from dsjax.engine.afd.joint_calls import JointCalls, Part
from dsjax.engine.afd.messages import Call

CASES = {
    "calls of all processes are one program": "a0 b0 c0=abc a1 b1 c1=abc a2 b2 c2=abc",
    "a call waits for one that is late and not for one whose connection ends": "a0 b0 -c=ab",
    "what has come over a link that has ended is not computed": "c0 a0 -c b0=ab",
    "where another generation has begun a call waits for nobody": "a0 end=a",
    "what is asked for again is computed at once and the others wait no more": "c4!=c a5 b5 c5!=ab,c",
    "a process that is past a call is not waited for": "b7 c7 a6=a a7=abc",
    "a call on a link that has ended gives way to the one that is made again": "a0 +n n0!=n -a n1 b0 c0=bc",
    "what comes late over an old link takes the place of nothing": "+n n0!=n n1 a0 b1 c1=bcn",
    "parts of other sizes are computed by themselves": "a0 b0 c0*=ab,c",
}
"""Events. "a0": call 0 comes over link a ("!": it is made again, "*": it has more tokens); "+n": process 0 gets another link, n;
"-a": link a ends; "end": another generation begins. After "=": the programs that are computed then, each as the letters of its links."""


@pytest.mark.parametrize("events", CASES.values(), ids=CASES)
def test_calls_are_computed_as_soon_as_nobody_else_is_waited_for(events):
    joint = JointCalls(3)
    for process, name in enumerate("abc"):
        joint.enter(name, process)
    for event in events.split():
        what, _, expected = event.partition("=")
        if what == "end":
            joint.end()
        elif what.startswith("+"):
            joint.enter(what[1], 0)
        elif what.startswith("-"):
            joint.leave(what[1])
        else:
            call = Call("moe_layers", 0, 16 if "*" in what else 8, 8, b"", int(what[1]), "!" in what)
            joint.add(Part(what[0], call, np.zeros(0), np.zeros(0, int)))
        computed = sorted("".join(sorted(part.name for part in parts)) for parts in joint.take())
        assert computed == (expected.split(",") if expected else []), event
