"""The table of devices: figures that logs and data sheets fix, and names that are found however they are written."""

import pytest

from twinpool.errors import ConfigError
from twinpool.plan.devices import Device, devices, find_device
from twinpool.units import GIB


def test_an_rtx_4090_is_free_to_the_bytes_that_logs_show() -> None:
    assert 22.93 * GIB <= find_device("RTX 4090").pre_load_bytes <= 23.12 * GIB


@pytest.mark.parametrize("name", ["H100", "h100", "NVIDIA H100 80GB HBM3", "h100-sxm", "H100_80GB"])
def test_names_are_found_however_they_are_written(name: str) -> None:
    assert find_device(name).name == "H100"


def test_h100_figures_are_dense_and_in_bytes_and_flops() -> None:
    device = find_device("H100")
    assert device.memory_bytes == round(79.65 * GIB)
    assert device.pre_load_bytes == round(79.65 * GIB) - round(0.9 * GIB)
    assert device.bandwidth_bytes_per_s == 3350e9
    assert (device.bf16_flops, device.fp8_flops) == (989.4e12, 1978.9e12)
    assert (device.host_link_bytes_per_s, device.link_bytes_per_s) == (64e9, 450e9)


def test_no_name_or_alias_stands_for_two_devices() -> None:
    names = [name for device in devices() for name in (device.name, *device.aliases)]
    assert len({name.replace(" ", "").replace("-", "").casefold() for name in names}) == len(names)
    assert all(find_device(name).name == device.name for device in devices() for name in (device.name, *device.aliases))


def test_a_miss_names_the_nearest_and_the_whole_list() -> None:
    with pytest.raises(ConfigError, match=r"^--gpu 'H1000' is not .*; nearest: .*H100.*; known: H20, .*, CPU; for any"):
        find_device("H1000")


def test_a_miss_without_neighbours_still_lists_what_is_known() -> None:
    with pytest.raises(ConfigError, match=r"^--gpu 'abacus' is not in the table of devices; known: H20, "):
        find_device("abacus")


def test_the_cpu_has_no_memory_of_its_own() -> None:
    cpu = find_device("cpu")
    assert (cpu.memory_bytes, cpu.pre_load_bytes, cpu.unified) == (0, 0, True)


@pytest.mark.parametrize("device", [device for device in devices() if device.name != "CPU"], ids=lambda d: d.name)
def test_figures_are_of_the_right_size(device: Device) -> None:
    assert 20 * GIB < device.pre_load_bytes < device.memory_bytes < 300 * GIB
    assert 0.2e12 < device.bandwidth_bytes_per_s <= 8e12
    assert 50e12 < device.bf16_flops < 3e15
    # An 8-bit product runs at twice the rate, where the hardware has it: sparse figures for one of the two would show.
    assert device.fp8_flops == 0 or 1.98 < device.fp8_flops / device.bf16_flops < 2.03
    assert device.source
