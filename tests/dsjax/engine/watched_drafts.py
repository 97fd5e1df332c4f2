"""What comes of an engine's drafts, while a test watches."""

from collections import Counter

import pytest

from dsjax import LLM
from dsjax.engine.stats import DraftCounts


class Watch:
    """What came of an engine's drafts: of each completion the drafts verified and accepted, and of each step its counts."""

    def __init__(self, llm: LLM, patch: pytest.MonkeyPatch):
        self.verified, self.accepted, self.tokens = Counter(), Counter(), Counter()
        self.steps: list[DraftCounts] = []
        self.widths: list[int] = []
        core = llm.engine.core
        step, schedule = core.step, core.scheduler.schedule

        def watched(*arguments, **keywords):
            updates = step(*arguments, **keywords)
            for request, result, _ in updates:
                if result is not None:
                    self.verified[request.request_id] += result.num_drafts
                    self.accepted[request.request_id] += max(0, len(result.token_ids) - 1)
                    self.tokens[request.request_id] += len(result.token_ids)
            if updates and core.stats().drafts is not None:
                self.steps.append(core.stats().drafts)
            return updates

        def scheduled(*arguments):
            plan = schedule(*arguments)
            self.widths += [] if plan.is_empty else [plan.num_drafts]
            return plan

        patch.setattr(core, "step", watched)
        patch.setattr(core.scheduler, "schedule", scheduled)

    def assert_both(self):
        """Drafts were accepted, and refused."""
        verified, accepted = sum(self.verified.values()), sum(self.accepted.values())
        assert 0 < accepted < verified, (accepted, verified)
