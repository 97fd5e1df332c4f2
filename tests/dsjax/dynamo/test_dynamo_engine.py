"""The workers as Dynamo calls them, without its runtime, over fake devices: what is cancelled, and what comes while a worker ends."""

import asyncio
import importlib.metadata

import pytest

from dsjax.engine.setup.args import EngineArgs

pytestmark = [
    pytest.mark.dynamo,
    pytest.mark.skipif(
        not any(importlib.metadata.distributions(name="ai-dynamo-runtime")), reason="NVIDIA Dynamo is not installed"
    ),
]

PROMPT = {"token_ids": [1, 2, 3]}


def options(mode=None):
    from dsjax.dynamo.worker import Options

    args = EngineArgs() if mode is None else EngineArgs(disaggregation_mode=mode)
    return Options(args, ("tiny",), "tiny", step_timeout=0.0, shutdown_timeout=0.0)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_a_request_that_comes_while_a_worker_ends_goes_to_another_one(kind, monkeypatch):
    from dynamo._core import Context
    from dynamo.llm.exceptions import EngineShutdown

    from dsjax.dynamo.engine import DsjaxEngine
    from dsjax.dynamo.prefill import DsjaxPrefillEngine

    async def main():
        worker = DsjaxEngine(options(kind)) if kind == "decode" else DsjaxPrefillEngine(options(kind))
        monkeypatch.setattr(worker, "_end_process", lambda: pytest.fail("a worker that ends has not failed"))
        await worker.cleanup()
        with pytest.raises(EngineShutdown, match="this worker ends"):  # the frontend goes on with another
            await anext(worker.generate(PROMPT, Context("late")))

    run(main())
