"""Clusters and precisions of measured devices (`--measured`), and the user's own devices in operator tables."""

import dataclasses

from dsjax.config import ModelConfig
from dsjax.config.weights import PACKED
from dsjax.hardware import Hardware, bundled_hardware, load_hardware
from dsjax.hardware.this_machine import cpu_name
from dsjax.plan.cluster import Cluster, load_cluster
from dsjax.plan.measured import Measured
from dsjax.plan.operator_tables import OperatorTables
from dsjax.plan.precision import BF16, FP8_BLOCK, FP8_CACHE, Precision, named_precision
from dsjax.plan.rules import refuse

THIS_MACHINE = "this-machine"
_DEFAULT = "h100-32"
_BYTES = {"f32": 4.0, "bf16": BF16, "fp8": FP8_BLOCK, "float32": 4.0, "bfloat16": BF16, "float8_e4m3fn": FP8_CACHE}
_CACHES = {"bfloat16": "bf16", "float8_e4m3fn": "fp8"}


def find_cluster(name: str | None, measured: Measured | None) -> Cluster:
    """Return the cluster of a plan. name: None selects the measured devices, or the default cluster if nothing was measured.

    Raises:
        UserError: the file was measured on other devices than the cluster's, or `this-machine` is given without a file.
    """
    cluster = None if name == THIS_MACHINE or (measured and name is None) else load_cluster(name or _DEFAULT)
    refuse("measured", name=name, measured=measured, cluster=cluster, here=cpu_name())
    return cluster or _of_device(measured)


def with_tables(cluster: Cluster, tables: OperatorTables) -> tuple[Cluster, OperatorTables]:
    """Resolve the cluster's devices in the operator tables. Return both, with the user's devices added to tables that name them.

    A device with a bundled device's die, units, memory bandwidth and link counts as that device, whatever its file is called. A device
    without `operators` uses its own tables if they exist, else the H200's, scaled.

    Raises:
        UserError: `operators` names a device without tables.
    """
    if cluster.prefill is not None:
        known, tables = with_tables(cluster.prefill, tables)
        cluster = dataclasses.replace(cluster, prefill=known)
    chip = cluster.hardware
    refuse("tables", chip=chip, devices=tables.devices)
    if chip.key in bundled_hardware():
        return cluster, tables
    if chip.key in tables.devices:
        if any(known.key == chip.key for known in tables.own_hardware):  # as it was timed, before a sweep scaled it
            return cluster, tables
        return cluster, dataclasses.replace(tables, own_hardware=(*tables.own_hardware, chip))
    chip = dataclasses.replace(chip, operators=chip.operators or "h200")
    alike = (known.key for known in map(load_hardware, bundled_hardware()) if _timed_alike(known) == _timed_alike(chip))
    return dataclasses.replace(cluster, hardware=dataclasses.replace(chip, key=next(alike, chip.key))), tables


def _timed_alike(chip: Hardware) -> tuple:
    """Return the properties of a device that operator times depend on."""
    units = (chip.platform, chip.die, chip.operators, *chip.peaks.items())
    return (*units, chip.memory_bandwidth, chip.scale_up_bandwidth)


def _of_device(measured: Measured) -> Cluster:
    """Return a cluster of one host with the measured devices. An unknown device gets the file's ceilings."""
    device = measured.device
    count = device.count
    if device.hardware:
        chip = load_hardware(device.hardware)
    else:
        ceilings = measured.ceilings
        bandwidths = dict.fromkeys(("memory_bandwidth", "scale_up_bandwidth"), ceilings.bytes_per_s)
        computed = dict.fromkeys(("bf16_flops", "fp8_flops"), ceilings.flops_per_s)
        fields = ("memory_bytes", *bandwidths, *computed, "scale_up_devices")
        chip = Hardware(
            key=device.name,
            name=device.name,
            platform=device.platform,
            memory_bytes=device.memory_bytes,
            **bandwidths,
            **computed,
            scale_up_devices=count,
            devices_per_host=count,
            scale_out_gbps=1.0,
            sources=dict.fromkeys(fields, ceilings.source),
        )
    nothing = f"one host with {count} device{'s' * (count > 1)}: nothing is sent between hosts"
    return Cluster(
        name="measured device",
        description=f"{count} × {device.name}",
        hardware=chip,
        hosts=1,
        devices_per_host=count,
        scale_up_devices=count,
        network="none",
        network_gbps=1.0,
        nics_per_host=1,
        latency=1e-6,
        latency_low=1e-6,
        latency_high=1e-6,
        sources={"network": nothing},
    )


def choose_precision(name: str, cache: str, config: ModelConfig, measured: Measured | None) -> Precision:
    """Resolve `--precision` and `--kv-cache-dtype`. `auto` selects the measured formats if there is a file; the experts' format with a bf16
    cache for a model with packed experts; else fp8.

    Raises:
        UserError: an unknown name, or a format other than the file's.
    """
    if measured is None:
        is_packed = config.quantization is not None and config.quantization.weights in PACKED
        if name == "auto" and is_packed:
            return named_precision(config.quantization.weights, "bf16" if cache == "auto" else cache)
        return named_precision("fp8" if name == "auto" else name, cache)
    of_cache = _CACHES.get(measured.kv_cache_dtype)
    refuse("formats", weights=name, cache=cache, measured=measured, of_cache=of_cache)
    weights = measured.weights
    expert, linear = (BF16, 4.0) if weights == "mixed" else (_BYTES[weights],) * 2
    described = f"{weights} weights, {measured.dtype}"
    return Precision(described, expert, linear, _BYTES[measured.kv_cache_dtype], _BYTES[measured.dtype])
