"""Reads what Linux reports about processors, NUMA nodes and PCI devices in files below /sys.

A value is unknown if its file is missing or unreadable, as in many containers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

__all__ = ["names_in", "pci_address", "sysfs_numbers", "sysfs_text"]

ROOT = Path("/sys")


def sysfs_text(name: str) -> str:
    """The text of a file, or an empty string if it is unreadable."""
    try:
        return (ROOT / name).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def sysfs_numbers(name: str) -> set[int]:
    """The numbers in a file such as "0-3,8", or an empty set if it is unreadable."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", sysfs_text(name))
    return {number for first, last in spans for number in range(int(first), int(last or first) + 1)}


def names_in(name: str) -> list[str]:
    """The sorted names in a folder, or an empty list if it is unreadable."""
    try:
        return sorted(entry.name for entry in (ROOT / name).iterdir())
    except OSError:
        return []


def pci_address(gpu: Any) -> str:
    """The PCI address, such as "0000:19:00.0", of a GPU with these torch device properties."""
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
