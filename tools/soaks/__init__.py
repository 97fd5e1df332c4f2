"""The parts of `tools/soak.py`: sessions against a server and the bound they are judged by; a decode engine whose prefill process dies."""
