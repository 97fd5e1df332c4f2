"""Which of this project's files run while a warm server answers one request, from HTTP to the device and back.

    python tools/touched_files.py
    python tools/touched_files.py --functions     # and what ran in each

The demo model on one device, a streamed completion of eight tokens, the fourth of its kind. A file counts if any function in it was
called, in whichever thread.
"""

import argparse
import os
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
BODY = {"model": "demo", "prompt": "def main(", "max_tokens": 8, "stream": True, "temperature": 0}


class Watch:
    """Functions that are called in threads which began after `install`, by file, while `on`."""

    def __init__(self):
        self.on = False
        self.found: dict[str, set[str]] = {}

    def install(self) -> None:
        """Watch every thread from now on."""
        threading.setprofile(self._called)

    def _called(self, frame, event, _) -> None:
        code = frame.f_code
        if not self.on or event != "call" or code.co_name == "<module>":
            return
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ("dsjax", "sharding"):
            self.found.setdefault(str(path.relative_to(ROOT)), set()).add(code.co_qualname)


def main() -> None:
    """Serve in this process, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", action="store_true", help="print what was called in each file")
    args = parser.parse_args()
    watch = Watch()
    watch.install()

    import httpx
    from rich.console import Console

    from dsjax import LLM
    from dsjax.serve.command import serve_model
    from dsjax.serve.server import bind

    model = LLM("demo", max_model_len=256, max_num_seqs=4)
    model.parts.warm_up(lambda done, total, label: None)
    listener = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    console = Console(quiet=True)
    threading.Thread(target=serve_model, args=(model, console, listener, ("demo",), 1.0, "error"), daemon=True).start()
    while True:
        try:
            if httpx.get(url + "/ready").status_code == 200:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    for attempt in range(4):
        watch.on = attempt == 3
        assert httpx.post(url + "/v1/completions", json=BODY, timeout=60).text.rstrip().endswith("[DONE]")
    watch.on = False
    for path in sorted(watch.found):
        print(path)
        if args.functions:
            print("    " + ", ".join(sorted(watch.found[path])))
    print(f"{len(watch.found)} files", flush=True)
    os._exit(0)  # the server's threads still run, which an interpreter that is taken apart below them can crash on


if __name__ == "__main__":
    main()
