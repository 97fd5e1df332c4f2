"""dsjax as a backend of NVIDIA Dynamo: `python -m dsjax.dynamo --model … --mesh …` is one worker behind its frontend and router.

`translation.py` and `kv_events.py` need no Dynamo; `engine.py` implements its `LLMEngine`. docs/dynamo.md says how they fit together.
"""
