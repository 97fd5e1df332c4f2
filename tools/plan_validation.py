"""Write docs/plan-validation.md and docs/measurements/plan-validation.csv: every public measured point beside the prediction.

python tools/plan_validation.py
"""

import argparse
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from dsjax.plan.calibration import (
    DRAFTS,
    HOST,
    LATEST,
    LONGER,
    NEWEST,
    RATE,
    SENT,
    SOFTENED,
    TPOT,
    TTFT,
    TTFT_MEDIAN,
    TTFT_P99,
    Blind,
    calibrate,
)
from dsjax.plan.drafting import FIRST
from tools.blind_rounds import aims_table, blind, earlier, interval_score, mean_error, methods_table
from tools.blind_rounds import table as blind_table
from tools.plan_data import all_left
from tools.plan_data.drafts import RANDOM_ACCEPTANCE, points_of_today
from tools.plan_data.drafts_again import distance as again_distance
from tools.plan_data.drafts_again import rows as again_rows
from tools.plan_data.drafts_again import setting_of as again_setting
from tools.plan_data.drafts_again import today_rows as again_today
from tools.plan_data.fit_incidents import SECOND, dry_run_score, held, rows, score
from tools.plan_data.fit_incidents import table as incidents
from tools.plan_data.history import distance, drafts_apart_today, today_rows
from tools.plan_data.last_runs import distance as last_distance
from tools.plan_data.last_runs import rows as last_rows
from tools.plan_data.last_runs import today_rows as last_today
from tools.plan_data.other_dates import mean_value_today, setting_of
from tools.plan_data.other_dates import rows as other_rows
from tools.plan_data.other_dates import today_rows as other_today
from tools.plan_data.point_sets import csv_text, deciding_table, median_of_wide_ep, score_table
from tools.plan_data.validation import points
from tools.plan_data.validation_score import leave_one_out

PAGE, POINTS = ROOT / "docs" / "plan-validation.md", ROOT / "docs" / "measurements" / "plan-validation.csv"
_PAGE = """# The planner beside public measurements

This page compares predictions of `dsjax plan` with published figures, so that you know how far to trust a plan. What was aimed at and
what was reached stand first; then what was predicted blind; last what the model has seen. `python tools/plan_validation.py` writes the
page and [plan-validation.csv](measurements/plan-validation.csv), which has every point with its source, its prediction and what had to be
assumed. Tests hold both.

{aims}

Two rounds show what the model of today is worth; the aims and how intervals would be made were committed with their predictions, but for
one group. *All left*, the newest, has what no round had of DeepSeek-R1 on NVIDIA's devices: no drafts, and {left_known} of its
{left_runs} runs in settings whose measurement at another date was known. On one host it is {left_host} off in rates and TPOT, with
prefill and decode apart {left_apart}. Its median TTFT is {left_median} off. Its runs on one host are of before 2026-01-21, when nothing
warmed the engines up: P99 of the TTFT, {left_p99} off, is what was compiled at the first requests (SGLang on B200 waited 70 s), and is
that group of its own, settled after it had been read. The table also has the round without it.

*Drafts again* is harder: {again_drafting} of its {again_count} runs have drafts, and {again_apart} of these have prefill and decode
apart, {again_sglang} of them with SGLang, of which no run of this kind had been predicted before. On one host it is {again_host_rates}
off in rates and TPOT, and {again_ttft} in the TTFT. What fails is SGLang with prefill and decode apart: rates are {again_sglang_rates}
off, most on B200 in FP8 where the prefill side bounds them, and there up to 2.6 times too high ([what was missing](#what-was-missing));
a token's time is {again_sglang_tpot} off. {sent} of its runs were most likely sent prompts five times as long as the benchmark says
([why](#prompts-that-were-longer-than-said)) and are predicted with such prompts.

Calibrated intervals are made with each setting left out in turn; the table therefore also has what intervals by older rounds alone
hold. The source has medians and P99 of the TTFT and no means.
`python tools/blind_rounds.py` prints the table.

Step times come from tables of single operations; [plan.md](plan.md#a-step) lists them and the assumptions. **No factor is fitted to a
measured point.** *Predicted* is the middle estimate; *interval* combines the ranges of the assumptions as independent ones, and *inside*
says that it has the measured value. EP is the number of devices over which whole experts are spread, DEP8 is 8 devices with an attention
replica and EP 8, TP is tensor parallelism.

## Predicted blind

Every prediction in this table stands as it was committed, with the interval that the model gave then. That it was committed before its
measurement was entered can be checked in this repository for {shown} of {figures} figures ([order of commits](#order-of-commits)). For the
{unshown} of *closed loops*, *separated*, *drafts*, *last runs*, *drafts again* and *all left* it cannot, because their predictions and
measurements came into it in one commit, and a reader has only our word. *Own interval* combines the ranges of the assumptions;
*calibrated* is what `dsjax plan` shows as holding 9 of 10, made here without the setting that it is asked about (conformal prediction:
[calibration.py](../dsjax/plan/calibration.py)): of rates and TPOT below the winner, of TTFT as reported with
`dsjax plan simulate --request-rate inf` alone ([why](#what-the-intervals-of-a-plan-are-of)).
*Width* is the median of high ÷ low. A group that has at least 19 figures of *{latest}* is calibrated by this round alone, one that has as
many of {newest_rounds} together by these, any other by all. No group rests on *all left* alone, as nearly all of its settings had been
measured at another date. *Older* rounds were predicted by older models, and are held here against older rounds alone. Runs with drafts,
runs whose prompts were longer than said, and P99 of the TTFT in *all left*, calibrate nothing but themselves.

{blind}

- **all left** (the newest round): {left_runs} runs in `tools/plan_data/all_left.csv`, each setting at its two newest dates that no round
  had: 121 on one host (J), {left_apart_runs} with prefill and decode apart (K), none with drafts. Of ten runs the setting had never been
  measured before. They are the first that were predicted with TensorRT-LLM's own tables of that time
  ([what was missing](#what-was-missing)). Predictions were committed before ([how that can be checked](#order-of-commits)).
  Rates of SGLang with FP4 on B200 are 48% too high and a token's time 9% too low: of 40 to 160 requests the first of each user waits
  70 s, and a rate is little else than this wait (J4, J5, J10 to J13). Of TensorRT-LLM on GB200 with FP4 and thousands of users a token
  takes a quarter longer than predicted (K9, K14).
- **drafts again**: {again_count} runs in `tools/plan_data/drafts_again.csv`. 20 are runs on one host that only the
  older copy of the benchmark's history has (E; vngcloud/InferenceX-app, commit cac6246); of 40 on one host with drafts, whose rates had
  been seen, the TTFT alone was predicted (F); and 68 have prefill and decode apart and drafts (G): all of SGLang and those of TensorRT-LLM
  at dates that no round had, with what their recipes say of drafts, of requests at once and of steps. 25 of these have 256 to 16,130
  users. Predictions were committed before ([how that can be checked](#order-of-commits)). TensorRT-LLM apart is
  {again_trt_rates} off in rates. SGLang on B200 in FP8 with many users is bound by prefill: its prefill side computes 2,450 to 3,400
  prompt tokens a second a device (G14, G15, G17 to G20), where 5,600 to 8,900 were predicted; one of H200, whose rates are nearer, 2,760 to
  3,360 (G47, G51). On H100 over two hosts with `dp=16` (G31, G32, G36, G39, G41, G42) a token takes a quarter to a half longer than
  predicted: the recipes have no DeepEP, and gather every rank's tokens ([below](#what-was-missing)). F32 waited 320 s for its
  median first token (216 predicted).
- **last runs**: {last_runs} runs of InferenceX in {last_settings} settings on one host, {drafting} with drafts
  and prompts as said, in `tools/plan_data/last_runs.csv` (P): all since 2026-01-14 that no round had, so that no choice was left.
  Two thirds have 64 users and more. Predictions were committed before ([how that can be checked](#order-of-commits)).
  Without drafts all {plain_count} rates and times a token lie inside their own intervals. P99 of the TTFT is too low ({p99_now}
  off): the first wave of SGLang on H200 takes 0.6 to 1.4 s longer than it is played (P28, P29). Of the {last_sent} runs that are played
  with the prompts that were most likely sent, P36d has a median TTFT of 189 s (195 predicted) and P22a of 45 s (38 predicted); P18a
  and P9c look as if they had been sent shorter ones. With drafts a token of SGLang with 512 users takes 40 to 80 % longer than
  predicted (P5, P9, P25, P27), and longer with 0.5.6 and 0.5.9 than with 0.5.12. What was found since is [below](#what-was-missing).
- **other dates**: {other_runs} runs of InferenceX in {other_settings} settings on one host, {other_drafts} with
  drafts, in `tools/plan_data/other_dates.csv` (O): answers of 1,024 tokens and up to 32 users since 2026-01-14, each setting of
  `benchmarks-history.json` at its two newest dates that no round had. O1a and O1b are one setting at two dates. The model had the
  mechanisms that were [missing](#what-was-missing) by then. The predictions were committed in {other_commit} and the results entered in the
  commit after it. Half of the rates without drafts are within {rate_median}.
  Where prompts were as long as the benchmark says, rates and TPOT are {sound_rates} off and the TTFT {sound_ttft}.
- **scripts**: 132 runs of InferenceX that no round had, in `tools/plan_data/history.csv`: 60 on one host (U), 38 with prefill and decode
  apart (S), and the TTFT of 34 with drafts (R). What its scripts say and its results do not is played: SGLang on Blackwell looks for
  prompts every 10 or 30 steps (`--scheduler-recv-interval`), TensorRT-LLM holds them back for up to 60 steps until each replica has one,
  and computes one a step before 2026-01-21; since that day two requests a user warm the engine up; recipes bound what decodes at once. The
  predictions were committed in 789df52e and the results entered in the commit after it. U45 (SGLang on B300) was sent
  [longer prompts](#prompts-that-were-longer-than-said), and TensorRT-LLM of December 2025 on B200 with `ep=8` (U29, U32, U35) was
  predicted a half too fast. First tokens that
  came ten times later than predicted (U37, U39, R6, R7, R18) most likely waited for room in the cache: what was played had a device with
  twice its memory. R2 was played with 256 requests at once, as its script says since 2026-07-02; the script of its day had 512.
- **drafts apart**: 42 runs of TensorRT-LLM with prefill and decode apart and drafts, of the same file and commits (D), as many drafts as
  their recipes say, the first accepted with 0.70. Rates are 40 % off, as those up to 320 users were played by a simulator that counted a
  step of decodes as one token; that is repaired, and the round counts as an older one. The mean-value answer of today is {apart_rate} off
  in rates and {apart_tpot} in a token's time, with the planner's own acceptance of 0.85 {apart_rate_85} and {apart_tpot_85} (`python -c
  "from tools.plan_data.history import drafts_apart_today; print(drafts_apart_today(0.85))"`; seen).
- **closed loops**: 76 runs of InferenceX on one host, played as the benchmark plays them (all users at once, ten requests of each, lengths
  from 0.8 to 1 times the given ones). Predictions were committed on their own ([how that can be checked](#order-of-commits)); of 40 of them
  nothing had been read before, of the other 36 their rate. The runs, predictions and raw columns are in `tools/plan_data/closed_loops.csv`.
- **separated**: 68 runs of InferenceX with prefill and decode apart, all that were left of that file and whose settings agree with their
  numbers of devices: `tools/plan_data/apart_loops.csv`. Predictions were committed on their own ([how that can be
  checked](#order-of-commits)). The time of a token is right within 11 to 13 %, and rates are too high, most where a service has few users
  (Z26, Z28, Z48, Z50, Z57, Z58): there the median first token came as late as a whole answer takes, so that half of the users waited for
  the other half. The settings that would say so are not in the file. With TensorRT-LLM on H200 (Z8 to Z10, Z14 to Z17) a token takes a
  quarter longer than predicted.
- **drafts**: 74 runs of InferenceX on one host with drafts by the MTP module, which no round had before: `tools/plan_data/drafts.csv`, from
  that file and `benchmarks-history.json` beside it. Predictions were committed before ([how that can be checked](#order-of-commits)), with
  the planner's own acceptance of 0.85. With `tp` (65 runs) the time of a token was predicted 27 % too short and rates 62 % too high, with
  attention DP (9) 42 % too long and 19 % too low. Why, and what is left: [below](#what-was-missing). Six rates of SGLang on B300 are more
  than twice too high, in part most likely for the kernel of their dense products ([below](#what-was-missing)), and V53 for
  [longer prompts](#prompts-that-were-longer-than-said). A plan with `--mtp` takes
  its calibrated intervals from runs with drafts alone, and no other plan does.
- **TPUs**: the one speed that sglang-jax publishes of a DeepSeek model: V2-Lite in bf16 on four chips of v6e, 8 users, `tp=4`
  (`tools/plan_data/tpu.csv`, T1). Its rate is 19 % and its TPOT 6 % off, both inside; its TTFT of 195 ms, of which 41 (33 – 63) were
  predicted, is not: prompts were taken evenly from 0 to 512 tokens, and all had 512. It is counted as another device, with wide intervals.
- **TTFT as reported** is the raw column, with the wave of all users at the start and whatever the engine compiled then: no measurement
  is corrected. Five runs of SGLang's first images for B200 (Y17, Y19, Y22, Y23, Y24) met 70 s of it; SGLang on Blackwell also answers
  later the more users there are, as it looks for prompts every 30 steps; one user of B300 waits for less than was assumed of HTTP,
  tokenising and a cold start, and one of B200 70 ms longer with the same engine and time a token. The first two are played since.
- **aiconfigurator's TTFT** cannot be set beside raw columns: what its repository has of DeepSeek-V3 (`data.csv`, H200, `tp=8`, TensorRT-LLM
  1.2.0rc2, 2,048 in, 128 out) are its own estimates, and of lengths that InferenceX does not run. Beside them, for 1, 8 and 64 users: TTFT
  196, 340 and 806 ms there, 110 (96 – 142), 129 (115 – 160) and 227 (211 – 258) here; a token 16.2, 18.4 and 62.7 ms there, 8.7, 16.7 and
  53.9 here (`dsjax plan --cluster h200-8 --engine published --mode aggregated --mesh tp=8 --redundant-experts 0 --input 2048 --output 128
  --max-concurrency 64 --kv-cache-dtype fp8 --prefill-tokens 8192`).
  Theirs takes up to four prompts in a step (its column `num_ctx_reqs`).
- **another device or engine** has nine rates, eight of them of vLLM of March 2025. Such a group borrows from all distances, and its
  intervals reach at least as far as its own predictions missed by. dsjax itself is of this group: no accelerator has run it.
- Of the intervals that hold so many predictions of a group the shortest is taken, as misses are lopsided: a first token comes late far
  more often than early.

`python tools/blind_rounds.py` writes [configs/blind_predictions.csv](../configs/blind_predictions.csv), which the planner calibrates by,
and prints the tables.

### How the intervals are made

A miss is measured in units of the prediction's own interval, softened by a constant. Until *other dates* had been read it was the own
interval alone, and a miss of a narrow one widened all others by its multiple. The constant was chosen afterwards, by what intervals come
to that rounds before each round make alone, and before the results of *last runs* were read. The *interval score* is the width in
logarithms and twenty times what a measurement lies outside by; less is better. *Closed loops* was the first round with a TTFT, of which no
round before it had any. *Last runs* and later rounds the constant had not seen. In the first, softened intervals hold more and have the
worse score, for TTFT with drafts, which nothing before had missed by so much; in the others they have the better one. Of the runs of
*drafts again* on one host without drafts {host_methods}.

{methods}

### Prompts that were longer than said

{longer} runs of *other dates*, U45 and V53 had looked like two slow versions of SGLang: with 0.5.10.post1 and 0.5.11 prompts of 8K took
1.4 to 2.1 s on all devices, with older and newer versions 0.2 to 0.4. The versions are not slow. Images from 0.5.10 on have version 5 of
Transformers, with which the benchmark's client built the tokenizer of DeepSeek-R1 otherwise than the server: 7,140 of the client's tokens
were 35,921 of the server's (SemiAnalysisAI/InferenceX pull request 937). For models that are named by their repository this was repaired
on 2026-05-15 (pull request 1381, which calls what was published until then a false regression), and six configurations were run again
(1502). Version and day of a run say which are affected (`has_long_prompts` of `tools/plan_data/protocol.py`): those that had been seen to
be slow, and no others. Played with prompts 35,921 ÷ 7,140 times as long, and nothing else changed, the {longer} runs are (seen):

| | figures | blind, prompts as said | today, prompts as sent |
|---|---|---|---|
{long_today}

A runner that had the model in a local folder was not affected (pull requests 937 and 1317), and results do not say which had: O5a and O19a
agree with prompts as said. `python -m tools.plan_data.other_dates today` plays them.

### What the intervals of a plan are of

The rounds of closed loops were played request by request; a plan's own figures are mean values of steady state. Of the runs without drafts
in *other dates* (O) both are at hand today, and how far they lie apart says which figures of a plan the rounds can calibrate:

| figure | mean-value answer ÷ played, median | error of the played one, blind | of the mean-value answer, today |
|---|---|---|---|
{mean_value}

Rates and times a token are the same within a few percent in the median, and as far off. The TTFT is another quantity: steady state has no
wave of all users at the start, and no prompts that wait for 10 to 60 steps until they are looked for. No public measurement is of the TTFT
in steady state, so that the interval of a plan's TTFT is its own, and not calibrated. `dsjax plan simulate --request-rate inf` plays the
benchmark with the code that played the rounds ([reported.py](../dsjax/plan/simulation/reported.py)), and shows calibrated ends of its
mean, median and P99.

## Seen: how far off it is today

{scores}

- **known**: points that were known while the model was written. Each run is counted once, by its rate; TTFT is scored apart, by the raw
  means that are reported.
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

- **drafts**: the rates of that round with the first draft accepted as by default (0.85), and with the 0.70 that is published for random
  prompts, of DeepSeek-V4-Flash.
- **TPUs**: decode steps of R1 in INT8 on 64 chips of v5e (jax-ml/jax-llm-examples), in steps a second. The column of bandwidth, from which
  they follow, had been read, so that they are no blind prediction. Batches of 128 are predicted half too fast: its experts' product over
  128 tokens runs far from the memory's rate, which an H200's kernel that is carried over does not.

After the committed predictions for one host the tables' sources were read again (block-FP8 products on Blackwell, sums over `tp`, small
kernels, SGLang's versions); no number was taken from the runs.

### What was missing

Mechanisms were found in raw columns and public sources after the blind rounds, and are priced since. Nothing is fitted:

- **The rank with most experts.** With few tokens a step takes as long as reading the weights of the experts that have one. The mean rank's
  were counted; the one that has most of them is waited for. It brings X35 and X36 from 18 and 16 % too fast to 2 %, and X3 from 24 to 11 %.
- **Drafts fade.** V3's one MTP module is used again on its own state, and each further draft is accepted less often than the one before
  ([drafting.py](../dsjax/plan/drafting.py) has the sources): three drafts at 0.85 yield 2.79 tokens a step, where 3.19 were counted.
- **Held prompts.** InferenceX starts TensorRT-LLM with `attention_dp_config.enable_balance`, which holds prompts back until every replica
  has some; that was the interval's end alone. Runs with attention DP and drafts were 42 % too slow, and are 11 % off on average now.
- **When prompts are taken in.** An engine that looks for prompts every 30 steps, or holds them back for 60, is played so. Of runs that had
  been seen, the median TTFT of X14 became 719 ms (717 measured, 195 before), of X4 572 (579, 149), of X8 487 (545, 133).

The rates with drafts were 57 % off blind. They are {drafts_now} off now, and {drafts_random} with the acceptance of random prompts.
The memory of B200, GB200 and GB300 is priced at what their drivers report (7.67 and 7.93 TB/s), not at the datasheet's 8.

After the round *scripts* further mechanisms were looked for where its TTFT was worst. Each is an engine's table, option or source:

- **Cut experts on Blackwell** had been carried over from an H200. aiconfigurator now has the B200's own (SGLang 0.5.14 with
  `--moe-runner-backend flashinfer_trtllm`, as the scripts start it): for a prompt of 7,373 tokens on `tp=8` 63 ms in FP8 where 39 were
  priced, and 30 in NVFP4 where 24 were. The round *other dates* was predicted with its rows for decode as well, and a token came out a
  quarter too short with 32 users (O6, O24): from 16 to 160 tokens they are faster than the memory can read the weights. Since then they
  price prefill alone, which has been seen; the round's figures stand as they were. Tables of experts that are spread over ranks do not
  say how many tokens a rank was given, and are not taken ([SOURCES.md](../configs/operators/SOURCES.md)).
- **Dense FP8 of SGLang on Blackwell.** The scripts turn DeepGEMM off and FlashInfer's product on (`SGL_ENABLE_JIT_DEEPGEMM=false`,
  `--fp8-gemm-backend flashinfer_trtllm`). Beyond 256 rows that reaches 447 to 759 TFLOP/s where DeepGEMM has 3,200 (sgl-project/sglang
  pull request 13528; of the two shapes that were timed the geometric mean is taken). The dense products of that prompt take 65 ms where
  30 were priced.
- **What a step lets through.** TensorRT-LLM asks whether each replica has a prompt of those that it has scheduled for a step
  (`_balance_adp_requests`), so that with room for one prompt a step the second waits again. Since 2026-01-29 the script for FP8 on B200
  also holds prompts back until a step is 0.8 full, for 40 steps at most (`batch_wait_timeout_iters`, `batch_wait_max_tokens_ratio`).
- **Room in the cache.** What is played has the memory that the engine's rule leaves ([will it fit](#will-it-fit)) and as many requests as
  its script allows. SGLang keeps room for 0.7 to 0.1 of running requests' outputs (`SGLANG_INIT_NEW_TOKEN_RATIO`), TensorRT-LLM for all
  of them (`GUARANTEED_NO_EVICT`).

- **Each rank has prompts of its own.** Where a step has room for one prompt a replica, the simulator let the first prompt whose
  replica had none left keep back those of other replicas, and TensorRT-LLM with drafts waited 60 steps for each of them (P11 to
  P15, P37, P38). It gives requests to ranks when it fetches them, and each rank schedules its own (`_balance_adp_requests`); they
  are now played so. This was found in the results of *last runs*.
- **Versions of SGLang on H200.** Runs up to 0.5.9 are priced with the experts' kernel of that version (`IMAGES` in
  `tools/plan_data/protocol.py` says which run had which), as had been done for X28 to X32 alone: at 16 tokens that of 0.5.10 takes a fifth
  longer.

After *last runs* SGLang's sources were read in the versions that its images have (0.5.6 to 0.5.12), and what they say is played. *Drafts
again* is the first round that was predicted with it:

- **Drafts that the host waits for.** The scripts for FP8 on B200 and B300 set `SGLANG_ENABLE_SPEC_V2=1` in the shell and do not export it.
  Up to 0.5.10 the server therefore drafts without overlapped scheduling; from 0.5.11 on it is the default. Those for FP4 and for H200
  export it. It brings P8a from 19 % too fast to 1 %.
- **Prompts apart from decodes.** A step had prompts and decodes together, which SGLang has with `--enable-mixed-chunk` alone, and never
  with drafts. TensorRT-LLM and vLLM do mix them (`Engine.mixes`).
- **Room for what is known.** The client asks for outputs of a given length (`--ignore-eos`), and the prefix cache is off. SGLang then
  admits a request where all of them find room until the last has ended (`add_one_req_ignore_eos`), whatever `new_token_ratio` says. P6a,
  which had a median TTFT of 191 s and 11 predicted, comes to 150.
- **A whole step absorbed.** With FlashInfer's attention, which the H200 scripts have, SGLang computes a step's prompts absorbed where some
  of them have cached positions and these are fewer than 8,192 (`SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD`): a prompt that the step before had
  room for in part is enough. So the first wave of 64 users with 8K is slow, and later prompts, which come alone, are not: P36b's P99
  comes from 12.5 to 16.3 s, where 19.1 were measured.
- **Captured prompts.** From 0.5.10 on, steps of up to 2,048 prompt tokens are captured in pieces, without attention DP or drafts.
- **The module's own prompts.** With drafts the MTP module goes over the prompts too, a sixtieth of a prefill step.
- **Cut experts on Blackwell** in decode take the B200's own rows where these are the slower ones, from 512 tokens on.

- **Gathered tokens.** SGLang's recipes for `dp` on B200, H100 and H200 have no all-to-all, and the planner priced DeepEP's. A step with
  prompts then sums all ranks' tokens and their results up, and one of decodes gathers and scatters them (`DpPaddingMode` of
  srt/layers/dp_attention.py). This was found in the results of *drafts again*, and no unread run has been played with it: its
  {gathered_runs} runs of SGLang with `dp` on a side come from {gathered_rates} off in rates to {gathered_rates_now}, and from
  {gathered_tpot} in a token's time to {gathered_tpot_now} (seen; `python -m tools.plan_data.drafts_again today`).

- **TensorRT-LLM of its time.** Until 2026-05-18 its images had versions up to 1.2.0rc6. A dense FP8 product of 8,192 rows on B200 took
  0.2 to 0.3 ms longer in them than in 1.3.0rc10, and whole experts were computed by the backends DEEPGEMM on B200 and CUTLASS on H200,
  as scripts and recipes say; of 1.2.0rc5 both were published (`configs/operators/tensorrt-llm-1.2.0rc5`). *All left* is the first round
  that was predicted with them: U29, U32 and U35 of *scripts* are 52 to 56 % too high, the same settings two days earlier (J39, J42,
  J45) 22 to 24 %. What the first request of each user waits for where nothing had warmed TensorRT-LLM up was taken from U19 to U60,
  and is up to five times too long for few users of H200 (J57, J61, J64).

With all this but gathered tokens, and with each rank's own prompts, the {drafting} runs of *last runs* with drafts are (seen; `python -m
tools.plan_data.last_runs today`):

| | figures | blind | today |
|---|---|---|---|
{last_today}

Not found: what SGLang's prefill in FP8 on Blackwell takes beyond what its operations do. The first wave of 512 users with 1K takes 22 s
on B200 (P5d) and 11 are played, with 8K on B300 (P27a) 126 and 90; with prefill and decode apart its prefill side computes half of what is
predicted and less (*drafts again*), in each version from 0.5.8 to 0.5.12. In FP4 it computes a third less (G9: 10,300 prompt tokens a
second a device, 15,400 predicted), and no run of TensorRT-LLM shows any of it. The loops over
requests that drafting without overlap has are no cause: of SGLang 0.5.9 they take 5 µs a request and step (2.5 ms of 512; run with
stand-ins for requests on one core of an EPYC 9004, 2026-11-27). Nor was found why TensorRT-LLM with attention DP and drafts answers two
to three times later than 60 held steps say (R10, R16, R32), and why the first wave of SGLang with FP4 on Blackwell meets 5 s with 32 users
and not with 16 (U3 to U5, U40).

{again_runs} of the 94 runs of *scripts* on one host were played again with all this, those
with answers of 1,024 tokens and few users (seen). Errors are

| | figures | blind | today |
|---|---|---|---|
{again}

`python -m tools.plan_data.history today` plays them again.

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
- **TTFT (8)** is the mean of all requests as the source reports it, of a benchmark that begins with all users at once, and is played so.
  It is {cold_low} to {cold_high} too low: the first request of each user met a cold engine (the P99 is 2.0 to 2.7 s), which is not played
  here, because the assumption on cold engines in the blind rounds was learnt from these four runs.
- **H200 with 4 and 8 users of SGLang 0.5.12 (X26, X27, X33, X34)** is an eighth to a sixth too slow. Rows of 0.5.14 are faster than the
  memory allows from 32 tokens on, and are not taken.
- **X21** (B200, TensorRT-LLM, 1K/8K, 4 users) is a quarter too fast, for no known cause.
- **G** collects prompts until all replicas have some, which is the high end of its interval.
- **A and B** are one deployment three months apart. **Point 1** is a day's average of a service with changing load, and **7**'s decode
  batch is not published: neither is counted.

## Will it fit?

Aimed at are 18 of 20 verdicts that are right (90 %). Reached are **{both_right} of {both} ({both_share}), and the aim is {reached}**:
{right} of {counted} in a first set of launches and {second_right} of {second} in a second. Of {all_failed} launches that are known to have
failed the rule calls {caught} too large; of {all_fitted} that fitted it calls {refused} so.

[`dsjax plan fit`](plan.md#will-it-fit) beside 28 public launches of DeepSeek models. The rule was committed before the launches were
looked for, and its verdicts (*said*) before any outcome was entered ([how that can be checked](#order-of-commits)); whoever wrote down the
options could see in most threads how it ended, so that only the rule is blind. Of {counted} launches whose outcome is known **{right}
verdicts are right**: {fitted_right} of {fitted} that fitted, {failed_right} of {failed} that did not. It has never called a launch too
large that fitted. It misses launches that it gave 0.1 to 17 GB to spare: memory that one version took and another did not (M5 and M6 have
the same options), compilation at the start (M17), workspaces with attention DP (M7, M12), an uneven pipeline (M9). Launches that obviously
cannot fit are seldom reported, so that such threads are the hard cases. M3 was first entered as too large and then left out. Since then the
draft model of SGLang and the scores of V3.2's indexer are counted, after issues that measure them; *today* is what is then left in the
tightest place, and has been seen.

{incidents}

**A second set.** The rule was then changed after what engines' sources and issues say (1c5a7204): where replicas share whole experts, the
arrays between both products are as wide as an expert; TensorRT-LLM computes the experts of all replicas' tokens at once; a pipeline's
fullest stage has whole layers and an end of the model; captured graphs may take 6 GB. Twelve further launches were judged by it (c480840e)
before their outcomes were entered (e4640ca7). Of {second} whose outcome is known **{second_right} verdicts are right**: {second_yes} of
{second_fitted} that fitted, {second_no} of {second_failed} that did not. N1 and N2 have the same options but for the experts' kernels,
whose scratch is published for no version.

{second_incidents}

**The dry run** counts to the byte, in the launches whose options dsjax has itself ({dry_runs} of {launches}; not those with NVFP4 or
W4AFP8, nor M9, whose `tp=32` cuts blocks of FP8 scales), what a device holds before a step: weights, state, and of vLLM the cache of the
longest request, without which it does not start. It stands beside what the fraction leaves room for, and is the least that a launch takes.
The memory of a step itself is not in it, as only XLA's compiler for GPUs tells it, which was not at hand: the program was compiled for the
CPU. Of {dry_failed} of these launches that failed {dry_caught} are too large by it, of {dry_fitted} that fitted {dry_refused}; the
outcomes had been seen. `python -m tools.plan_data.fit_dryruns` runs them anew.

`python -c "from tools.plan_data.fit_incidents import score, table; print(score(), table())"` prints the first, with `SECOND` as argument
the second; the launches with their options are in `tools/plan_data/fit_incidents.csv` and `fit_incidents_second.csv`.

## Order of commits

An order of commits shows that a measurement was entered after its prediction, not that nobody had read it before: for that there is our
word in all rounds. All predictions, and the rule of *will it fit*, were committed before the answers were entered, but not all of those
single commits were published. Those of *closed loops*, *separated*, *drafts* and *will it fit* were put together into d01a626d, those of
*last runs*, *drafts again* and *all left* into dad62522, each of which holds predictions and answers both: for these a reader has only
our word for the order. For the others the commits show it. The TPU round and the second set of launches were predicted in c480840e and
entered in e4640ca7; the rounds *scripts* and *drafts apart* were predicted in 789df52e, *other dates* in {other_commit}, and each entered
in the commit that follows it.

## With tables left out

The counted points of the first set with one table of operations left out, whose operations are then carried over from the other tables:

{without}
"""


OTHER, LAST = "other dates", "last runs"
OTHER_COMMIT = "132e5666"
"""The commit that holds predictions of *other dates*, and none of their measurements."""


LEFT_NEW = 10
"""Runs of *all left* whose setting no round had at any date: `is_new` of tools/plan_data/all_left.py, with the benchmark's files."""


def _newest() -> dict[str, str]:
    """Words of the newest round and the one before: errors, numbers of runs, and how wide the calibrated median TTFT is."""
    every = blind()
    other, last = ([b for b in every if b.round == name] for name in (OTHER, LAST))
    plain = [b for b in last if b.distance == HOST]
    sound = [b for b in other if b.distance != LONGER]
    rates = [abs(b.figure.value / b.measured - 1) for b in other if (b.kind, b.distance) == (RATE, HOST)]
    apart = {mark: drafts_apart_today(acceptance) for mark, acceptance in (("", RANDOM_ACCEPTANCE), ("_85", FIRST))}
    runs = {row["key"]: row["drafts"] for row in other_rows()}
    last_distances = {row["key"]: last_distance(row) for row in last_rows()}
    return {
        **{f"apart_{metric}{mark}": f"{size:.0%}" for mark, each in apart.items() for metric, size in each.items()},
        **_again_words(every),
        **_left_words(every),
        "last_plain_rates": f"{mean_error(plain, RATE, TPOT):.1%}",
        "last_plain_ttft": f"{mean_error(plain, TTFT_MEDIAN, TTFT_P99):.1%}",
        "plain_count": str(sum(b.kind in (RATE, TPOT) for b in plain)),
        "last_runs": str(len(last_distances)),
        "last_settings": str(len({b.run for b in last})),
        "drafting": str(sum(each == DRAFTS for each in last_distances.values())),
        "last_sent": str(sum(each == SENT for each in last_distances.values())),
        "last_today": _today(last_today()),
        "drafts_now": f"{_drafts_error(FIRST):.0%}",
        "drafts_random": f"{_drafts_error(RANDOM_ACCEPTANCE):.0%}",
        "sound_rates": f"{mean_error(sound, RATE, TPOT):.1%}",
        "sound_ttft": f"{mean_error(sound, TTFT_MEDIAN, TTFT_P99):.1%}",
        "longer": str(len({row["key"] for row in other_rows() if distance(row) == LONGER})),
        "latest": LATEST,
        "newest_rounds": ", ".join(f"*{name}*" for name in NEWEST[:-1]) + f" and *{NEWEST[-1]}*",
        "other_runs": str(len(runs)),
        "other_settings": str(len({setting_of(key) for key in runs})),
        "other_drafts": str(sum(drafts != "0" for drafts in runs.values())),
        "other_commit": OTHER_COMMIT,
        "p99_now": f"{mean_error(plain, TTFT_P99):.0%}",
        "rate_median": f"{statistics.median(rates):.0%}",
    }


def _left_words(every: list[Blind]) -> dict[str, str]:
    """Words of the newest round: its numbers of runs and errors."""
    newest = [b for b in every if b.round == NEWEST[-1]]
    apart = [b for b in newest if b.run.startswith("K")]
    here = [b for b in newest if b.run.startswith("J")]
    return {
        "left_runs": str(len({row["key"] for row in all_left.rows()})),
        "left_apart_runs": str(len({row["key"] for row in all_left.rows() if row["key"].startswith("K")})),
        "left_known": str(len({row["key"] for row in all_left.rows()}) - LEFT_NEW),
        "left_host": f"{mean_error(here, RATE, TPOT):.1%}",
        "left_apart": f"{mean_error(apart, RATE, TPOT):.1%}",
        "left_median": f"{mean_error(here, TTFT_MEDIAN):.1%}",
        "left_p99": f"{mean_error(here, TTFT_P99):.0%}",
    }


def _again_words(every: list[Blind]) -> dict[str, str]:
    """Words of the round before: its numbers of runs and errors."""
    rows_of = {row["key"]: row for row in again_rows()}
    newest = [b for b in every if b.round == LATEST]
    apart = {again_setting(key): row["engine"] for key, row in rows_of.items() if key.startswith("G")}
    of = {engine: [b for b in newest if apart.get(b.run) == engine] for engine in ("sglang", "trt")}
    here = [b for b in newest if b.run not in apart and b.distance != SENT]
    known = [b for b in newest if b.distance != SENT]
    return {
        "again_count": str(len(rows_of)),
        "again_drafting": str(sum(row["drafts"] != "0" for row in rows_of.values())),
        "again_apart": str(sum(key.startswith("G") for key in rows_of)),
        "again_sglang": str(sum(key.startswith("G") and row["engine"] == "sglang" for key, row in rows_of.items())),
        "again_host_rates": f"{mean_error(here, RATE, TPOT):.1%}",
        "again_ttft": f"{mean_error(known, TTFT_MEDIAN, TTFT_P99):.1%}",
        "again_sglang_rates": f"{mean_error(of['sglang'], RATE):.0%}",
        "again_sglang_tpot": f"{mean_error(of['sglang'], TPOT):.0%}",
        "again_trt_rates": f"{mean_error(of['trt'], RATE):.0%}",
        **_gathered(),
        "sent": str(sum(again_distance(row) == SENT for row in rows_of.values())),
    }


def _gathered() -> dict[str, str]:
    """Words of the runs of the newest round that were played again with gathered tokens: how many, and errors before and since."""
    found = again_today()
    words = {"gathered_runs": str(len({row["key"] for row in found}))}
    for kind, name in ((RATE, "rates"), (TPOT, "tpot")):
        group = [row for row in found if row["metric"] == kind]
        for which, mark in (("predicted", ""), ("today", "_now")):
            error = statistics.mean(abs(float(row[which]) / float(row["measured"]) - 1) for row in group)
            words[f"gathered_{name}{mark}"] = f"{error:.0%}"
    return words


def _drafts_error(acceptance: float) -> float:
    """Mean absolute error of today's rates of the round *drafts*, the first draft accepted so often."""
    return statistics.mean(abs(point.error) for point in points_of_today(acceptance))


def _again() -> dict[str, str]:
    """Rows of a Markdown table: errors of the round *scripts*, blind and as the model of today plays the same runs."""
    words = {
        RATE: "rates",
        TPOT: "time a token",
        TTFT: "TTFT, mean",
        TTFT_MEDIAN: "TTFT, median",
        TTFT_P99: "TTFT, P99",
    }
    found = today_rows()
    lines = []
    for drafting, mark in ((False, ""), (True, ", with drafts")):
        for kind, name in words.items():
            group = [row for row in found if row["metric"] == kind and (row["drafts"] != "0") == drafting]
            if group:
                errors = [
                    statistics.mean(abs(float(row[which]) / float(row["measured"]) - 1) for row in group)
                    for which in ("predicted", "today")
                ]
                lines.append(f"| {name}{mark} | {len(group)} | {errors[0]:.1%} | {errors[1]:.1%} |")
    return {"again": "\n".join(lines), "again_runs": str(len({row["key"] for row in found}))}


def _host_methods() -> str:
    """Words: what intervals by rounds before *drafts again* hold of its runs without drafts, with both units."""
    every = blind()
    before, group = earlier(every, LATEST), [b for b in every if (b.round, b.distance) == (LATEST, HOST)]
    words = []
    for softened, name in ((0.0, "own widths"), (SOFTENED, "softened ones")):
        ends = [calibrate(before, b.kind, b.distance, softened).interval(b.figure) for b in group]
        held = sum(low <= b.measured <= high for b, (low, high) in zip(group, ends, strict=True)) / len(group)
        width = statistics.median(high / low for low, high in ends)
        score = statistics.mean(interval_score(b, each) for b, each in zip(group, ends, strict=True))
        words.append(f"{name} hold {held:.0%} at a width of {width:.2f} and score {score:.2f}")
    return ", ".join(words)


def _today(played: list[dict[str, str]]) -> str:
    """Rows of a Markdown table: errors of these runs, as predicted blind and as the model of today plays them."""
    names = {RATE: "rates", TPOT: "time a token", TTFT_MEDIAN: "TTFT, median", TTFT_P99: "TTFT, P99"}
    lines = []
    for kind, name in names.items():
        group = [row for row in played if row["metric"] == kind]
        errors = [
            statistics.mean(abs(float(row[which]) / float(row["measured"]) - 1) for row in group)
            for which in ("predicted", "today")
        ]
        lines.append(f"| {name} | {len(group)} | {errors[0]:.1%} | {errors[1]:.1%} |")
    return "\n".join(lines)


def _fit_by_outcome() -> dict[str, str]:
    """Count in both sets of launches how many fitted and failed, and what the committed verdicts and the dry run said of these."""
    scores = [score(), score(SECOND)]
    fitted, failed = ([one[f"committed, {which}"] for one in scores] for which in ("yes", "no"))
    dry, all_fitted = dry_run_score(), sum(count for _, count in fitted)
    numbers = {
        "all_failed": sum(count for _, count in failed),
        "caught": sum(right for right, _ in failed),
        "all_fitted": all_fitted,
        "refused": all_fitted - sum(right for right, _ in fitted) or "none",
        "dry_runs": len(held()),
        "launches": len([*rows(), *rows(SECOND)]),
        "dry_failed": dry["no"][1],
        "dry_caught": dry["no"][0] or "none",
        "dry_fitted": dry["yes"][1],
        "dry_refused": dry["yes"][1] - dry["yes"][0] or "none",
    }
    return {name: str(value) for name, value in numbers.items()}


_TOGETHER = ("closed loops", "separated", "drafts", LAST, "drafts again", "all left")
"""Rounds whose predictions and measurements came into this repository in one commit."""


def _order() -> dict[str, str]:
    """Blind figures in all, and how many of them commits of this repository do and do not show to be older than the measurement."""
    rounds = [b.round for b in blind()]
    unshown = sum(name in _TOGETHER for name in rounds)
    return {"figures": f"{len(rounds):,}", "shown": f"{len(rounds) - unshown:,}", "unshown": f"{unshown:,}"}


def _mean_value() -> str:
    """Rows of a Markdown table: how the mean-value answer lies beside what was played of the runs of one host in *other dates*."""
    played = [b for b in blind() if b.round == OTHER and b.distance == HOST]
    names = {RATE: "rate", TPOT: "time a token", TTFT_MEDIAN: "TTFT, beside the reported median"}
    return "\n".join(
        f"| {names[metric]} | {ratio:.2f} | {mean_error(played, metric):.1%} | {error:.1%} |"
        for metric, (ratio, error) in mean_value_today().items()
    )


def _cold() -> dict[str, str]:
    """The least and the largest share by which predictions of point 8's TTFT lie below what is reported."""
    short = [-point.error for point in points() if point.kind == "ttft"]
    return {"cold_low": f"{min(short):.0%}", "cold_high": f"{max(short):.0%}"}


def page() -> str:
    """The page's text."""
    fits, further = score(), score(SECOND)
    both = [sum(pair) for pair in zip(fits["committed, all"], further["committed, all"], strict=True)]
    return _PAGE.format(
        counted=fits["committed, all"][1],
        right=fits["committed, all"][0],
        fitted=fits["committed, yes"][1],
        fitted_right=fits["committed, yes"][0],
        failed=fits["committed, no"][1],
        failed_right=fits["committed, no"][0],
        incidents=incidents(),
        second=further["committed, all"][1],
        second_right=further["committed, all"][0],
        second_fitted=further["committed, yes"][1],
        second_yes=further["committed, yes"][0],
        second_failed=further["committed, no"][1],
        second_no=further["committed, no"][0],
        both_right=both[0],
        both=both[1],
        both_share=f"{both[0] / both[1]:.0%}",
        **_fit_by_outcome(),
        reached="reached" if both[0] / both[1] >= 0.9 else "not reached",
        second_incidents=incidents(SECOND),
        scores=score_table(),
        aims=aims_table(),
        **_order(),
        mean_value=_mean_value(),
        methods=methods_table(),
        host_methods=_host_methods(),
        long_today=_today(other_today()),
        blind=blind_table(),
        **_newest(),
        **_again(),
        deciding=deciding_table(),
        without=leave_one_out(),
        median=median_of_wide_ep(),
        **_cold(),
    )


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
    POINTS.write_text(csv_text(), encoding="utf-8")
