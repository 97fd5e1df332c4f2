"""Make the goldens again: logits of transformers' DeepSeek classes for every case of `tests/goldens/configurations.py`.

    python tools/make_goldens.py            # writes tests/goldens/cases.json and tests/goldens/logits.npz
    python tools/make_goldens.py --check    # writes nothing; fails where the committed goldens differ

Needs torch and transformers, which dsjax itself never does. The files hold configurations, seeds, token ids and logits;
weights follow from the seed (`tests/goldens/random_weights.py`).
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from goldens.configurations import CASES, MTP_CASE, case_configuration
from goldens.random_weights import digest_of_shapes

GOLDENS = ROOT / "tests" / "goldens"
ROWS, LENGTH = 2, 20


def make_case(name: str, index: int) -> tuple[dict, dict[str, np.ndarray]]:
    """One case: its entry in `cases.json`; its token ids, its logits, and in one case those of its MTP module."""
    from goldens.reference_model import reference_logits, reference_mtp_logits, saved_shapes, settled_weights

    raw, bias_center = case_configuration(name)
    rng = np.random.Generator(np.random.PCG64(index))
    tokens = rng.integers(0, raw["vocab_size"], (ROWS, LENGTH))
    weights, model = settled_weights(raw, bias_center, tokens, first_seed=1000 * index)
    arrays = {"tokens": tokens.astype(np.int32), "logits": reference_logits(model, tokens)}
    if name == MTP_CASE:
        arrays["mtp"] = reference_mtp_logits(model, weights, tokens)
    tensors = digest_of_shapes(saved_shapes(model))
    entry = {"name": name, "seed": weights.seed, "bias_center": bias_center, "tensors": tensors, "config": raw}
    return entry, arrays


def check(entries: list[dict], arrays: dict[str, np.ndarray]) -> None:
    """Exit with a message unless the committed goldens are these."""
    committed = json.loads((GOLDENS / "cases.json").read_text())["cases"]
    if committed != entries:
        raise SystemExit("tests/goldens/cases.json differs from what the tool makes")
    with np.load(GOLDENS / "logits.npz") as found:
        worst = max(float(np.abs(found[key] - value).max()) for key, value in arrays.items())
    # Sums of float32 in another order: another machine, another version of torch.
    if worst > 1e-4:
        raise SystemExit(f"tests/goldens/logits.npz differs by up to {worst:.2e} from what the tool makes")
    print(f"{len(entries)} goldens agree with the committed ones, largest difference {worst:.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the committed goldens, write nothing")
    arguments = parser.parse_args()
    entries, arrays = [], {}
    for index, name in enumerate(CASES):
        entry, own = make_case(name, index)
        entries.append(entry)
        arrays |= {f"{name}/{key}": value for key, value in own.items()}
        print(f"{name}: seed {entry['seed']}, logits up to {np.abs(own['logits']).max():.2f}")
    if arguments.check:
        check(entries, arrays)
        return
    import torch
    import transformers

    made_with = {"torch": torch.__version__, "transformers": transformers.__version__}
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    (GOLDENS / "cases.json").write_text(f'{{"made_with": {json.dumps(made_with)}, "cases": [\n{lines}\n]}}\n')
    np.savez_compressed(GOLDENS / "logits.npz", **arrays)


if __name__ == "__main__":
    main()
