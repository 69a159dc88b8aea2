"""Numbers with units, as a person reads them."""


def in_bytes(count: float) -> str:
    """Bytes in the unit that leaves the fewest digits: 512 KiB."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 2**power:
            return f"{count / 2**power:,.4g} {unit}"
    return f"{count:,.4g} B"


def duration(seconds: float) -> str:
    """Seconds as a person says them: `45 s`, `12 min`, `3.5 h`, `4.2 days`."""
    for limit, unit, size in ((90, "s", 1), (5400, "min", 60), (48 * 3600, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.{1 if unit == 'h' else 0}f} {unit}"
    return f"{seconds / 86400:.1f} days"
