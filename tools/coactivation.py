"""What placing experts that the same tokens choose together saves between hosts, by the demo's routing of real text.

Usage:
    python tools/coactivation.py                                    # the table of docs/balancing.md
    python tools/coactivation.py --ranks 8 --hosts 2 --redundant 8
    python tools/coactivation.py --write experts.json               # for dsjax serve --init-expert-location experts.json

Text is code, prose and chat of the Python library's held-out files by turns. Every other piece of 256 tokens is what the policies see;
the pieces between are what is counted. A token's experts are those that the model chooses for it; which copies it goes to, and what
then crosses to other hosts, is counted by the dispatch's own rule.
"""

import argparse
import ast
import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np

from dsjax.checkpoint.hub import resolve
from dsjax.checkpoint.load import from_hf_tensors
from dsjax.checkpoint.safetensors import SafetensorsFile
from dsjax.config import load_config
from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.model.dense import forward
from dsjax.model.transformer import parameter_table
from sharding.balancing import balancedness, rebalance
from sharding.placement import Placement, assign_copies
from tools.coactivation_placement import chosen_together, crossings, place_together
from tools.demo.corpus import read_corpus
from tools.demo.dialogues import load_template, make_dialogues

PIECE = 256


def texts() -> dict[str, str]:
    """Code, prose and chat, of files that the demo was not trained on."""
    _, heldout = read_corpus()
    files = [file.content.decode() for file in heldout]
    docstrings = [found for text in files for found in _docstrings(text)]
    dialogues = make_dialogues(heldout, load_template(Path(resolve("demo"))))
    return {"code": "\n".join(files), "prose": "\n".join(docstrings), "chat": "".join(dialogues)}


def _docstrings(text: str) -> list[str]:
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
    except SyntaxError:  # the library has a few on purpose
        return []
    nodes = [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef))]
    return [found for found in map(ast.get_docstring, nodes) if found]


def routing(tokens: int) -> tuple[np.ndarray, int]:
    """The experts that each token chooses, ``[layers, tokens, K]``, pieces of the three kinds by turns; and how many experts."""
    folder, config = Path(resolve("demo")), load_config("demo")
    tokenizer = Tokenizer.from_directory(folder)
    kinds = []
    for text in texts().values():
        ids = tokenizer.encode(text[: 20 * tokens])
        kinds.append([ids[start : start + PIECE] for start in range(0, len(ids) - PIECE + 1, PIECE)])
    rounds = min(tokens // PIECE // len(kinds), *map(len, kinds)) // 2 * 2
    table = parameter_table(config, weights="f32")
    params = from_hf_tensors(config, SafetensorsFile(folder / "model.safetensors"), weights="f32")
    chosen = jax.jit(lambda params, tokens: forward(params, table, config, tokens).routing.ids)
    pieces = [kind[turn] for turn in range(rounds) for kind in kinds]
    found = [np.asarray(chosen(params, np.array([piece])))[:, 0] for piece in pieces]
    return np.concatenate(found, axis=1), config.n_routed_experts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=24576, help="of all three kinds, at most")
    parser.add_argument("--ranks", type=int, default=32, help="over which the experts lie")
    parser.add_argument("--hosts", type=int, default=4, help="of the ranks")
    parser.add_argument("--redundant", type=int, default=32, help="physical minus logical experts")
    parser.add_argument("--write", metavar="FILE", help="write the placement, for --init-expert-location")
    options = parser.parse_args()
    chosen, experts = routing(options.tokens)
    groups = load_config("demo").n_group
    turns = np.arange(chosen.shape[1]) // PIECE // 3 % 2
    seen, later = chosen[:, turns == 0], chosen[:, turns == 1]
    later = later[:, : later.shape[1] // options.ranks * options.ranks]
    sizes = {"n_physical": experts + options.redundant, "ranks": options.ranks}
    pairs = chosen_together(seen, experts)
    load = np.einsum("lee->le", pairs)
    hosts = {"hosts": options.hosts, "groups": groups}
    placements = {
        "by no load": rebalance(np.ones_like(load), **sizes, policy="global"),
        "global": rebalance(load, **sizes, policy="global"),
    }
    if groups % options.hosts == 0:
        placements["hierarchical"] = rebalance(load, **sizes, **hosts, policy="hierarchical")
    placements["chosen together"] = place_together(pairs, **sizes, **hosts)
    served = np.einsum("lee->le", chosen_together(later, experts))
    print(
        f"{seen.shape[1]:,} tokens seen, {later.shape[1]:,} counted; {options.ranks} ranks on {options.hosts} hosts\n"
    )
    print(
        "| placement | rows to other hosts a token | other hosts a token | pairs to other hosts a token | balancedness |"
    )
    print("|---|---|---|---|---|")
    for name, rows in placements.items():
        found = counted(rows, later, experts, options)
        even = balancedness(served, rows, options.ranks).of_layers
        print(f"| {name} | {found.rows:.2f} | {found.hosts:.2f} | {found.pairs:.2f} | {even:.3f} |")
    if options.write:
        record = {"version": 1, "model": "demo", "logical_load": load.tolist()}
        record["physical_to_logical"] = placements["chosen together"].tolist()
        Path(options.write).write_text(json.dumps(record), encoding="utf-8")


def counted(rows: np.ndarray, later: np.ndarray, experts: int, options: argparse.Namespace):
    """What crosses to other hosts; the tokens lie on the ranks in equal runs."""
    active = np.ones(later.shape[1], bool)
    slots = [
        assign_copies(Placement(tuple(row.tolist()), experts).tables, ids, active, ranks=options.ranks)
        for row, ids in zip(rows, later, strict=True)
    ]
    home = np.arange(later.shape[1]) // (later.shape[1] // options.ranks)
    return crossings(np.stack(slots), home, rows.shape[1] // options.ranks, options.ranks, options.hosts)


if __name__ == "__main__":
    main()
