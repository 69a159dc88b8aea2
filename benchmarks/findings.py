"""What a benchmark found, beside its goals."""

from dataclasses import dataclass

from llama_lab.util.formatting import three_digits


@dataclass(frozen=True)
class Finding:
    """A value, and whether it meets its goal.

    value: in `unit`; None for what could not be measured, for which the note is the reason. goal: the lowest value that
    meets it, or the highest if `at_most`; None for none.
    """

    name: str
    value: float | None
    unit: str = ""
    goal: float | None = None
    at_most: bool = False
    note: str = ""

    @property
    def outcome(self) -> str:
        """`met` or `not met`; `measured` without a goal; `not measured` without a value."""
        if self.value is None:
            return "not measured"
        if self.goal is None:
            return "measured"
        return "met" if (self.value <= self.goal if self.at_most else self.value >= self.goal) else "not met"

    def __str__(self) -> str:
        value = "" if self.value is None else f"{three_digits(float(self.value))} {self.unit}".rstrip() + ", "
        goal = "" if self.goal is None else f"goal {'at most' if self.at_most else 'at least'} {self.goal:g}, "
        return f"{self.name}: {value}{goal}{self.outcome}{f' ({self.note})' if self.note else ''}"
