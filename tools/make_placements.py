"""Runs the balancer on the default skew for every EP group that a plan of DeepSeek-V3 asks about, and writes `configs/placements.csv`.

A search over 2,048 devices asks for 450 placements, a minute's work of the balancer. They hang on nothing that a user gives, so
that they are run once here. After a change to the balancer (`sharding/balancing.py`) or to the default skew run

    python tools/make_placements.py            # 41 s of processor time
    python tools/make_placements.py --check    # the same, and compares instead of writing

A test runs some of the rows again.
"""

import argparse
import csv
import sys
from pathlib import Path

from dsjax.config import load_config
from dsjax.plan.layout import layouts
from dsjax.plan.skew import DEFAULT_SKEW, DRIFT, PLACEMENTS, Imbalance, Slots, busiest, drawn

_FILE = Path(__file__).parents[1] / "configs" / PLACEMENTS
_EXPERTS = 256
_CLUSTERS = ((2048, 8), (512, 4), (64, 1))
"""(devices, devices of a host)."""


def asked() -> list[tuple[Slots, bool]]:
    """(slots, placed by load) of all layouts, each once."""
    config, found = load_config("deepseek-v3"), set()
    for devices, each in _CLUSTERS:
        for layout in layouts(config, devices, each, redundant=None, block=128, copies=devices <= 64):
            ranks = layout.mesh.ep_size
            if ranks == 1:
                continue
            whole = ranks == layout.mesh.num_devices and ranks % each == 0
            slots = Slots(ranks, _EXPERTS + layout.redundant, config.n_group, ranks // each if whole else 1)
            found.add((slots._replace(groups=1, hosts=1), False))
            if layout.redundant:
                found.add((slots.normalized, True))
    return sorted(found)


def placed(slots: Slots, balanced: bool) -> Imbalance:
    """What the balancer makes of the default skew."""
    variations = (DEFAULT_SKEW.variation, DEFAULT_SKEW.low, DEFAULT_SKEW.high)
    drifts = DRIFT if balanced else (0.0, 0.0, 0.0)
    loads = tuple(drawn(variation, _EXPERTS, drift) for variation, drift in zip(variations, drifts, strict=True))
    return Imbalance(*(mean for mean, _, _ in busiest(loads, slots, balanced)))


def main(check: bool) -> None:
    """Write the file, or compare it with what the balancer does now."""
    rows = [
        (*slots, int(balanced), *(f"{number!r}" for number in placed(slots, balanced))) for slots, balanced in asked()
    ]
    if check:
        now = [[str(cell) for cell in row] for row in rows]
        before = list(csv.reader(_FILE.read_text(encoding="utf-8").splitlines()))[1:]
        differ = sum(row not in before for row in now)
        sys.exit(f"{_FILE.name}: {differ} of {len(now)} rows differ; run it without --check" if now != before else 0)
    with _FILE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*Slots._fields, "balanced", *Imbalance._fields))
        writer.writerows(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the file instead of writing it")
    main(parser.parse_args().check)
