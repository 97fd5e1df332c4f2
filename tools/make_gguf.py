"""Make a GGUF file of the demo checkpoint, so that llama.cpp can be measured beside dsjax (`tools/bench_generate.py`).

    python -m venv llama
    llama/bin/pip download --no-deps --no-binary :all: llama-cpp-python        # its source brings llama.cpp's own converter
    tar xf llama_cpp_python-*.tar.gz
    llama/bin/pip install ./llama_cpp_python-*/ gguf safetensors sentencepiece torch transformers
    llama/bin/python tools/make_gguf.py llama_cpp_python-*/vendor/llama.cpp demo.gguf
    python tools/bench_generate.py --llama-python llama/bin/python llama.cpp:demo.gguf dsjax:dp=1

The converter knows a tokenizer by the hash of what it makes of a certain text, and refuses one that is not in its list, as the demo's
is not. Here it is given the name of DeepSeek-V3's, whose pattern is nearly the demo's. What is measured gets token ids,
so that nothing rests on it. Weights are written as float32 (`--outtype bf16`: as they are in the checkpoint).
"""

import argparse
import runpy
import sys
from pathlib import Path

DEMO = Path(__file__).parents[1] / "configs" / "models" / "demo"


def main() -> None:
    """Run llama.cpp's converter, which is told the name of the tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="llama.cpp's source, with convert_hf_to_gguf.py")
    parser.add_argument("output", type=Path, help="the GGUF file to write")
    parser.add_argument("--model", type=Path, default=DEMO, help="a checkpoint's folder; default: the demo's")
    parser.add_argument("--outtype", choices=("f32", "bf16"), default="f32")
    args = parser.parse_args()
    script = args.source / "convert_hf_to_gguf.py"
    if not script.is_file():
        parser.error(
            f"{args.source} has no convert_hf_to_gguf.py; give vendor/llama.cpp of llama-cpp-python's source package"
        )
    sys.path[:0] = [str(args.source), str(args.source / "gguf-py")]
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "deepseek-v3"
    sys.argv = [str(script), str(args.model), "--outfile", str(args.output), "--outtype", args.outtype]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
