"""Numbers as text: significant digits, thousands separators, true minus signs, units; a dash for an unknown value."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeGuard

MINUS, UNKNOWN, TIMES = "\u2212", "\u2013", "\u00d7"
BREAK = re.compile(r"(?<=\w[-+=_/.,])(?=[^\W\d])|(?<=\w=)(?=\w)")  # where a name may be broken: not within numbers


def known(value: float | None) -> TypeGuard[float]:
    """Whether value is a finite number."""
    return value is not None and math.isfinite(value)


def number(value: float | None, decimals: int = 0) -> str:
    """Fixed decimals with thousands separators: 1,234.5."""
    return f"{value:,.{decimals}f}".replace("-", MINUS) if known(value) else UNKNOWN


def three_digits(value: float | None) -> str:
    """At least three significant digits: 12,409; 69.7; 0.0512."""
    return number(value, max(0, 2 - math.floor(math.log10(abs(value))))) if known(value) and value else number(value)


def signed(value: float | None, decimals: int = 4) -> str:
    """Like `number`, with an explicit sign."""
    return f"{value:+,.{decimals}f}".replace("-", MINUS) if known(value) else UNKNOWN


def decimals(low: float, high: float) -> int:
    """Decimals that show two digits of an interval's half-width: a mean is known no better. 4 without an interval."""
    half = (high - low) / 2
    return min(max(1 - math.floor(math.log10(half)), 0), 6) if known(half) and half > 0 else 4


def shared_decimals(ends: Iterable[tuple[float, float]]) -> int | None:
    """The decimals that most intervals of a column need; None without any."""
    found = sorted(decimals(low, high) for low, high in ends if high > low)
    return found[len(found) // 2] if found else None


def with_interval(
    mean: float | None, low: float, high: float, is_difference: bool = False, digits: int | None = None
) -> str:
    """`3.71 [3.60, 3.82]`; the mean alone if the interval is not finite. digits: default: see `decimals`."""
    show, digits = (signed if is_difference else number), decimals(low, high) if digits is None else digits
    if not (known(mean) and known(low) and known(high)):
        return show(mean, digits)
    # No line may break inside the brackets.
    return f"{show(mean, digits)} [{show(low, digits)},\u00a0{show(high, digits)}]"


def plus_minus(mean: float, low: float, high: float, is_difference: bool = False, digits: int | None = None) -> str:
    """`3.71 ±0.11`, the mean and the half-width; otherwise as `with_interval`."""
    show, digits = (signed if is_difference else number), decimals(low, high) if digits is None else digits
    half = f" \u00b1{number((high - low) / 2, digits)}" if known(high - low) else ""
    return f"{show(mean, digits)}{half}"


def p_value(p: float) -> str:
    """`p = 0.031` or `p < 0.001`; empty if p is nan."""
    if not known(p):
        return ""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def bare_p(p: float) -> str:
    """`0.031` or `< 0.001`, for a column headed p."""
    return p_value(p).removeprefix("p = ").removeprefix("p ") or UNKNOWN


def seed_range(needed: tuple[int | None, int | None]) -> str:
    """`5 to 152 seeds`, or `5 or more seeds` without an upper bound."""
    fewest, most = needed
    if fewest is None:
        return "over 10,000 seeds"
    if fewest == most:
        return f"about {count(fewest, 'seed')}"
    return f"{fewest:,} or more seeds" if most is None else f"{fewest:,} to {most:,} seeds"


def short(value: float | None) -> str:
    """Three significant digits with an SI prefix: 2.89 M."""
    if not known(value):
        return UNKNOWN
    rounded = float(f"{value:.3g}")  # before the choice of a prefix: 999.9 is 1 k
    scaled, prefix = scale(rounded, {"E": 1e18, "P": 1e15, "T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3})
    return f"{scaled:.3g} {prefix}".rstrip().replace("-", MINUS)


def in_bytes(count: float | None) -> str:
    """A number of bytes with a binary prefix: 512 KiB."""
    if not known(count):
        return UNKNOWN
    scaled, prefix = scale(count, {"Ti": 2**40, "Gi": 2**30, "Mi": 2**20, "Ki": 2**10})
    return f"{scaled:,.4g} {prefix}B"


def cache_and_state(per_token: float | None, state: float | None) -> str:
    """Bytes of a KV cache per token and, on a second line, of a recurrent state if there is one."""
    return f"{number(per_token)}\n+ {in_bytes(state)}" if state else number(per_token)


def scale(value: float, prefixes: Mapping[str, float]) -> tuple[float, str]:
    """A value by the first of these prefixes that it reaches; without one below them all."""
    return next(((value / size, prefix) for prefix, size in prefixes.items() if abs(value) >= size), (value, ""))


def duration(seconds: float) -> str:
    """A duration in a readable unit: `45 s`, `12 min`, `3.5 h`, `4.2 days`, `28.6 years`."""
    for limit, unit, size in ((90, "s", 1), (5400, "min", 60), (48 * 3600, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.{1 if unit == 'h' else 0}f} {unit}"
    days = seconds / 86400
    return f"{days:.1f} days" if days < 730 else f"{days / 365.25:,.1f} years"


def rank(interval: tuple[int, int] | None) -> str:
    """`2`, or `1 to 3`; a dash without one."""
    if interval is None:
        return UNKNOWN
    best, worst = interval
    return f"{best}" if best == worst else f"{best}\u00a0to\u00a0{worst}"


def percent(fraction: float | None) -> str:
    """A fraction as a percentage."""
    return f"{number(100 * fraction, 1)}%" if known(fraction) else UNKNOWN


def residual(fraction: float | None) -> str:
    """A signed fraction as a percentage: −0.30%."""
    return f"{signed(100 * fraction, 2)}%" if known(fraction) else UNKNOWN


def learning_rate(value: float | None) -> str:
    """0.002, or 3e−5."""
    if not known(value):
        return UNKNOWN
    return f"{value:.3g}".replace("e-0", "e-").replace("-", MINUS)


def count(n: int, noun: str) -> str:
    """`1 seed`, `3 seeds`."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def break_name(name: str, width: int) -> list[str]:
    """A name on lines of at most `width` characters, broken after a sign if possible: `relu-`, `small-20`."""
    lines = [""]
    for part in re.split(rf"{BREAK.pattern}|(?<=\s)", name):
        for piece in re.findall(f".{{1,{width}}}", part):
            if lines[-1] and len(lines[-1] + piece.rstrip()) > width:
                lines.append("")
            lines[-1] += piece
    return [line.rstrip() for line in lines]


def conjoin(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([*([", ".join(items[:-1])] if len(items) > 1 else []), *items[-1:]])


def enumerate_some(items: Sequence[str], limit: int, separator: str = ", ") -> str:
    """The first `limit` items, and the number of the others: `a, b, and 3 more`."""
    more = [f"and {len(items) - limit} more"] if len(items) > limit else []
    return separator.join([*items[:limit], *more])
