"""The hardware files: complete, sourced, and of the right order."""

import re
from importlib import resources

import pytest

from dsjax.errors import UserError
from dsjax.hardware import bundled_hardware, load_hardware


def test_every_bundled_file_loads_with_a_source_for_every_figure():
    names = bundled_hardware()
    assert {"h100", "h200", "h800", "h20", "b200", "gb200", "tpu-v5e", "tpu-v6e"} <= set(names)
    for name in names:
        hardware = load_hardware(name)
        assert hardware.key == name
        assert hardware.fp8_flops >= hardware.bf16_flops > hardware.memory_bandwidth > hardware.scale_up_bandwidth
        assert hardware.scale_up_bandwidth > hardware.scale_out_gbps * 1e9 / 8 > 1e9
        assert hardware.sources.keys() >= {"memory_bytes", "memory_bandwidth", "bf16_flops", "scale_up_bandwidth"}


def test_a_file_of_the_users_needs_every_field_and_every_source(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\ncolour = 3\n')
    with pytest.raises(UserError, match=r"missing platform.*unknown colour"):
        load_hardware(file)
    with pytest.raises(UserError, match=r"no hardware 'h300'.*h200"):
        load_hardware("h300")
    fields = "platform memory_bytes memory_bandwidth bf16_flops fp8_flops scale_up_bandwidth scale_up_devices"
    lines = ['name = "mine"', 'platform = "cuda"', "xla = {}", "sources = {}"]
    lines += [f"{n} = 1" for n in (*fields.split()[1:], "devices_per_host", "scale_out_gbps")]
    file.write_text("\n".join(lines))
    with pytest.raises(UserError, match="no source for xla, memory_bytes"):
        load_hardware(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"it is not UTF-8 text\); expected a TOML file"):
        load_hardware(file)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("devices_per_host = 0", "devices_per_host is 0, expected `int` >= 1"),
        ('memory_bandwidth = "fast"', "memory_bandwidth is 'fast', expected `float`"),
        ("memory_bandwidth = inf", "memory_bandwidth is inf, expected `float` <="),
        ("memory_bytes = 1.5", "memory_bytes is 1.5, expected `int`"),
        ("name = 200", "name is 200, expected `str`"),
        ('sources = "a datasheet"', "sources is 'a datasheet', expected `object`"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(tmp_path, found, message):
    text = (resources.files("configs") / "hardware" / "h200.toml").read_text(encoding="utf-8")
    field, file = found.partition(" ")[0], tmp_path / "mine.toml"
    lines = [line for line in text.partition("[xla]")[0].splitlines() if not line.startswith(f"{field} =")]
    file.write_text("\n".join([*lines, *["sources = {}"] * (field != "sources"), found, ""]))
    with pytest.raises(UserError, match=re.escape(f"hardware 'mine': {message}")):
        load_hardware(file)
