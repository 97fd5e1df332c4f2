"""Write docs/plan-validation.md and docs/measurements/plan-validation.csv: every public measured point beside the prediction.

python tools/plan_validation.py
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.plan_data.point_sets import csv_text, deciding_table, median_of_wide_ep, score_table
from tools.plan_data.validation_score import leave_one_out

PAGE, POINTS = ROOT / "docs" / "plan-validation.md", ROOT / "docs" / "measurements" / "plan-validation.csv"
_PAGE = """# The planner beside public measurements

This page compares predictions of `dsjax plan` with 123 published figures, so that you know how far to trust a plan. `python
tools/plan_validation.py` writes it and [plan-validation.csv](measurements/plan-validation.csv), which has every point with its source,
its prediction and what had to be assumed. Tests hold both.

Step times come from tables of single operations; [plan.md](plan.md#a-step) lists them and the assumptions. **No factor is fitted to a
measured point.** *Predicted* is the middle estimate; *interval* combines the ranges of the assumptions as independent ones, and *inside*
says that it has the measured value. EP is the number of devices over which whole experts are spread, DEP8 is 8 devices with an attention
replica and EP 8, TP is tensor parallelism.

## How far off it is

{scores}

- **known**: points that were known while the model was written. Each run is counted once, by its rate; TTFT is scored apart.
- **looked for**: points found afterwards. Predictions were committed (1257918, bdea21d) before the values were read, and then had an
  error of 26.7 % with 4 of 10 inside; the model of today has seen the values.
- **one machine**: one H200 host and one layout with other users, lengths and software, simulated from a start of all users at once.
  Predictions were committed (5262201); the best online rate in K's source (4,176 tokens a second) and the totals of two runs beside T
  were known.
- **one host of 2026**: InferenceX's closed loops (vngcloud/InferenceX-app, commit 7fe6d62,
  `packages/app/cypress/fixtures/api/benchmarks.json`) on H200 and B200, chosen by a rule, in output tokens a second a device. Predictions
  were committed (54613e4); point 8 was known.
- **wide EP**: runs of DeepSeek-R1 in that file with prefill and decode apart and 16 or more decoding devices, in output tokens a second a
  decoding device. Predictions were committed (5389fc7), with 288 slots of experts that follow the load, prefill steps of 16,384 tokens a
  replica, no overlap of two half batches.

After the committed predictions for one host the tables' sources were read again (block-FP8 products on Blackwell, sums over `tp`, small
kernels, SGLang's versions); no number was taken from the runs.

## The points that decide

{deciding}

A plan holds for engines that have the tables' kernels. For others, bring your own times: `--operators`, `--measured` or `--compiled`.
What is wrong, and why:

- **vLLM of March 2025 (K to R)** is half as fast and less. It seems to have run about 64 requests at once.
- **Wide EP that waits for prefill (W16 to W18, W33)** is predicted too fast by half and more: something else than the devices held
  prefill back. Without these four the error is 9 %, and 26 of 29 lie inside; the median error of all is {median:.1%}. TTFT is higher
  throughout (3 to 12 s where tenths were predicted), because all users begin together.
- **Prefill on GB200 (D, E)** is a quarter too slow: exchanges are carried over from an H200, one after the other. With two overlapping
  half batches, which the source does not mention, it would be 13 and 16 % too slow.
- **TP16 between hosts (H, I)** takes a third more than predicted: no table has the small kernels of a single request between hosts.
- **H20 (5)** is 7 % too slow; its times are carried over from the H200. In decode (J) the source multiplies an FP8 cache as FP8, which
  the model grants to Blackwell only.
- **Decode with EP72 (4)** is 13 % too slow: how far the experts' load has drifted since the balancer saw it is assumed. The balancer's
  gain is 10 % too low in prefill and 19 % in decode, and is not counted, because the data's skew is not known.
- **TP8 (8)** is 3 % too slow with few users and 10 to 13 % too fast with 32 and 64: experts were timed with random choices, and one
  benchmark's requests choose more alike. A recording (`--expert-skew FILE.json`) replaces the assumption.
- **TTFT (8)** is counted without the first request of each user, which met a cold engine: ten times the mean, less the P99, ÷ 9. What is
  missing (17 to 19 %) is about the range assumed for HTTP and tokenising.
- **H200 with 4 and 8 users of SGLang 0.5.12 (X26, X27, X33, X34)** is an eighth to a sixth too slow. Rows of 0.5.14 are faster than the
  memory allows from 32 tokens on, and are not taken.
- **X3 and X21** (B200, 1K/8K, 8 and 4 users) are a quarter too fast, for no known cause. **X35 and X36** (TensorRT-LLM, `tp=8`, H200) are
  a sixth too fast: they are priced with SGLang's kernels.
- **Engines that collect prompts (G, X14, X18)** hold them back until all replicas have some. That is the high end of the interval: 793
  and 552 tokens a second for X14 and X18, where 727 and 533 were measured.
- **A and B** are one deployment three months apart. **Point 1** is a day's average of a service with changing load, and **7**'s decode
  batch is not published: neither is counted.

## With tables left out

The counted points of the first set with one table of operations left out, whose operations are then carried over from the other tables:

{without}
"""


def page() -> str:
    """The page's text."""
    return _PAGE.format(
        scores=score_table(), deciding=deciding_table(), without=leave_one_out(), median=median_of_wide_ep()
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
    POINTS.write_text(csv_text(), encoding="utf-8")
