"""The acceptance checklist of a deployment plan, run against a server: `dsjax accept`.

Kinds of measurements (fields in a criteria file: values that criteria bound). Optional fields have defaults.

- `server`: `max_model_len`, `devices`, from `/v1/models` and `/server_info`
- `ttft` (`input_tokens`, `requests`): `ttft_p50`, `ttft_p95`, `ttft_p99`, `ttft_mean`, `error_share`. One request at a time, one token each
- `load` (`sessions` or `request_rate`, `seconds`, `input_tokens`, `output_tokens`, `spread`: lengths are mean × (1 ± spread), `windows`):
  `output_tokens_per_s`, `total_tokens_per_s` (with prompts whose first token came in the measured time), `sessions_at_once`, `error_share`,
  `ttft_p50`, `ttft_p99`, `ttft_mean`, `tpot_p50`, `tpot_p99`, `itl_p99`, `generation_p99` (first to last token), `ttft_drift` and
  `tpot_drift` (Theil–Sen slope over the windows' medians × length ÷ median), `outages` (of `/v1/models`), `restarts` (counters began anew),
  `memory_share` (largest, of a device), `memory_drift`. Measuring starts when as many requests were answered as there are sessions
- `balance` (fields of `load`): `rank_variation`, `expert_variation` (standard deviation ÷ mean of tokens), `balancedness`, `steps`,
  `rebalances_per_1000_steps`, `rebalance_pause` (no step computed), `rebalance_seconds` (decision to last layer)
- `fault` (`hook`, `value`, `sessions`, `settle`, `before`, `hold`, `watch` in seconds, and the lengths of `load`): `throughput_loss`,
  `ttft_growth`, `error_share`, `silence` (longest time without a token on any stream), `recovery` (end of the fault until two seconds'
  tokens are back at 90 % of the rate before)
- `link` (`group`: pair, host, hosts, experts or tp, `collective`, `between_hosts`, `bytes`), a row of `--network`: `latency_us`,
  `gb_per_s` and `gbit_per_s` (bytes that leave a device ÷ time), `aggregate_gbit_per_s` (of all hosts)

Nothing here imports JAX.
"""
