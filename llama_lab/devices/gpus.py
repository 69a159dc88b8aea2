"""Memory of NVIDIA's data-centre GPUs, and their peaks, of which MFU is a fraction."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """memory: bytes. peak: dense bf16 FLOP/s."""

    memory: float
    peak: float


# From NVIDIA's data sheets, in the order in which a name is looked up; sparse peaks are halved, and a GB is 1e9 bytes.
# For devices that are not here no MFU is reported: none is better than a wrong one.
DEVICES = {
    "GB200": Device(186e9, 2500e12),
    "B200": Device(180e9, 2250e12),
    "GH200": Device(96e9, 989e12),
    "H200": Device(141e9, 989e12),
    "H100 PCIe": Device(80e9, 756e12),
    "H100 NVL": Device(94e9, 835e12),
    "H100": Device(80e9, 989e12),
    "A100 40GB": Device(40e9, 312e12),
    "A100": Device(80e9, 312e12),
    "A40": Device(48e9, 150e12),
    "A30": Device(24e9, 165e12),
    "A10": Device(24e9, 125e12),
    "A10G": Device(24e9, 70e12),
    "L40S": Device(48e9, 362e12),
    "L40": Device(48e9, 181e12),
    "L4": Device(24e9, 121e12),
}


def named(device_name: str) -> Device | None:
    """The device with the driver's name `device_name`; None if it is not in the table."""
    return next((device for name, device in DEVICES.items() if re.search(rf"\b{name}\b", device_name)), None)


def options() -> dict[str, Device]:
    """The devices by their names on the command line: `h100_pcie`."""
    return {name.lower().replace(" ", "_"): device for name, device in DEVICES.items()}
