"""Module times on a GPU: what is timed runs there, and no figure exceeds what the device can do."""

import pytest

from dsjax.bench.modules.grid import cases
from dsjax.bench.modules.options import MODULES, ModelOptions, ModuleGrid
from dsjax.bench.modules.run import run_cases
from dsjax.bench.modules.setting import Device, find_ceilings, make_setting
from dsjax.bench.modules.timing import Budget

pytestmark = pytest.mark.gpu


def test_v3_s_modules_run_at_true_widths_within_the_device_s_ceilings(gpu):
    """A rank's 8 experts, two MLA forms; a module that reads its weights from memory cannot be faster than memory."""
    setting = make_setting(ModelOptions(weights="bf16", max_model_len=2048))
    device, budget = Device.of(gpu), Budget(0.2, 5)
    ceilings = find_ceilings(setting, device, None, budget)
    grid = ModuleGrid(tokens="8,64", contexts="1024", forms="CC,A_CC_ME", experts=8)
    found = run_cases(setting, cases(setting, grid), ceilings, budget, 60.0)
    assert {row.case.module for row in found.rows} == set(MODULES) - {"dispatch"}
    for row in found.rows:
        if row.in_device_loop and row.case.work.weight_bytes > 100e6:
            # 10 %: the vendor's bandwidth is a round figure, and 512 MiB of weights leave a tenth in a 50 MB cache.
            assert row.case.work.weight_bytes / row.times.median < 1.1 * ceilings.bytes_per_s, row.case.title
        assert row.case.work.flops / row.times.median < 1.05 * ceilings.flops_per_s, row.case.title
