"""`dsjax dynamo`: one worker of NVIDIA Dynamo."""

from dsjax.dynamo.arguments import Prepared, make_app


def _serve(prepared: Prepared) -> None:
    import uvloop
    from dynamo.common.backend.worker import Worker

    from dsjax.dynamo.engine import make_engine

    engine = make_engine(prepared.options)

    async def run() -> None:
        await Worker(engine, prepared.worker).run()

    engine.handle_signals()
    try:
        uvloop.run(run())
    except Exception:
        if engine.mistake is not None:
            raise engine.mistake from None
        raise


app = make_app(_serve)
