"""What each communication backend can do, as data."""

DEVICE_TYPES = frozenset({"cpu", "cuda", "npu", "xpu"})
