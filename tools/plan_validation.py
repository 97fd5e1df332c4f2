"""Write docs/plan-validation.md and docs/measurements/plan-validation.csv: every public measured point beside the prediction.

python tools/plan_validation.py
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools.blind_rounds import table as blind_table
from tools.plan_data.fit_incidents import score
from tools.plan_data.fit_incidents import table as incidents
from tools.plan_data.point_sets import csv_text, deciding_table, median_of_wide_ep, score_table
from tools.plan_data.validation_score import leave_one_out

PAGE, POINTS = ROOT / "docs" / "plan-validation.md", ROOT / "docs" / "measurements" / "plan-validation.csv"
_PAGE = """# The planner beside public measurements

This page compares predictions of `dsjax plan` with published figures, so that you know how far to trust a plan. What was predicted blind
comes first; what the model has seen comes second. `python tools/plan_validation.py` writes it and
[plan-validation.csv](measurements/plan-validation.csv), which has every point with its source, its prediction and what had to be assumed.
Tests hold both.

Step times come from tables of single operations; [plan.md](plan.md#a-step) lists them and the assumptions. **No factor is fitted to a
measured point.** *Predicted* is the middle estimate; *interval* combines the ranges of the assumptions as independent ones, and *inside*
says that it has the measured value. EP is the number of devices over which whole experts are spread, DEP8 is 8 devices with an attention
replica and EP 8, TP is tensor parallelism.

## Predicted blind

Every prediction in this table was committed before its measurement was read, with the interval that the model gave then. *Own interval*
combines the ranges of the assumptions; *calibrated* is what `dsjax plan` shows as holding 9 of 10, made here without the run that it is
asked about (conformal prediction: [calibration.py](../dsjax/plan/calibration.py)). *Width* is the median of high ÷ low.

{blind}

- **closed loops**: 76 runs of InferenceX on one host, played as the benchmark plays them (all users at once, ten requests of each, lengths
  from 0.8 to 1 times the given ones). Predictions were committed on their own (now part of 1e442a8f); of 40 of them nothing had been
  read before, of the other 36 their rate. The runs, predictions and raw columns are in `tools/plan_data/closed_loops.csv`.
- **separated**: 68 runs of InferenceX with prefill and decode apart, all that were left of that file and whose settings agree with
  their numbers of devices: `tools/plan_data/apart_loops.csv`. Predictions were committed on their own (now part of
  1e442a8f). The time of a token is right within 11 to 13 %, and rates are too high, most where a service has few users (Z26, Z28, Z48,
  Z50, Z57, Z58): there the median first token came
  as late as a whole answer takes, so that half of the users waited for the other half. The settings that would say so are not in the file.
  With TensorRT-LLM on H200 (Z8 to Z10, Z14 to Z17) a token takes a quarter longer than predicted.
- **drafts**: 74 runs of InferenceX on one host with drafts by the MTP module, which no round had before: `tools/plan_data/drafts.csv`,
  from that file and `benchmarks-history.json` beside it. Predictions were committed (f794b6fc), with the planner's own acceptance of 0.85.
  With `tp` (65 runs) the time of a token is predicted 27 % too short and rates 62 % too high, with attention DP (9) 42 % too long and 19 %
  too low. The likely cause with `tp` is that fewer drafts of random prompts are accepted than was assumed; acceptance is not published
  for them, and nothing was fitted to it: give your own as `--mtp-acceptance`. Six rates of SGLang on B300 are more than twice too high,
  for no known cause. A plan with `--mtp` takes its calibrated intervals from this group alone, and no other plan does.
- **TTFT as reported** is the raw column, with the wave of all users at the start and whatever the engine compiled then: no measurement
  is corrected. Five runs of SGLang's first images for B200 (Y17, Y19, Y22, Y23, Y24) met 70 s of it; SGLang on Blackwell also answers
  later the more users there are, for no cause that the tables have; one user of B300 waits for less than was assumed of HTTP, tokenising
  and a cold start. These three are what makes the calibrated TTFT wide.
- **aiconfigurator's TTFT** cannot be set beside raw columns: what its repository has of DeepSeek-V3 (`data.csv`, H200, `tp=8`, TensorRT-LLM
  1.2.0rc2, 2,048 in, 128 out) are its own estimates, and of lengths that InferenceX does not run. Beside them, for 1, 8 and 64 users: TTFT
  196, 340 and 806 ms there, 110 (96 – 142), 129 (115 – 160) and 227 (211 – 258) here; a token 16.2, 18.4 and 62.7 ms there, 8.7, 16.7 and
  53.9 here (`dsjax plan --cluster h200-8 --engine published --mode aggregated --mesh tp=8 --redundant-experts 0 --input 2048 --output 128
  --concurrency 64 --kv-cache-dtype fp8 --prefill-tokens 8192`).
  Theirs takes up to four prompts in a step (its column `num_ctx_reqs`).
- **another device or engine** has nine rates, eight of them of vLLM of March 2025. Such a group borrows from all distances, and its
  intervals reach at least as far as its own predictions missed by. dsjax itself is of this group: no accelerator has run it.
- Older rounds were predicted by older models. They count as they are, so that intervals are rather too wide than too narrow.

`python tools/blind_rounds.py` writes [configs/blind_predictions.csv](../configs/blind_predictions.csv), which the planner calibrates by,
and prints the table.

## Seen: how far off it is today

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
- **Prefill on GB200 (D, E)** is 8 and 15 % too slow: exchanges are carried over from an H200 by the rate of the link, and come one after
  the other.
- **TP16 between hosts (H, I)** takes a third more than predicted: no table has the small kernels of a single request between hosts.
- **H20 (5)** is 7 % too slow; its times are carried over from the H200. Decode (J) was predicted blind with the kernels that SGLang's
  releases have, 38 % too low; it is now priced with the FP8 attention that its source runs (70 % faster than bf16, published for the
  kernel alone), and has been seen. What remains is the source's overlap within a single batch, of which no kernel times are published.
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

## Will it fit?

[`dsjax plan --fit`](plan.md#will-it-fit) beside 28 public launches of DeepSeek models. The rule was committed before the launches were
looked for (91efb526), and its verdicts (*said*) before any outcome was entered (6d98e61a); whoever wrote down the options could see in
most threads how it ended, so that only the rule is blind. Of {counted} launches whose outcome is known **{right} verdicts are right**:
{fitted_right} of {fitted} that fitted, {failed_right} of {failed} that did not. It has never called a launch too large that fitted. It
misses launches that it gave 0.1 to 17 GB to spare: memory that one version took and another did not (M5 and M6 have the same options),
compilation at the start (M17), workspaces with attention DP (M7, M12), an uneven pipeline (M9). Launches that obviously cannot fit are
seldom reported, so that such threads are the hard cases. M3 was first entered as too large and then left out. Since then the draft model
of SGLang and the scores of V3.2's indexer are counted, after issues that measure them; *today* is what is then left in the tightest
place, and has been seen.

{incidents}

`python -c "from tools.plan_data.fit_incidents import score, table; print(score(), table())"` prints both; the launches with their options
are in `tools/plan_data/fit_incidents.csv`.

## With tables left out

The counted points of the first set with one table of operations left out, whose operations are then carried over from the other tables:

{without}
"""


def page() -> str:
    """The page's text."""
    fits = score()
    return _PAGE.format(
        counted=fits["committed, all"][1],
        right=fits["committed, all"][0],
        fitted=fits["committed, yes"][1],
        fitted_right=fits["committed, yes"][0],
        failed=fits["committed, no"][1],
        failed_right=fits["committed, no"][0],
        incidents=incidents(),
        scores=score_table(),
        blind=blind_table(),
        deciding=deciding_table(),
        without=leave_one_out(),
        median=median_of_wide_ep(),
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
    POINTS.write_text(csv_text(), encoding="utf-8")
