"""Peak rates of GPUs from their data sheets: dense 16-bit matrix products and memory traffic, per second.

NVIDIA's data sheets, without sparsity: H200 and H100 SXM (989 TFLOPS BF16), H100 PCIe, A100 80GB, L40S, L4, B200."""

from __future__ import annotations

from quire.shared.metrics.worker import Peak

UNKNOWN = Peak(0.0, 0.0)
PEAKS = {
    "H200": Peak(989e12, 4.8e12),
    "H100 PCIe": Peak(756e12, 2.0e12),
    "H100": Peak(989e12, 3.35e12),
    "B200": Peak(2250e12, 8.0e12),
    "A100": Peak(312e12, 2.039e12),
    "L40S": Peak(362e12, 0.864e12),
    "L4": Peak(121e12, 0.3e12),
}


def peak_of(device_name: str, num_devices: int = 1) -> Peak:
    """Returns the peak rates of the first entry of PEAKS that the device name contains, times `num_devices`."""
    peak = next((peak for name, peak in PEAKS.items() if name in device_name), UNKNOWN)
    return Peak(peak.flops * num_devices, peak.bytes * num_devices)
